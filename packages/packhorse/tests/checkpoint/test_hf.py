"""Folders of weights, their index, and safetensors files: bad ones are refused, good ones read."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from packhorse.checkpoint import hf, safetensors
from packhorse.errors import CheckpointError

Fields = dict[str, Any]
FLOATS = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HALVES = {"dtype": "F16", "shape": [3], "data_offsets": [16, 22]}


def file(header: bytes | str | Fields, data: bytes = bytes(22), length: int | None = None) -> bytes:
    """A safetensors file, as wrong as need be."""
    text = json.dumps(header) if isinstance(header, dict) else header
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entries(**changes: Any) -> Fields:
    return {"a": FLOATS | changes, "b": HALVES}


GOOD = file(entries())
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "of 0 bytes is truncated"),
    "no length": (GOOD[:7], "of 7 bytes is truncated"),
    "only a length": (GOOD[:8], "truncated.* its header would end at byte 136"),
    "length beyond the file": (file(entries(), length=10_000), "truncated"),
    "length of 2**63": (file(entries(), length=1 << 63), "truncated"),
    "length 0": (file("", b""), "no JSON object"),
    "header too large": (file(" " * (safetensors.HEADER_LIMIT + 1)), "more than 4194304"),
    "not UTF-8": (file(b'{"\xff": 1}'), "not valid JSON"),
    "not JSON": (file("{nonsense}"), "not valid JSON"),
    "an array": (file("[]"), "no JSON object"),
    "leading blank": (file(" " + json.dumps(entries())), "no JSON object"),
    # Python 3.12 reads it all.
    "deep": (file('{"a":' * 9_000 + "0" + "}" * 9_000), "not valid JSON|'a' is not described"),
    "deeper": (file('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "more than 10000 tensors"),
    "many": (
        file(
            {str(n): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(10_003)}
        ),
        "more than 10000 tensors",
    ),
    "many fields": (file('{"a": {' + '"k":0,' * 90_000 + "}}"), "more than 10000 tensors"),
    "many numbers": (file('{"a": [' + "0," * 400_000 + "]}"), "more than 10000 tensors"),
    "a long name": (file({"n" * 1_000_000: 1}), "nnn"),
    "twice": (
        file('{"a": %s, "a": %s}' % ((json.dumps(FLOATS),) * 2), bytes(16)),
        "'a' is there 2",
    ),
    "metadata is no map": (file({"__metadata__": 1}, b""), "__metadata__"),
    "metadata is no text": (file({"__metadata__": {"format": 1}}, b""), "__metadata__"),
    "no entry": (file({"a": 1}), "'a' is not described"),
    "half an entry": (file({"a": {"dtype": "F32"}}), "'a' is not described"),
    "an entry with more": (file(entries(more=1)), "'a' is not described"),
    "unknown dtype": (file(entries(dtype="F31")), "'a' has the dtype 'F31'"),
    "dtype is no name": (file(entries(dtype=[])), r"'a' has the dtype \[\]"),
    "dtype of another size": (
        file(entries(dtype="F64")),
        "'a' has 16 bytes, its shape and dtype 32",
    ),
    "negative shape": (file(entries(shape=[-2, -2])), "no counts"),
    "shape of floats": (file(entries(shape=[2.0, 2.0])), "no counts"),
    "shape of truths": (file(entries(shape=[True, 4])), "no counts"),
    "shape is no list": (file(entries(shape="22")), "no counts"),
    "shape overflows": (file(entries(shape=[1 << 62, 1 << 62])), "'a' has 16 bytes"),
    "shape wraps to 0": (
        file(entries(shape=[1 << 32, 1 << 32], data_offsets=[0, 0])),
        "has 0 bytes",
    ),
    "a hundred dimensions": (file(entries(shape=[1] * 100)), "no counts"),
    "three offsets": (file(entries(data_offsets=[0, 16, 16])), "no counts"),
    "negative offset": (file(entries(data_offsets=[-16, 0])), "no counts"),
    "float offset": (file(entries(data_offsets=[0.0, 16.0])), "no counts"),
    "backwards": (file(entries(data_offsets=[16, 0])), "'a' has -16 bytes"),
    "overlap": (
        file(entries() | {"b": HALVES | {"data_offsets": [12, 18]}}),
        "'b' begins at byte 12",
    ),
    "hole": (file(entries() | {"b": HALVES | {"data_offsets": [18, 24]}}), "'b' begins at byte 18"),
    "trailing": (GOOD + b"\0", "ends at byte 158, the file at byte 159"),
    "short": (GOOD[:-1], "157 bytes and needs 158; .* not whole is 'b', at bytes 152 to 158"),
    "shorter": (GOOD[:-7], "151 bytes and needs 158; .* not whole is 'a', at bytes 136 to 152"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    content, message = BAD[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        safetensors.read_tensors(tmp_path, "model.safetensors")
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert len(str(caught.value)) < 2_000
    assert time.process_time() - start < 10  # not a speed claim: none may loop on and on


def test_good_files_of_every_dtype(tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in safetensors.DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(3, 0), "é": torch.ones(1)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    result = safetensors.read_tensors(tmp_path, "x.safetensors")
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name


def agrees(folder: Path, content: bytes) -> bool:
    """Refused, or read as the library reads it; True when it was read."""
    (folder / "x.safetensors").write_bytes(content)
    try:
        result = safetensors.read_tensors(folder, "x.safetensors")
    except CheckpointError:
        return False
    try:
        want = load_file(folder / "x.safetensors")
    except SafetensorError as error:
        raise AssertionError("read what the library refuses") from error
    assert result.keys() == want.keys()
    for name, tensor in want.items():
        assert result[name].dtype == tensor.dtype and result[name].shape == tensor.shape
        assert result[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes()
    return True


def test_truncations(tmp_path: Path) -> None:
    assert agrees(tmp_path, GOOD)
    assert not any(agrees(tmp_path, GOOD[:size]) for size in range(len(GOOD)))


@pytest.mark.parametrize("flips", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_bit_flips(flips: int, tmp_path: Path) -> None:
    rng = random.Random(3)
    read = 0
    for _ in range(flips):
        content = bytearray(GOOD)
        content[rng.randrange(len(GOOD))] ^= 1 << rng.randrange(8)
        read += agrees(tmp_path, bytes(content))
    assert 0 < read < flips  # flips of weights pass, flips of the header mostly do not


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A file of the kind that its name says."""
    (save_file if path.suffix == ".safetensors" else torch.save)(tensors, path)


