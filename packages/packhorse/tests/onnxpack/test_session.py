"""A packed model as a backend: the same answers whatever the rows, and clear words otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from packhorse import onnxpack
from packhorse.errors import CheckpointError, InputError, KernelError, MissingExtra
from packhorse.model.heads import Embed
from packhorse.onnxpack.facts import KEY, Mode
from packhorse.onnxpack.session import OnnxBackend
from packhorse.packing.batch import Packed

from .conftest import LONGEST, WORDS, Answers, Tokens, alone, export

Exported = Callable[[str], Path]
Backends = Callable[..., OnnxBackend]
CAPACITY = LONGEST + 4
PACKS = [[0, 2, 3], [1], [5, 4]]


@pytest.fixture(scope="module")
def backends(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    """A packed export, opened; `more` goes to `pack`."""
    folder = tmp_path_factory.mktemp("packed")

    def backends(name: str, mode: Mode, **more: Any) -> OnnxBackend:
        path = folder / f"{name}-{mode}-{more}.onnx".replace(":", "-").replace("/", "-")
        if not path.exists():
            onnxpack.pack(exported(name), path, mode, **more)
        return onnxpack.load(path)

    return backends


def lay(sequences: list[Tokens], mode: Mode) -> Packed:
    return Packed.rows(sequences, PACKS, CAPACITY) if mode == "mask" else Packed.build(sequences)


def agrees(backend: OnnxBackend, batch: Packed, reference: Answers) -> bool:
    """Does every output equal the original's for each of the caller's sequences?"""
    names = list(backend.facts.outputs)
    for name, result in zip(names, backend(batch, names), strict=True):
        per_token = backend.facts.outputs[name] == "token"
        assert len(result) == (len(batch.ids) if per_token else len(batch))
        item = batch.split(result) if per_token else list(batch.pick(result))
        for loaded, expected in zip(item, reference, strict=True):
            if np.abs(loaded.numpy() - expected[name]).max() > 1e-5:
                return False
    return True


@pytest.mark.parametrize("shape", [None, (2, CAPACITY)])
@pytest.mark.parametrize("mode", ["positions", "mask", "repack"])
@pytest.mark.parametrize("name", ["bert:sdpa", "classify:eager"])
def test_a_batch_is_answered_as_the_original_would(
    name: str,
    mode: Mode,
    shape: tuple[int, int] | None,
    backends: Backends,
    exported: Exported,
    sequences: list[Tokens],
    alone_answers: Callable[[Path], Answers],
) -> None:
    """With fixed rows the batch takes several runs."""
    backend, batch = backends(name, mode, shape=shape), lay(sequences, mode)
    assert agrees(backend, batch, alone_answers(exported(name)))


@pytest.mark.parametrize("mode", ["mask", "repack"])
def test_sequences_that_are_joined_see_each_other(
    mode: Mode, backends: Backends, sequences: list[Tokens]
) -> None:
    """The control: without a boundary, two are changed, and they alone."""
    backend, batch = backends("bert:sdpa", mode), lay(sequences, mode)
    (apart,) = backend(batch, ["hidden"])
    bounds = torch.cat([batch.cu_seqlens[:1], batch.cu_seqlens[2:]])
    local = tuple(i for i in range(len(batch) - 1) if i == 0 or i + 1 in batch.places)
    (joined,) = backend(replace(batch, cu_seqlens=bounds, places=local), ["hidden"])
    changed = (apart - joined).abs().amax(-1) > 1e-3
    real = torch.zeros(len(batch.ids), dtype=torch.bool)
    for place in batch.places:
        real[int(batch.cu_seqlens[place]) : int(batch.cu_seqlens[place + 1])] = True
    together = torch.arange(len(batch.ids)) < int(batch.cu_seqlens[2])
    assert changed[together].all() and not changed[~together & real].any()


def test_repacking_takes_any_batch(
    backends: Backends, exported: Exported, sequences: list[Tokens], alone_answers: Callable
) -> None:
    """Rows with dummies at their ends, and a bucket with dummies and empty sequences."""
    backend, reference = backends("bert:sdpa", "repack"), alone_answers(exported("bert:sdpa"))
    assert agrees(backend, lay(sequences, "mask"), reference)
    assert agrees(backend, Packed.build(sequences).pad(96, 16), reference)


def test_heads_are_those_of_an_encoder(
    backends: Backends, exported: Exported, sequences: list[Tokens], alone_answers: Callable
) -> None:
    backend, batch = backends("span:sdpa", "repack"), Packed.build(sequences)
    at = torch.tensor([0, 3, 17])
    spans, selected = backend(batch, ["span"])[0], backend(batch, ["span"], at)[0]
    reference = [
        np.stack([a["start_logits"], a["end_logits"]], -1)
        for a in alone_answers(exported("span:sdpa"))
    ]
    assert np.abs(spans.numpy() - np.concatenate(reference)).max() <= 1e-5
    assert torch.equal(selected, spans[at])
    classify = backends("classify:eager", "mask")
    assert classify.heads == ("logits", "classify") and classify.width("classify") == 3
    pooled, hidden = backends("bert:sdpa", "repack")(batch, ["pooled", "hidden"], at)
    assert pooled.shape == (len(sequences), 16) and hidden.shape == (3, 16)


def test_vectors_are_made_of_hidden_states_here(
    backends: Backends, exported: Exported, sequences: list[Tokens], alone_answers: Callable
) -> None:
    path = backends("bert:sdpa", "repack").path
    backend = onnxpack.load(path, heads={"embed": Embed(("mean",), normalize=True)})
    (vectors,) = backend(Packed.build(sequences), ["embed"])
    means = [a["last_hidden_state"].mean(0) for a in alone_answers(exported("bert:sdpa"))]
    expected = np.stack([mean / np.linalg.norm(mean) for mean in means])
    assert np.abs(vectors.numpy() - expected).max() <= 1e-5
    assert "embed" in backend.heads
    with pytest.raises(CheckpointError, match="no hidden states"):
        onnxpack.load(backends("span:sdpa", "repack").path, heads={"embed": Embed()})


@pytest.mark.parametrize("mode", ["positions", "mask", "repack"])
def test_roberta_does_not_count_its_padding_word(
    mode: Mode, backends: Backends, exported: Exported, sequences: list[Tokens]
) -> None:
    """A text may spell it; then the words after it move up."""
    ids = sequences[3].ids.copy()
    ids[4] = 1
    texts = [*sequences[:3], Tokens(ids, sequences[3].types), *sequences[4:]]
    reference = alone(exported("roberta:sdpa"), texts)
    assert agrees(backends("roberta:sdpa", mode), lay(texts, mode), reference)


def test_an_encoder_runs_on_it(minilm: Path, tmp_path: Path) -> None:
    """The real model and its tokenizer: vectors as with torch."""
    import packhorse
    from packhorse import checkpoint

    try:
        checkpoint.write(tmp_path / "onnx", checkpoint.load(minilm), to="onnx")
    except (TypeError, InputError) as error:
        pytest.skip(f"there is no ONNX writer yet: {error}")
    onnxpack.pack(tmp_path / "onnx" / "model.onnx", tmp_path / "packed.onnx", "mask")
    with_torch = packhorse.load(minilm, device="cpu", dtype="fp32")
    backend = onnxpack.load(tmp_path / "packed.onnx", heads={"embed": Embed()})
    with_onnx = replace(with_torch, backend=backend, capacity=backend.capacity)
    texts = ["A pack horse carries sacks.", "Mules too.", "word " * 100]
    result, expected = with_onnx.embed(texts), with_torch.embed(texts)
    assert np.abs(result - expected).max() <= 1e-5


def test_types_that_are_no_input_do_not_limit_a_row(
    make: Callable[..., nn.Module], sequences: list[Tokens], tmp_path: Path
) -> None:
    """Exporters cut their zeros from a table as long as that of the positions."""
    inputs = ("input_ids", "attention_mask")
    path = export(make("bert"), tmp_path / "m.onnx", ("states", "pooled"), inputs=inputs)
    onnxpack.pack(path, tmp_path / "packed.onnx", "repack")
    backend, batch = onnxpack.load(tmp_path / "packed.onnx"), Packed.build(sequences)
    assert len(batch.ids) > 2 * backend.max_length
    assert agrees(backend, batch, alone(path, sequences))


def test_it_may_be_shared_between_threads(
    backends: Backends, exported: Exported, sequences: list[Tokens], alone_answers: Callable
) -> None:
    backend, reference = backends("bert:sdpa", "repack"), alone_answers(exported("bert:sdpa"))
    orders = [list(np.random.default_rng(seed).permutation(len(sequences))) for seed in range(24)]

    def ask(order: list[int]) -> bool:
        batch = Packed.build([sequences[i] for i in order])
        return agrees(backend, batch, [reference[i] for i in order])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, orders))


def test_limits(backends: Backends) -> None:
    fixed, free = backends("bert:sdpa", "mask", shape=(2, 16)), backends("bert:sdpa", "mask")
    assert (fixed.capacity, fixed.max_length) == (16, 16)
    assert (free.capacity, free.max_length) == (24, 24)
    repack = backends("bert:sdpa", "repack", shape=(1, 30))
    assert (repack.capacity, repack.max_length) == (0, 24)
    assert backends("roberta:sdpa", "repack").max_length == 22


def repeated(length: int, word: int = 7) -> Tokens:
    return Tokens(np.full(length, word), np.zeros(length, np.int64))


BAD: list[tuple[Mode, Any, Callable[[], Packed], Any, str]] = [
    ("mask", None, lambda: Packed.build([repeated(3)]), KernelError, "laid in rows"),
    ("mask", (2, 16), lambda: Packed.rows([repeated(3)], [[0]], 8), InputError, "rows of 8 tokens"),
    (
        "repack",
        None,
        lambda: Packed.build([repeated(25)]),
        InputError,
        "has 25 tokens, the model 24",
    ),
    (
        "repack",
        (1, 8),
        lambda: Packed.build([repeated(9)]),
        InputError,
        "longer than the model's 8",
    ),
    ("positions", (1, 8), lambda: Packed.build([repeated(9)]), InputError, "9 tokens, a row 8"),
    ("repack", None, lambda: Packed.build([repeated(2, WORDS)]), InputError, "token 60 is outside"),
]


@pytest.mark.parametrize(("mode", "shape", "batch", "error", "message"), BAD)
def test_batches_that_do_not_fit(
    mode: Mode, shape: Any, batch: Callable, error: Any, message: str, backends: Backends
) -> None:
    with pytest.raises(error, match=message):
        backends("bert:sdpa", mode, shape=shape)(batch(), ["hidden"])


def test_unknown_heads_are_refused(backends: Backends) -> None:
    with pytest.raises(CheckpointError, match=r"no 'span' head \(it has: .*hidden, pooled\)"):
        backends("bert:sdpa", "repack")(Packed.build([repeated(3)]), ["span"])


def test_without_a_mask_padding_is_refused(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    path = export(make("bert", "eager"), tmp_path / "m.onnx", ("a", "b"), inputs=("input_ids",))
    onnxpack.pack(path, tmp_path / "positions.onnx", "positions")
    backend = onnxpack.load(tmp_path / "positions.onnx")
    assert backend(Packed.build([repeated(3), repeated(3)]), ["a"])[0].shape == (6, 16)
    with pytest.raises(InputError, match="takes no mask"):
        backend(Packed.build([repeated(3), repeated(4)]), ["a"])
    for mode in ("mask", "repack"):  # these bring their own
        assert onnxpack.pack(path, tmp_path / f"{mode}.onnx", mode).difference < 1e-5


def retold(path: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The model with other facts; `change` may return what is no JSON object at all."""
    model = onnx.load(path)
    (entry,) = (entry for entry in model.metadata_props if entry.key == KEY)
    settings = json.loads(entry.value)
    entry.value = json.dumps(change(settings) or settings)
    onnx.save(model, to)
    return to


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda settings: [1], "damaged"),
        (lambda settings: settings.pop("heads") and None, "damaged"),
        (lambda settings: settings.update(version=99), "of another version"),
        (lambda settings: settings.update(mode="guess"), "damaged"),
        (lambda settings: settings.update(shape=[0, 4]), "damaged"),
        (lambda settings: settings.update(shape=[4]), "damaged"),
        (lambda settings: settings.update(vocab_size="many"), "damaged"),
        (lambda settings: settings.update(padding=-4), "damaged"),
        (lambda settings: settings.update(outputs={"last_hidden_state": "row"}), "damaged"),
        (lambda settings: settings.update(heads={"hidden": ["nothing"]}), "damaged"),
        (lambda settings: settings["inputs"].update(smell="nose"), "damaged"),
        (lambda settings: settings["inputs"].update(ids="ids"), "another model's"),
        (lambda settings: settings["outputs"].update(more="token"), "another model's"),
    ],
)
def test_damaged_facts_are_refused(
    change: Callable, message: str, backends: Backends, tmp_path: Path
) -> None:
    path = backends("bert:sdpa", "repack").path
    with pytest.raises(CheckpointError, match=message):
        onnxpack.load(retold(path, tmp_path / "retold.onnx", change))


def test_models_that_are_not_packed(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="packhorse onnx pack"):
        onnxpack.load(exported("bert:sdpa"))
    with pytest.raises(InputError, match="there is no"):
        onnxpack.load(tmp_path / "absent.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="does not open in ONNX Runtime"):
        onnxpack.load(tmp_path / "bad.onnx")
    with pytest.raises(InputError, match="no provider for xpu"):
        onnxpack.load(exported("bert:sdpa"), device="xpu")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_extra_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{package} is not installed.*packhorse\[onnx\]"):
        onnxpack.load(tmp_path / "model.onnx")
    with pytest.raises(MissingExtra, match=r"packhorse\[onnx\]"):
        onnxpack.pack(tmp_path / "model.onnx", tmp_path / "packed.onnx", "mask")
