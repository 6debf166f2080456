"""What we write, TensorFlow reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse.checkpoint.tensorflow import tf1, tf1_index
from packhorse.errors import InputError


def raw(tensor: Tensor) -> bytes:
    plain = tensor.resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def test_tensorflow_reads_it(tf: Any, tmp_path: Path) -> None:
    entries = {
        f"type/{n}": torch.arange(6).reshape(2, 3).to(d) for n, d in tf1_index.DTYPES.items()
    }
    entries |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(3, 0),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "strided": torch.arange(12)[::3],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "é": torch.ones(1, requires_grad=True).detach(),
        "large": torch.rand(600, 1024),
    }
    tf1.write(tmp_path / "m.ckpt", entries, step=28252)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint",
        "m.ckpt.data-00000-of-00001",
        "m.ckpt.index",
    ]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "m.ckpt")
    reader = tf.train.load_checkpoint(str(tmp_path))
    assert reader.get_variable_to_shape_map().keys() == entries.keys() | {"global_step"}
    assert reader.get_tensor("global_step") == 28252
    loaded = tf1.read(tmp_path)
    assert loaded.step == 28252 and loaded.tensors.keys() == entries.keys()
    for name, tensor in entries.items():
        reference = reader.get_tensor(name)
        assert reference.shape == tuple(tensor.shape) and reference.tobytes() == raw(tensor), name
        assert reference.dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert (
            torch.equal(loaded.tensors[name], tensor) and loaded.tensors[name].dtype == tensor.dtype
        )


def test_a_saver_restores_it(tf: Any, tmp_path: Path) -> None:
    tf1.write(tmp_path / "m.ckpt", {"layer/kernel": torch.eye(3)})
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("layer/kernel", (3, 3))
        tf.compat.v1.train.Saver().restore(session, str(tmp_path / "m.ckpt"))
        assert np.array_equal(session.run(variable), np.eye(3))


def test_many_tensors_and_none(tf: Any, tmp_path: Path) -> None:
    entries = {f"{n * 7919 % 10_007:05}/{'x' * 90}": torch.tensor(n) for n in range(9_999)}
    tf1.write(tmp_path / "many", entries, step=1)
    assert (tmp_path / "many.index").stat().st_size > 1 << 18  # several blocks
    reader = tf.train.load_checkpoint(str(tmp_path / "many"))
    assert len(reader.get_variable_to_shape_map()) == 10_000
    for name in list(entries)[::500]:
        assert reader.get_tensor(name) == int(entries[name])
    assert tf1.read(tmp_path / "many").tensors == entries
    tf1.write(tmp_path / "none", {})
    assert tf1.read(tmp_path / "none").tensors == {}
    assert tf.train.load_checkpoint(str(tmp_path / "none")).get_variable_to_shape_map() == {}


def test_the_pointer_is_escaped(tf: Any, tmp_path: Path) -> None:
    tf1.write(tmp_path / 'a"é', {"w": torch.ones(1)})
    assert tf1.find(tmp_path) == tmp_path / 'a"é'
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / 'a"é')


class Passing(Mapping[str, Tensor]):
    """Tensors that are made when asked for; remembers how often."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        if name not in ("a", "b"):
            raise KeyError(name)
        self.made.append(name)
        return torch.full((3,), ord(name))

    def __iter__(self) -> Iterator[str]:
        yield from "ba"

    def __len__(self) -> int:
        return 2

    def __contains__(self, name: object) -> bool:
        return name in ("a", "b")


def test_tensors_are_asked_for_once_and_in_order(tmp_path: Path) -> None:
    passing = Passing()
    tf1.write(tmp_path / "x", passing, step=2)
    assert passing.made == ["a", "b"]
    assert tf1.read(tmp_path / "x").tensors["b"].tolist() == [98] * 3


ONE = torch.ones(1)
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "no name": ({"": ONE}, "'' is not a name"),
    "the name of a slice": ({"\0a": ONE}, "is not a name"),
    "a name too long": ({"a" * 3_000: ONE}, "is not a name"),
    "a step twice": ({"global_step": ONE}, "and a step; pass"),
    "a type that TensorFlow has not": ({"a": ONE.to(torch.float8_e5m2)}, r"'a' \(torch.float8"),
    "a tensor without values": ({"a": ONE.to("meta")}, "'a' .* is not a tensor that"),
    "a sparse tensor": ({"a": torch.eye(2).to_sparse()}, "'a' .* is not a tensor that"),
    "nine dimensions": ({"a": torch.ones((1,) * 9)}, "'a' has more than 8 dimensions"),
    "too many": ({str(n): ONE for n in range(10_000)}, "10001 tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written(case: str, tmp_path: Path) -> None:
    tensors, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        tf1.write(tmp_path / "x", tensors, step=1)
    assert not (tmp_path / "x.index").exists()