def sharded(folder: Path, suffix: str = ".safetensors") -> Fields:
    """A model of two shards, and what its index says."""
    write(folder / f"one{suffix}", {"a": torch.ones(2), "b": torch.zeros(3)})
    write(folder / f"two{suffix}", {"c": torch.ones(1)})
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return {"a": f"one{suffix}", "b": f"one{suffix}", "c": f"two{suffix}"}


def write_index(folder: Path, weight_map: Any, index: str = hf.INDEX, **more: Any) -> None:
    (folder / index).write_text(json.dumps({"weight_map": weight_map, **more}))


@pytest.mark.parametrize("format", hf.KINDS)
@pytest.mark.parametrize("total", [24, 0, -1, "lots", 1 << 80])
def test_shards(total: Any, format: str, tmp_path: Path) -> None:
    """`total_size` is a remark: a lie in it changes nothing."""
    kind = hf.KINDS[format]
    home = sharded(tmp_path, kind.suffix)
    write_index(tmp_path, home, kind.index, metadata={"total_size": total})
    result = hf.read(tmp_path)
    assert (result.format, result.folder, result.notes) == (format, tmp_path, ())
    assert result.config == {"model_type": "bert"} and result.tensors.keys() == {"a", "b", "c"}
    assert result.files == tuple(tmp_path / f"{name}{kind.suffix}" for name in ("one", "two"))
    assert torch.equal(result.tensors["b"], torch.zeros(3))
    assert hf.sniff(tmp_path) == hf.format_of(tmp_path) == format


def link(folder: Path, name: str, target: Path) -> None:
    (folder / name).symlink_to(target)


SHARDS: dict[str, str] = {
    "up": "../model/two.safetensors",
    "absolute": "/etc/two.safetensors",
    "through another folder": "x/../../two.safetensors",
    "in a folder": "x/two.safetensors",
    "backslash": "..\\two.safetensors",
    "another host": "\\\\host\\share\\two.safetensors",
    "a drive": "C:two.safetensors",
    "NUL": "two\0.safetensors",
    "nothing": "",
    "the folder": ".",
    "the folder above": "..",
    "the index itself": hf.INDEX,
    "another kind": "other.kind",
    "missing": "three.safetensors",
    "a folder": "folder.safetensors",
    "a pipe": "pipe.safetensors",
    "a link out": "link.safetensors",
    "a link to a device": "zero.safetensors",
    "a link to nowhere": "nowhere.safetensors",
    "a link to itself": "itself.safetensors",
}


