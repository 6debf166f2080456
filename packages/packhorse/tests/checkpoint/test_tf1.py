"""Checkpoints that TensorFlow wrote, read as TensorFlow reads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.tensorflow import tf1, tf1_index
from packhorse.errors import CheckpointError


def read_with_tensorflow(tf: Any, path: Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def same(loaded: torch.Tensor, want: np.ndarray) -> bool:
    return (
        tuple(loaded.shape) == want.shape
        and str(loaded.dtype).removeprefix("torch.") == want.dtype.name
        and loaded.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == want.tobytes()
    )


def everything(contents: Contents) -> dict[str, torch.Tensor]:
    """Weights, and slots under names that tell them apart."""
    slots = {f"{w}:{k}": t for k, of in contents.slots.items() for w, t in of.items()}
    return contents.tensors | slots


def save(tf: Any, prefix: Path, tensors: dict[str, Any], slices: list[str] | None = None) -> Path:
    """What the Saver's own operation writes; `slices` are as it spells them, "" for none."""
    names, values = zip(*tensors.items(), strict=True)
    names = [name.partition("#")[0] for name in names]  # slices of one tensor share its name
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=slices or [""] * len(names),
        tensors=[tf.constant(value) for value in values],
    )
    return prefix


@pytest.fixture(scope="module")
def trained(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, partitioned variables, Adam and a step, by TF1's own Saver."""
    folder, v1 = tmp_path_factory.mktemp("trained"), tf.compat.v1
    normal = v1.random_normal_initializer(seed=1)
    with tf.Graph().as_default():
        for number in range(2):
            with tf.device(f"/cpu:{number}"):
                v1.get_variable(f"v{number}", (3,), initializer=normal)
        for name, shape, axis in (
            ("rows", (7, 4), 0),
            ("columns", (5, 9), 1),
            ("cube", (2, 8, 3), 1),
        ):
            cut = v1.fixed_size_partitioner(3, axis=axis)
            v1.get_variable(name, shape, initializer=normal, partitioner=cut)
        step = v1.train.get_or_create_global_step()
        loss = tf.add_n([tf.reduce_sum(v**2) for v in v1.trainable_variables()])
        train = v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            session.run(train)
            v1.train.Saver(sharded=True).save(session, str(folder / "model.ckpt"), global_step=step)
    return folder


def test_the_real_one(tf: Any, shared_data: Path) -> None:
    prefix = shared_data / "tf1" / "keras_bert_tiny" / "bert_model.ckpt"
    want = read_with_tensorflow(tf, prefix)
    contents = tf1.read(prefix, slots=True)
    assert (contents.format, contents.step, contents.notes) == ("tf1", 20, ())
    result = everything(contents)
    spelled = {name.replace("/adam_", ":"): value for name, value in want.items()}
    assert spelled.pop("global_step") == 20
    assert len(want) == 139 and result.keys() == spelled.keys()
    assert all(same(result[name], value) for name, value in spelled.items())
    alone = tf1.read(prefix)
    assert len(alone.tensors) == 46 and not alone.slots and alone.step == 20
    assert alone.notes == ("optimizer state left out: 46 adam_m, 46 adam_v",)


def test_shards_slices_and_slots(tf: Any, trained: Path) -> None:
    want = read_with_tensorflow(tf, trained)
    contents = tf1.read(trained, slots=True)
    assert len(contents.files) == 4 and contents.step == 2
    assert contents.tensors.keys() == {"v0", "v1", "rows", "columns", "cube"}
    for name, tensor in contents.tensors.items():
        assert same(tensor, want[name]), name
        assert same(contents.slots["m"][name], want[f"{name}/Adam"])
        assert same(contents.slots["v"][name], want[f"{name}/Adam_1"])
    assert contents.notes == ("optimizer state left out: 1 beta1_power, 1 beta2_power",)
    assert len(want) == 5 * 3 + 3


def test_every_dtype(tf: Any, tmp_path: Path) -> None:
    numbers = tf.reshape(tf.range(6), (2, 3))
    tensors = {
        str(code): tf.cast(numbers, tf.as_dtype(code)) for code in tf1_index.DTYPES if code != 10
    }
    tensors |= {"bool": numbers > 2, "scalar": 1.5, "empty": tf.zeros((3, 0)), "é": [1]}
    save(tf, tmp_path / "x", tensors)
    result = tf1.read(tmp_path / "x").tensors
    want = read_with_tensorflow(tf, tmp_path / "x")
    assert result.keys() == want.keys() and len(result) == len(tf1_index.DTYPES) + 3
    assert all(same(result[name], value) for name, value in want.items())


def test_an_index_of_many_blocks(tf: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    names = [bytes(rng.integers(97, 123, 100).astype(np.uint8)).decode() for _ in range(5_000)]
    save(tf, tmp_path / "x", {name: number for number, name in enumerate(names)})
    assert (tmp_path / "x.index").stat().st_size > 2 << 18  # TensorFlow's blocks have 2**18 bytes
    result = tf1.read(tmp_path / "x").tensors
    assert {name: int(value) for name, value in result.items()} == {
        name: number for number, name in enumerate(names)
    }


@pytest.mark.parametrize(
    ("shape", "axis", "sizes"),
    [
        ((5, 3), 0, (2, 2, 1)),
        ((900, 700), 1, (100, 600)),  # more than a chunk, in rows shorter than one
        ((3, 600_000), 1, (1, 299_999, 300_000)),  # rows longer than a chunk
        ((2, 3, 4, 5), 2, (3, 1)),
        ((1_100_000,), 0, (1, 65, 1_099_934)),
        ((4, 2), 0, (4,)),
        ((3, 0), 0, (1, 2)),
        ((130, 8_200, 1), 1, (8_192, 8)),
    ],
)
def test_slices(
    shape: tuple[int, ...], axis: int, sizes: tuple[int, ...], tf: Any, tmp_path: Path, rng: Any
) -> None:
    """Cut along any axis, and whatever the lengths that their keys encode."""
    whole = rng.integers(0, 1 << 30, shape).astype(np.int32)
    parts = np.split(whole, np.cumsum(sizes)[:-1], axis)
    starts = [0, *np.cumsum(sizes)[:-1]]
    spelled = [
        " ".join(map(str, shape))
        + " "
        + ":".join(f"{start},{size}" if d == axis else "-" for d in range(len(shape)))
        for start, size in zip(starts, sizes, strict=True)
    ]
    tensors = {f"w#{number}": part for number, part in enumerate(parts)}
    order = np.argsort(rng.random(len(parts)))  # TensorFlow writes them in any order
    shuffled = {f"w#{n}": tensors[f"w#{n}"] for n in order}
    save(tf, tmp_path / "x", {**shuffled, "z": 1}, [*(spelled[n] for n in order), ""])
    result = tf1.read(tmp_path / "x").tensors
    assert np.array_equal(result["w"].numpy(), whole)
    assert not whole.size or np.array_equal(read_with_tensorflow(tf, tmp_path / "x")["w"], whole)


def test_slices_along_two_axes_are_refused(tf: Any, tmp_path: Path) -> None:
    tensors = {f"w#{n}": np.full((1, 1), n) for n in range(4)}
    spelled = [f"2 2 {n // 2},1:{n % 2},1" for n in range(4)]
    save(tf, tmp_path / "x", tensors, spelled)
    with pytest.raises(CheckpointError, match=r"x\.index: 'w': .* along the axes \[0, 1\]"):
        tf1.read(tmp_path / "x")


def test_an_object_graph_of_tensorflow_2(tf: Any, tmp_path: Path) -> None:
    weight = tf.Variable(np.ones((2, 3), np.float32))
    module = tf.Module()
    module.w = weight
    optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
    optimizer.minimize(lambda: tf.reduce_sum(weight**2), var_list=[weight])
    saved = tf.train.Checkpoint(
        model=module,
        optimizer=optimizer,
        global_step=tf.Variable(7, dtype=tf.int64),
        label=tf.Variable("x"),
    )
    prefix = Path(saved.save(str(tmp_path / "object")))
    contents = tf1.read(prefix, slots=True)
    assert contents.tensors.keys() == {"model/w"} and contents.step == 7
    assert same(contents.tensors["model/w"], weight.numpy())
    graph, strings, optimizer_notes = contents.notes
    assert "TF2 object graph" in graph and "label" in strings and "1 entries" in strings
    assert "1 optimizer/m, 1 optimizer/v" in optimizer_notes and "1 beta1_power" in optimizer_notes


def test_what_is_not_asked_for_is_not_read(tf: Any, tmp_path: Path) -> None:
    """The bytes of a slot are spoilt: only who reads them can tell."""
    weight = np.arange(4, dtype=np.float32)
    tensors = {"a": weight, "a/adam_m": weight + 1, "a/adam_v": weight + 2, "global_step": 3}
    save(tf, tmp_path / "x", tensors)
    data = tmp_path / "x.data-00000-of-00001"
    content = data.read_bytes()
    data.write_bytes(content.replace(tensors["a/adam_v"].tobytes(), bytes(16)))
    contents = tf1.read(tmp_path / "x")
    assert same(contents.tensors["a"], weight) and contents.step == 3 and not contents.slots
    with pytest.raises(CheckpointError, match=r"'a/adam_v': the checksum of its 16 bytes at byte"):
        tf1.read(tmp_path / "x", slots=True)


def test_slots_are_known_by_their_weights(tf: Any, tmp_path: Path) -> None:
    pair, triple = np.ones(2, np.float32), np.ones(3, np.float32)
    tensors: dict[str, Any] = {
        "a": pair,
        "a/LAMB": pair + 1,
        "a/LAMB_1": pair + 2,
        "a/Adam": triple,
    }
    tensors |= {
        "b/Momentum": pair,
        "Adam": pair,
        "c": triple,
        "c/Momentum": triple + 1,
        "global_step": triple,
    }
    save(tf, tmp_path / "x", tensors)
    contents = tf1.read(tmp_path / "x", slots=True)
    # "a/Adam" is of another shape than "a", there is no "b", and a step of three is none.
    assert contents.tensors.keys() == {"a", "a/Adam", "b/Momentum", "Adam", "c", "global_step"}
    assert contents.step is None
    assert contents.slots["m"].keys() == {"a", "c"} and contents.slots["v"].keys() == {"a"}
    assert same(contents.slots["m"]["a"], pair + 1) and same(contents.slots["v"]["a"], pair + 2)
    assert tf1.read(tmp_path / "x").notes == (
        "optimizer state left out: 1 LAMB, 1 LAMB_1, 1 Momentum",
    )
    save(tf, tmp_path / "y", {"a": pair, "a/Adam": pair, "a/LAMB": pair})
    with pytest.raises(CheckpointError, match="'a' has slots of two optimizers"):
        tf1.read(tmp_path / "y", slots=True)
    assert tf1.read(tmp_path / "y").tensors.keys() == {"a"}


def test_memory_is_the_tensors_own(tf: Any, tmp_path: Path) -> None:
    """Large or small, it can be written to and outlives the file."""
    tensors = {"small": np.ones(8, np.float32), "large": np.ones((1024, 1024), np.float32)}
    save(tf, tmp_path / "x", tensors)
    result = tf1.read(tmp_path / "x").tensors
    os.truncate(tmp_path / "x.data-00000-of-00001", 0)
    for tensor in result.values():
        tensor.add_(1)
        assert tensor.eq(2).all() and tensor.data_ptr() % 64 == 0
    assert same(result["large"], tensors["large"] + 1)


@pytest.fixture
def folder(tf: Any, tmp_path: Path) -> Path:
    """A model of two shards, as training leaves it."""
    save(tf, tmp_path / "a", {"v": [1.0]})
    save(tf, tmp_path / "b", {"w": [2.0]})
    built = tmp_path / "model"
    merge = [str(tmp_path / "a"), str(tmp_path / "b")]
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=merge, destination_prefix=str(built / "m.ckpt-5")
    )
    return built


ENDINGS = ("", ".index", ".data-00000-of-00002", ".data-00001-of-00002")


@pytest.mark.parametrize("ending", ENDINGS)
def test_any_of_its_files_is_the_checkpoint(ending: str, folder: Path) -> None:
    path = folder / f"m.ckpt-5{ending}"
    assert tf1.find(path) == folder / "m.ckpt-5"
    assert tf1.read(path).tensors.keys() == {"v", "w"}


def test_a_folder_and_its_pointer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tf1.find(folder) == folder / "m.ckpt-5"  # there is but one
    assert tf1.find(folder / "checkpoint") is None  # and no pointer yet
    for path in list(folder.iterdir()):
        shutil.copy(path, folder / path.name.replace("-5", "-6"))
    with pytest.raises(CheckpointError, match=r"several checkpoints; .*: m\.ckpt-5, m\.ckpt-6$"):
        tf1.find(folder)
    (folder / "checkpoint").write_text(
        'all_model_checkpoint_paths: "m.ckpt-5"\nmodel_checkpoint_path: "m.ckpt-6"\n'
    )
    for path in (folder, folder / "checkpoint"):
        assert tf1.find(path) == folder / "m.ckpt-6"
        assert tf1.read(path).files[0] == folder / "m.ckpt-6.index"
    monkeypatch.chdir(folder)
    assert tf1.find(Path("checkpoint")) == Path("m.ckpt-6")
    assert tf1.read(Path(".")).tensors.keys() == {"v", "w"}


POINTERS = {
    "plain": '"m.ckpt-5"',
    "of a folder that was moved": '"/nowhere/run/m.ckpt-5"',
    "in a bucket": '"gs://bucket/run/m.ckpt-5"',
    "of this folder": '"{}/m.ckpt-5"',
    "escaped": '"m\\056ckpt-\\065"',
}


@pytest.mark.parametrize("case", POINTERS)
def test_pointers(case: str, folder: Path) -> None:
    line = POINTERS[case].replace("{}", str(folder))
    (folder / "checkpoint").write_text(f"  model_checkpoint_path : {line}\n")
    assert tf1.find(folder) == folder / "m.ckpt-5"


ASTRAY = {
    "up": ("../other/m.ckpt-5", "not in its folder"),
    "up and back": ("/nowhere/../m.ckpt-5", "not in its folder"),
    "the folder above": ("..", "not in its folder"),
    "a folder below": ("sub/m.ckpt-5", "not in its folder"),
    "another folder": ("{}/m.ckpt-5", "not in its folder"),
    "nothing": ("", "not in its folder"),
    "the root": ("/", "not in its folder"),
    "no name of a file": ("\\000", "is not there"),
    "no folder's name": ("/\\000/\\000", "is not there"),
    "what is gone": ("m.ckpt-4", r"names m\.ckpt-4, but m\.ckpt-4\.index is not there"),
    "what is gone with its folder": ("/nowhere/m.ckpt-4", r"m\.ckpt-4\.index is not there"),
}


@pytest.mark.parametrize("case", ASTRAY)
def test_pointers_that_lead_astray(case: str, folder: Path) -> None:
    """There is a checkpoint wherever they point: it is not the lack of one that is refused."""
    for second in (folder.parent / "other", folder / "sub"):
        shutil.copytree(folder, second)
    settings, message = ASTRAY[case]
    line = settings.replace("{}", str(folder.parent / "other"))
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{line}"\n')
    for path in (folder, folder / "checkpoint"):
        with pytest.raises(CheckpointError, match=message) as caught:
            tf1.read(path)
        assert str(folder / "checkpoint") in str(caught.value)
    assert tf1.find(folder / "m.ckpt-5") == folder / "m.ckpt-5"


def test_what_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(bytes(range(256)))
    (tmp_path / "faiss.index").write_bytes(bytes(1_000))
    (tmp_path / "folder.index").mkdir()
    (tmp_path / "x.data-00000-of-00001").write_bytes(bytes(10))
    os.mkfifo(tmp_path / "pipe.index")
    (tmp_path / "link.index").symlink_to(tmp_path / "nothing")
    (tmp_path / "out").mkdir()
    names = ("", "checkpoint", "faiss.index", "folder.index", "x.data-00000-of-00001", "pipe")
    for name in (*names, "pipe.index", "link", "link.index", "nothing", "a" * 300, "out"):
        assert tf1.find(tmp_path / name) is None, name
        with pytest.raises(CheckpointError):
            tf1.read(tmp_path / name)
    for path in (Path("/"), Path("."), Path("..")):
        assert tf1.find(path) is None
    with pytest.raises(CheckpointError, match=r"no TensorFlow checkpoint \(\*\.index\)"):
        tf1.read(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no nothing\.index"):
        tf1.read(tmp_path / "nothing")


def test_the_keys_of_slices() -> None:
    """Against keys that TensorFlow's own ordered code gave for these numbers."""
    assert tf1_index.slice_key("v", ((0, -1),)) == b"\0v\0\1\1\1\x80\x7f"
    assert tf1_index.slice_key("a\0b", ((63, 64),)) == b"\0a\0\xffb\0\1\1\1\xbf\xc0\x40"
    assert tf1_index.slice_key("", ((8191, 8192),)) == b"\0\0\1\1\1\xdf\xff\xe0\x20\x00"
    large = tf1_index.slice_key("", (((1 << 62) - 1, (1 << 63) - 1),))
    assert large == b"\0\0\1\1\1\xff\xbf" + b"\xff" * 7 + b"\xff\xc0\x7f" + b"\xff" * 7
