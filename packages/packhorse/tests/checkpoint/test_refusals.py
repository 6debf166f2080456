"""What people pass by mistake: each gets a sentence of its own that says what it is and what to do.

The files are real ones of their formats wherever a library is there that writes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from packhorse import checkpoint
from packhorse.checkpoint import files, sources
from packhorse.checkpoint.tensorflow import tf1
from packhorse.errors import CheckpointError, InputError

INDEX, DATA = "m.ckpt.index", "m.ckpt.data-00000-of-00001"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The folder of a TensorFlow checkpoint, without a pointer to it, as they are published."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    tf1.write(folder / "m.ckpt", {"v": torch.arange(6.0), "w": torch.ones(2, 3)})
    (folder / "checkpoint").unlink()
    assert checkpoint.read(folder).tensors.keys() == {"v", "w"}  # whole, as yet
    return folder


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    assert "frozen graph of TensorFlow" not in str(caught.value)
    return str(caught.value)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-9],
    "empty": lambda content: b"",
    "junk": lambda content: b"no index at all " * 9,
}


@pytest.mark.parametrize("name", ["", "m.ckpt", INDEX, DATA])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_index_is_named(case: str, name: str, bundle: Path) -> None:
    index = bundle / INDEX
    index.write_bytes(DAMAGE[case](index.read_bytes()))
    (bundle / "other.pb").write_bytes(b"")  # which is not taken in its stead
    size = index.stat().st_size
    message = refused(bundle / name)
    assert message.startswith(f"{index} is damaged or no index of a TensorFlow checkpoint")
    assert f"{size} bytes" in message


@pytest.mark.parametrize("name", ["", "m.ckpt", DATA])
def test_a_missing_index_is_named(name: str, bundle: Path) -> None:
    (bundle / INDEX).unlink()
    assert f"there is no {INDEX} beside it" in refused(bundle / name)


@pytest.mark.parametrize("name", ["", "m.ckpt", INDEX])
def test_missing_data_are_named(name: str, bundle: Path) -> None:
    (bundle / DATA).unlink()
    assert f"there is no {DATA}" in refused(bundle / name)


def test_an_index_of_something_else(bundle: Path) -> None:
    """Without data beside it, an index says nothing as long as there are weights."""
    (bundle / DATA).unlink()
    (bundle / INDEX).write_bytes(b"of books")
    assert f"{bundle / INDEX} is damaged or no index" in refused(bundle)
    (bundle / "frozen.pb").write_bytes(b"")
    assert sources.find(bundle).format == "frozen"


def hdf5(path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py, which comes with TensorFlow, is not installed")
    with h5py.File(path, "w") as file:
        file["kernel"] = np.ones(3)


def flax(path: Path) -> None:
    path.write_bytes(b"\x81\xa4bert\x80")


def arrays(path: Path) -> None:
    np.savez(path, kernel=np.ones((2, 3), "f4"))


FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "tf_model.h5": (hdf5, "from_pretrained('{folder}', from_tf=True).save_pretrained"),
    "flax_model.msgpack": (flax, "from_pretrained('{folder}', from_flax=True).save_pretrained"),
    "arrays.npz": (arrays, "numpy.load('{file}')"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_weights_of_other_programs(name: str, tmp_path: Path) -> None:
    write, line = FOREIGN[name]
    write(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path / name, tmp_path):
        message = refused(path)
        assert message.startswith(f"{tmp_path / name} ")
        assert line.format(file=tmp_path / name, folder=tmp_path) in message


def test_foreign_files_are_recognized_by_their_bytes(tmp_path: Path) -> None:
    """By another name they are the same; by their name alone they are nothing."""
    for name, (write, _) in FOREIGN.items():
        if name != "flax_model.msgpack":
            write(tmp_path / name)
            (tmp_path / name).rename(tmp_path / "thing")
            message = sources.foreign_file(tmp_path / "thing") or ""
            assert message.startswith(f"{tmp_path / 'thing'} ")
            (tmp_path / name).write_bytes(b"something else")
            assert "is no checkpoint that is known here" in refused(tmp_path / name)
    torch.save({"a.npy": torch.ones(2)}, tmp_path / "weights")
    assert sources.foreign_file(tmp_path / "weights") is None


def test_the_line_for_arrays_converts_them(tmp_path: Path) -> None:
    arrays(tmp_path / "arrays.npz")
    code = refused(tmp_path).partition('python -c "')[2].partition('"')[0]
    exec(code, {})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["kernel"], torch.ones(2, 3))
    assert checkpoint.read(tmp_path).tensors.keys() == {"kernel"}


@pytest.mark.parametrize("name", ["graph.pbtxt", "saved_model.pbtxt"])
def test_a_graph_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('node {\n  name: "x"\n  op: "Const"\n}\n')
    assert "written as text" in refused(tmp_path / name)
    expected = "SavedModel" if name.startswith("saved") else "written as text"
    assert expected in refused(tmp_path)


def test_an_object_checkpoint_of_tensorflow_2(tf: Any, tmp_path: Path) -> None:
    """Numbered, as Keras does it; what has names is not refused for being one."""
    layer, module, named = tf.Module(), tf.Module(), tf.Module()
    layer.kernel, named.kernel = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    setattr(module, "layer_with_weights-0", layer)
    tf.train.Checkpoint(encoder=module).write(str(tmp_path / "garden"))
    tf.train.Checkpoint(encoder=named).write(str(tmp_path / "named"))
    message = refused(tmp_path / "garden")
    assert "encoder/layer_with_weights-0/kernel" in message
    assert "convert_bert_original_tf2_checkpoint_to_pytorch" in message
    assert f"--tf_checkpoint_path {tmp_path / 'garden'} " in message
    assert checkpoint.read(tmp_path / "named").tensors.keys() == {"encoder/kernel"}


@pytest.mark.parametrize("content", [b"", b"# Read me\n", b"%PDF-1.7\n", bytes(range(256))])
def test_unknown_bytes_are_refused_with_the_known_formats(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thing.dat"
    path.write_bytes(content)
    message = refused(path)
    assert message.startswith(f"{path} ({len(content)} bytes) is no checkpoint that is known here")
    assert all(format in message for format in sources.FORMATS.values())


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_the_index_of_shards_means_its_folder(kind: str, save: Any) -> None:
    _, folder = save("BertModel", shard="20KB")
    index = folder / f"{kind}.index.json"
    if kind == "pytorch_model.bin":
        settings = json.loads((folder / "model.safetensors.index.json").read_text())
        (folder / "model.safetensors.index.json").unlink()
        home = {
            name: shard.replace("safetensors", "bin")
            for name, shard in settings["weight_map"].items()
        }
        for shard in folder.glob("*.safetensors"):
            torch.save(load_file(shard), shard.with_suffix(".bin"))
            shard.unlink()
        index.write_text(json.dumps({"weight_map": home}))
    assert len(list(folder.glob("*-of-*"))) > 1
    whole, result = checkpoint.read(folder), checkpoint.read(index)
    assert result.tensors.keys() == whole.tensors.keys() and result.files == whole.files
    shutil.copy(index, folder / "other.json")
    assert "is no checkpoint that is known here" in refused(folder / "other.json")


def test_a_folder_that_is_not_empty_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with (
        pytest.raises(InputError, match=r"pass --overwrite \(overwrite=True\)"),
        files.new_folder(tmp_path, overwrite=False),
    ):
        pass