@pytest.mark.parametrize("format", hf.KINDS)
@pytest.mark.parametrize("case", SHARDS)
def test_shards_that_lie_elsewhere(case: str, format: str, tmp_path: Path) -> None:
    outside, folder, kind = tmp_path / "outside", tmp_path / "model", hf.KINDS[format]
    outside.mkdir()
    folder.mkdir()
    home = sharded(folder, kind.suffix)
    for place in (outside / f"two{kind.suffix}", folder / "other.kind"):
        write(place, {"c": torch.ones(1)})
    (folder / "x").mkdir()
    (folder / f"folder{kind.suffix}").mkdir()
    os.mkfifo(folder / f"pipe{kind.suffix}")
    link(folder, f"link{kind.suffix}", outside / f"two{kind.suffix}")
    link(folder, f"zero{kind.suffix}", Path("/dev/zero"))
    link(folder, f"nowhere{kind.suffix}", folder / "nothing")
    link(folder, f"itself{kind.suffix}", folder / f"itself{kind.suffix}")
    write_index(folder, home | {"c": SHARDS[case].replace(".safetensors", kind.suffix)}, kind.index)
    with pytest.raises(CheckpointError, match=str(folder)):
        hf.read(folder)


INDEXES: dict[str, tuple[Callable[[Fields], Any], str]] = {
    "no map": (lambda home: None, "weight_map does not map"),
    "a list": (lambda home: list(home), "weight_map does not map"),
    "numbers": (lambda home: dict.fromkeys(home, 1), "weight_map does not map"),
    "a tensor in the wrong file": (
        lambda home: home | {"c": "one.safetensors", "d": "two.safetensors"},
        r"'c' is here, but the index says it is in one\.safetensors|'c' is not here",
    ),
    "a tensor in no file": (lambda home: home | {"d": "two.safetensors"}, "'d' is not here"),
    "a tensor not listed": (
        lambda home: {k: v for k, v in home.items() if k != "b"},
        "'b' is here, but the index says it does not exist",
    ),
    "many tensors": (
        lambda home: {str(n): "one.safetensors" for n in range(10_001)},
        "10001 tensors in 1 files are too many",
    ),
    "many files": (
        lambda home: {str(n): f"{n}.safetensors" for n in range(1_001)},
        "1001 tensors in 1001 files are too many",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_indexes_that_do_not_agree(case: str, tmp_path: Path) -> None:
    change, message = INDEXES[case]
    write_index(tmp_path, change(sharded(tmp_path)))
    with pytest.raises(CheckpointError, match=message):
        hf.read(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    home = sharded(tmp_path)
    save_file({"c": torch.ones(1), "a": torch.zeros(2)}, tmp_path / "two.safetensors")
    write_index(tmp_path, home)
    with pytest.raises(CheckpointError, match=r"'a' is here, but the index says it is in one\."):
        hf.read(tmp_path)


def test_an_index_without_end(tmp_path: Path) -> None:
    sharded(tmp_path)
    with (tmp_path / hf.INDEX).open("wb") as large:
        large.truncate(1 << 30)  # a hole: it takes no room
    with pytest.raises(CheckpointError, match="larger than"):
        hf.read(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    looked = (
        r"model\.safetensors, model\.safetensors\.index\.json, pytorch_model\.bin, pytorch_model"
    )
    with pytest.raises(CheckpointError, match=f"there are no weights; looked for {looked}"):
        hf.read(tmp_path)
    assert hf.format_of(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: this is no torch file"):
        hf.read(tmp_path)


def test_no_configuration(tmp_path: Path) -> None:
    """The caller decides, also whether one that cannot be read matters."""
    write(tmp_path / hf.WEIGHTS, {"a": torch.ones(2)})
    assert hf.read(tmp_path).config is None
    (tmp_path / "config.json").write_text("[]")
    for result in (hf.read(tmp_path), hf.read_file(tmp_path / hf.WEIGHTS)):
        assert result.config is None
        assert result.notes == (f"left out: {tmp_path / 'config.json'} holds no JSON object",)


def test_two_kinds_in_one_folder(tmp_path: Path) -> None:
    write(tmp_path / "pytorch_model.bin", {"a": torch.zeros(2)})
    assert hf.read(tmp_path).format == "torch"
    home = sharded(tmp_path)
    write_index(tmp_path, home)
    result = hf.read(tmp_path)
    assert result.format == "safetensors" and torch.equal(result.tensors["a"], torch.ones(2))
    assert result.notes == ("both .safetensors and .bin are there; took .safetensors",)


def test_files_alone(tmp_path: Path) -> None:
    """By what is in them, whatever they are called."""
    tensors = {"a": torch.arange(3)}
    for saver, format in ((save_file, "safetensors"), (torch.save, "torch")):
        saver(tensors, tmp_path / "weights")
        result = hf.read_file(tmp_path / "weights")
        assert result.format == hf.sniff(tmp_path / "weights") == format
        assert (result.config, result.files) == (None, (tmp_path / "weights",))
        assert torch.equal(result.tensors["a"], tensors["a"])
    torch.save({"model": tensors, "epoch": 1}, tmp_path / "weights.safetensors")
    assert hf.read_file(tmp_path / "weights.safetensors").notes == (
        "weights.safetensors: left out epoch",
    )
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert hf.read_file(tmp_path / "weights").config == {"model_type": "bert"}


def test_files_of_no_kind(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    for content in (b"", b"{}", b"\x08\x07\x12\x07pytorch", bytes(600), b"hello, world, hello"):
        path.write_bytes(content)
        assert hf.sniff(path) is None
        with pytest.raises(CheckpointError, match="neither a safetensors file nor one of torch"):
            hf.read_file(path)
    with pytest.raises(CheckpointError, match="there is no nothing"):
        hf.sniff(tmp_path / "nothing")
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    assert hf.sniff(path) == "torch"
    with pytest.raises(CheckpointError, match=r"before 1\.6, which is not read; write it anew"):
        hf.read_file(path)


def test_what_transformers_reads(
    save: Callable[..., tuple[Any, Path]], transformers: ModuleType, tmp_path: Path
) -> None:
    """A sharded `.bin` of a real model, as transformers wrote them up to release 4."""
    model, folder = save("BertForMaskedLM")
    result = hf.read(folder).tensors
    names = sorted(result)
    half = {"one.bin": names[: len(names) // 2], "two.bin": names[len(names) // 2 :]}
    for shard, part in half.items():
        torch.save({name: result[name] for name in part}, folder / shard)
    home = {name: shard for shard, part in half.items() for name in part}
    write_index(folder, home, "pytorch_model.bin.index.json", metadata={"total_size": 1})
    (folder / hf.WEIGHTS).unlink()
    torn = hf.read(folder)
    assert torn.format == "torch" and all(torch.equal(result[n], torn.tensors[n]) for n in names)
    reference = transformers.BertForMaskedLM.from_pretrained(folder).state_dict()
    assert (
        torn.tensors.keys() <= reference.keys() and hf.read_weights(folder).keys() == result.keys()
    )
    assert all(torch.equal(reference[name], tensor) for name, tensor in torn.tensors.items())
    assert all(torch.equal(model.state_dict()[name], reference[name]) for name in reference)


def test_hard_links_are_files(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model").mkdir()
    os.link(tmp_path / "one.safetensors", tmp_path / "model" / "model.safetensors")
    assert safetensors.read_tensors(tmp_path / "model", hf.WEIGHTS).keys() == {"a", "b"}


def test_links_of_the_hub_cache(tmp_path: Path) -> None:
    """A snapshot links into `blobs`, of its repository or of the cache, and nowhere else."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for blobs in (repository / "blobs", tmp_path / "blobs", tmp_path / "elsewhere"):
        blobs.mkdir()
        save_file({"a": torch.ones(2)}, blobs / "blob")
    link(repository / "blobs", "shared", tmp_path / "blobs" / "blob")
    link(repository / "blobs", "astray", tmp_path / "elsewhere" / "blob")
    for name, target in (("one", "blob"), ("two", "shared"), ("three", "astray")):
        link(snapshot, f"{name}.safetensors", Path("../../blobs") / target)
    assert safetensors.read_tensors(snapshot, "one.safetensors").keys() == {"a"}
    assert safetensors.read_tensors(snapshot, "two.safetensors").keys() == {"a"}
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        safetensors.read_tensors(snapshot, "three.safetensors")
    plain = tmp_path / "plain"
    plain.mkdir()
    link(plain, "model.safetensors", repository / "blobs" / "blob")
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        safetensors.read_tensors(plain, "model.safetensors")
