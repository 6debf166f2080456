"""`invariant=True`: the same bits for a text alone, among any others, at any place, in any batch.

Bytes are compared, never numbers within a tolerance. Whether the ordinary way differs is up to the
machine's library of products, so controls bring what differs on every machine: a kernel that lays
sequences together, and a library made unsteady on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import packhorse
from packhorse import attention, onnxpack
from packhorse.cli import main
from packhorse.errors import InputError, KernelError
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.runtime import invariant
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.batches import LaunchedBatch
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.proof import SyntheticSequence
from packhorse.serve import hosting
from packhorse.serve.settings import ServeSettings

pytestmark = pytest.mark.machine
# Of those that see one sequence at a time: `native` where C can be compiled, else `reference`.
FASTEST = invariant.pick(torch.device("cpu"), torch.float32).name

CPU = torch.device("cpu")
TOKENS = 320  # of the largest batch of a tiny model
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "hat", ".", "horse")
MODES = ("ragged", "mask", "repack")


def rows_of(
    backend: TorchBackend,
    sequences: Sequence[SyntheticSequence],
    heads: Sequence[str],
    only: int | None = None,
) -> list[bytes]:
    """The bits of all that the heads say of each sequence."""
    packed = Packed.build(sequences)
    at = None if only is None else (packed.ids == only).nonzero().flatten()
    batch = LaunchedBatch(packed, tuple(heads), backend(packed, heads, at), at)
    return [b"".join(x.tobytes() for x in row) for row in batch.rows()]


def made_up(rng: np.random.Generator, count: int, longest: int = 48) -> list[SyntheticSequence]:
    lengths = np.ceil(longest ** rng.random(count)).astype(int)
    return [SyntheticSequence(rng.integers(0, 97, n), rng.integers(0, 2, n)) for n in lengths]


def differing(
    backend: TorchBackend,
    heads: Sequence[str],
    rng: np.random.Generator,
    packs: int = 12,
    only: int | None = None,
) -> int:
    """Sequences that became something else among others than alone; some come as the only token."""
    fixed = [*made_up(rng, 7), SyntheticSequence(np.array([3]), np.array([0]))]
    alone = [rows_of(backend, [sequence], heads, only)[0] for sequence in fixed]
    wrong = 0
    for number in range(packs):
        others = made_up(rng, int(rng.integers(0, 60)))
        place = (0, len(others), len(others) // 2)[number % 3]  # first, last, in the middle
        rows = rows_of(backend, [*others[:place], *fixed, *others[place:]], heads, only)
        fixed_rows = rows[place : place + len(fixed)]
        wrong += sum(a != b for a, b in zip(alone, fixed_rows, strict=True))
        own_order = rng.permutation(len(fixed))
        rows = rows_of(backend, [fixed[i] for i in own_order], heads, only)
        wrong += sum(rows[at] != alone[i] for at, i in enumerate(own_order))
    return wrong


@pytest.fixture(autouse=True)
def _one_thread(threads) -> None:
    """On busy cores several wait for each other; `test_on_two_threads` is about them."""
    threads(1)


@pytest.fixture
def make_backend(make_model) -> Callable[..., TorchBackend]:
    def make(
        dtype: torch.dtype = torch.float32,
        kernel: str = FASTEST,
        fixed: int = TOKENS,
        spoil: Callable[[Model], None] = lambda model: None,
        axes: str = "",
    ) -> TorchBackend:
        model = make_model(dtype, width=32, heads=2, positions=48, axes=axes)
        spoil(model)
        needs = model.bert.config.needs
        model.bert.use(attention.pick(CPU, dtype, name=kernel, **needs).kernel)
        return TorchBackend(model, CPU, fixed=fixed)

    return make


# Every head of a tiny model -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", sorted({FASTEST, "reference"}))
def test_every_head_gives_the_same_bits(make_backend, rng, dtype, kernel: str) -> None:
    backend = make_backend(dtype, kernel)
    assert differing(backend, ("hidden", "raw", *backend.model.heads), rng) == 0


@pytest.mark.parametrize(
    "axes",
    [
        "causal, shared keys",
        "two-way, local layers, norms of results",
        "ALiBi, gates",
        "stretched by length",
        "pairs side by side",
    ],
)
def test_so_do_layers_beyond_berts(make_backend, rng, axes: str) -> None:
    assert differing(make_backend(axes=axes), ["hidden"], rng, packs=3) == 0


def test_so_do_heads_of_some_tokens(make_backend, rng) -> None:
    assert differing(make_backend(), ("mlm", "tokens", "hidden"), rng, only=3) == 0


@pytest.mark.parametrize("fixed", [0, TOKENS])
def test_neighbors_show_where_a_kernel_lays_them_together(make_backend, rng, fixed: int) -> None:
    """A control, which fixed shapes do not heal."""
    assert differing(make_backend(kernel="bucketed", fixed=fixed), ["hidden"], rng) > 0


def test_on_two_threads(make_backend, rng, threads) -> None:
    threads(2)
    assert differing(make_backend(), ("hidden", "embed", "nsp"), rng, packs=1) == 0


def test_results_are_those_of_the_ordinary_way_within_rounding(make_backend, rng) -> None:
    fixed, ordinary = make_backend(), make_backend(fixed=0)
    packed = Packed.build(made_up(rng, 90))  # too many for one batch
    assert len(packed.ids) > TOKENS and fixed.computed(packed) > len(packed.ids)
    heads = ("hidden", "raw", *ordinary.model.heads)
    for name, a, b in zip(heads, fixed(packed, heads), ordinary(packed, heads), strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-4), name


# A library whose products depend on their shape -----------------------------------------------


class Unsteady(nn.Module):
    """A linear layer that adds up in two halves where `halves` says so of a row and their number.

    What libraries do, for speed: they choose by the number of rows, and by the place in a tile.
    """

    def __init__(self, linear: nn.Linear, halves: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.weight, self.bias, self.halves = linear.weight, linear.bias, halves

    def forward(self, x: Tensor) -> Tensor:
        wide, weight = x.double(), self.weight.double().t()
        middle = x.shape[1] // 2
        whole = (wide @ weight).to(x)
        halves = (wide[:, :middle] @ weight[:middle]).to(x) + (
            wide[:, middle:] @ weight[middle:]
        ).to(x)
        chosen = torch.as_tensor(self.halves(torch.arange(len(x)), len(x)))
        return torch.where(chosen.expand(len(x)).unsqueeze(1), halves, whole) + self.bias


class Rarely(nn.Module):
    """A linear layer that rounds a number in 2,048 the other way where there are few rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        product = self.linear(x)
        bits = product.view(torch.int16)
        chosen = (bits * 7919 + x[:, :1].view(torch.int16)) % 2048 == 0
        return torch.where(chosen & (len(x) < 130), bits ^ 1, bits).view(torch.bfloat16)


def in_layers(halves: Callable[[Tensor, int], Any]) -> Callable[[Model], None]:
    def spoil(model: Model) -> None:
        for layer in model.bert.layers:
            layer.down = Unsteady(layer.down, halves)  # pyright: ignore

    return spoil


def with_few_rows(model: Model) -> None:
    """Layers and heads."""
    in_layers(lambda places, rows: rows < 100)(model)
    for name in ("pooled", "classify", "span", "tokens"):
        head: Any = model.heads[name]
        head.dense = Unsteady(head.dense, lambda places, rows: rows < 50)


def test_sizes_that_are_not_like_the_largest_are_passed_over(make_backend, rng) -> None:
    backend = make_backend(spoil=with_few_rows)
    assert backend.fixed.size(20) >= 112 > make_backend().fixed.size(20)
    assert differing(backend, ("hidden", *backend.model.heads), rng) == 0
    ordinary = make_backend(fixed=0, spoil=with_few_rows)
    for head in ("hidden", "embed", "classify", "span"):
        assert differing(ordinary, [head], rng, packs=3) > 0, head  # control


def remainders(places: Tensor, rows: int) -> Tensor:
    """Rows that a product for AVX2 computes in another order: those that fill no whole tile."""
    return places >= rows - rows % 24


@pytest.mark.parametrize("tokens", [256, 320, 512])
def test_a_library_with_tiles_of_24_rows_has_sizes_of_whole_tiles(
    make_backend, tokens, rng
) -> None:
    backend = make_backend(fixed=tokens, spoil=in_layers(remainders))
    assert backend.fixed.sizes[-1] == -(-tokens // 48) * 48
    for size in (20, 50, 130, tokens):
        assert backend.fixed.size(size) % 24 == 0
        assert backend.fixed.size(size) - size < 48
    assert differing(backend, ["hidden"], rng) == 0


class Steady(nn.Module):
    """Layers whose states are words, places, and how long the sequence around them is."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.config = bert.config

    def forward(self, packed: Packed) -> Tensor:
        lengths = packed.cu_seqlens.diff()
        around = torch.repeat_interleave(lengths, lengths)
        return torch.stack([packed.ids, packed.positions, around], 1).float()


def test_what_is_tried_is_the_same_in_every_size(
    make_backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "_first_layers", Steady)
    fixed = make_backend(fixed=2048).fixed
    assert all(fixed.size(size) == size for size in fixed.sizes)


@pytest.mark.parametrize(
    "halves",
    [
        lambda places, rows: places == rows - 1,
        lambda places, rows: places == 0,
        lambda places, rows: places % 16 == 15,
        lambda places, rows: places // 8 == 5,
    ],
)
def test_no_place_goes_untried(make_backend, halves) -> None:
    with pytest.raises(KernelError, match="depend on the position in a batch of 320 tokens; try"):
        make_backend(spoil=in_layers(halves))


def test_a_difference_that_bf16_mostly_hides_is_found(make_backend) -> None:
    """Of sums that are rounded one in some thousands differs, whatever the size."""

    def few(model: Model) -> None:
        for layer in model.bert.layers:
            layer.down = Rarely(layer.down)  # pyright: ignore

    backend = make_backend(torch.bfloat16, spoil=few)
    assert [backend.fixed.size(n) for n in (16, 64)] == [144, 144]
    assert all(make_backend(torch.bfloat16).fixed.size(n) < 144 for n in (16, 64))  # control


def test_heads_are_tried_at_every_place_too(make_backend) -> None:
    def spoil(model: Model) -> None:
        head: Any = model.heads["classify"]
        head.dense = Unsteady(head.dense, lambda places, rows: places == rows - 1)

    with pytest.raises(KernelError, match="depend on the position"):
        make_backend(spoil=spoil)


def test_another_number_of_threads_is_tried_and_refused(make_backend, rng, threads) -> None:
    sequences, heads = made_up(rng, 9), ("hidden", "embed", "classify")
    steady = make_backend()
    before = rows_of(steady, sequences, heads)
    by_threads = make_backend(spoil=in_layers(lambda places, rows: torch.get_num_threads() == 1))
    rows_of(by_threads, sequences, heads)
    threads(2)
    with pytest.raises(
        KernelError, match="with 2 threads results differ from those with the 1 that"
    ):
        rows_of(by_threads, sequences, heads)
    with suppress(KernelError):  # where the library itself counts threads
        assert rows_of(steady, sequences, heads) == before
    threads(1)
    assert rows_of(by_threads, sequences, heads)


# Every task, all at once and one by one ---------------------------------------------------------

TASKS = {
    "embed": WORDS,
    "hidden": WORDS,
    "classify": WORDS,
    "label": WORDS,
    "fill": [*WORDS, "[MASK]"],
    "answer": WORDS,
}


def inputs_for(task: str, rng: np.random.Generator, count: int) -> list[Any]:
    """Texts of many lengths for a task; some answers are looked for in several windows."""
    texts = [" ".join(rng.choice(TASKS[task], n)) for n in rng.integers(1, 40, count)]
    if task == "fill":
        return [f"{text[:60]} [MASK]" for text in texts]
    return [("who sat ?", f"{text} {text}") for text in texts] if task == "answer" else texts


def bits(answer: Any) -> str:
    """All of its numbers, to the last digit."""
    with np.printoptions(threshold=10**6, floatmode="unique"):
        return repr(answer)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_one_by_one_and_through_a_runner(
    make_encoder, make_backend, quiet_runtime, rng, task: str
) -> None:
    encoder = replace(make_encoder(task), backend=make_backend(), kernel=FASTEST)
    texts = inputs_for(task, rng, 24)
    together = [bits(x) for x in encoder._finish(encoder.prepare(task, texts), None)]
    alone = [bits(encoder._finish(encoder.prepare(task, [t]), None)[0]) for t in texts]
    assert alone == together
    for mode in MODES:
        with packhorse.PackRunner(encoder, timeout=0, rows=9, mode=mode) as runner:
            assert [bits(x) for x in runner.run(texts, task)] == together


# The real model ---------------------------------------------------------------------------------


def real_texts(rng: np.random.Generator, count: int) -> list[str]:
    return [" ".join(rng.choice(WORDS, int(n))) for n in np.ceil(90 ** rng.random(count))]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def minilm_encoder(request: pytest.FixtureRequest, minilm: Path) -> Encoder:
    return packhorse.load(minilm, device="cpu", dtype=request.param, invariant=True, budget=1024)


def test_minilm_alone_and_among_others(minilm_encoder: Encoder, rng) -> None:
    texts = real_texts(rng, 60)
    vectors = minilm_encoder.embed(texts)
    for _ in range(6):
        chosen = rng.permutation(len(texts))[: rng.integers(1, 30)]
        actual = minilm_encoder.embed([texts[i] for i in chosen])
        assert actual.tobytes() == vectors[chosen].tobytes()
    for i in range(8):
        assert minilm_encoder.embed([texts[i]]).tobytes() == vectors[i].tobytes()


def test_minilm_under_load(minilm_encoder: Encoder, quiet_runtime, rng) -> None:
    texts = real_texts(rng, 40)
    vectors = minilm_encoder.embed(texts)
    order = rng.permutation(3 * len(texts)) % len(texts)
    with packhorse.PackRunner(minilm_encoder, timeout=0.002) as runner:
        with ThreadPoolExecutor(4) as pool:
            futures = list(pool.map(lambda i: runner.submit(texts[i]), order))
        for i, future in zip(order, futures, strict=True):
            assert future.result().tobytes() == vectors[i].tobytes()
        assert runner.stats().batches > 1


# What it is opened with -------------------------------------------------------------------------


def test_a_kernel_that_lays_sequences_together_is_refused(minilm: Path) -> None:
    kernels = [
        name for name in attention.KERNELS if not attention.kernel(name).serves.one_at_a_time
    ]
    assert {"bucketed", "mask", "repack"} <= set(kernels)
    for kernel in kernels:
        with pytest.raises(
            KernelError,
            match=rf"'{kernel}' computes several sequences together.*use fused or varlen or",
        ):
            packhorse.load(minilm, device="cpu", kernel=kernel, invariant=True)


def test_where_the_fastest_would_the_reference_serves() -> None:
    assert attention.pick(CPU, torch.float16).name == "bucketed"
    for name in (None, "auto"):
        picked = invariant.pick(CPU, torch.float16, name=name, head_size=32)
        assert (
            picked.name == "reference"
            and "bucketed is the fastest that serves, but" in picked.reason
        )


def test_what_rounds_in_its_own_way_is_refused(minilm: Path, tmp_path: Path) -> None:
    graph = tmp_path / "packed.onnx"
    graph.write_bytes(onnxpack.KEY.encode())  # by which it is known; no more is read of it
    with pytest.raises(
        InputError, match=r"is a packed ONNX graph.*load the model that the graph was"
    ):
        packhorse.load(graph, invariant=True)
    with pytest.raises(InputError, match="invariant and graphs cannot be combined"):
        packhorse.load(minilm, graphs=True, invariant=True)
    with pytest.raises(InputError, match=r"'auto' cannot be combined.*name a dtype"):
        packhorse.load(minilm, dtype="auto", invariant=True)


def test_the_largest_size_holds_the_longest_sequence(minilm: Path) -> None:
    encoder = packhorse.load(minilm, device="cpu", invariant=True, budget=1)
    assert isinstance(encoder.backend, TorchBackend) and encoder.backend.fixed is not None
    assert encoder.backend.fixed.sizes[-1] >= encoder.max_length == 256 and encoder.budget == 1
    assert encoder.embed(["the cat sat " * 200, "a mat"], long="truncate").shape == (2, 384)


def test_from_the_shell(minilm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def said(*texts: str) -> list[Any]:
        assert main(["run", *texts, "--task", "embed", "--invariant", "--json"]) == 0
        document = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert document["invariant"]
        return [row["vector"] for row in document["results"]]

    assert said("a horse", "the cat sat on a mat", "one")[1:2] == said("the cat sat on a mat")
    assert main(["run", "a horse", "--invariant", "--kernel", "bucketed"]) == 2
    err = capfd.readouterr().err
    assert "computes several sequences together" in err and len(err.strip().splitlines()) == 1


def test_behind_the_server(minilm: Path, quiet_runtime, rng) -> None:
    texts = real_texts(rng, 12)
    settings = ServeSettings(model=(str(minilm),), threads=1, invariant=True, batch_tokens=512)
    hosts = hosting.open_models(settings)
    try:
        encoder, runner = hosts.default.encoder, hosts.default.runner
        assert isinstance(encoder.backend, TorchBackend) and encoder.backend.fixed is not None
        assert encoder.backend.fixed.sizes[-1] >= runner.shape.tokens == 512
        together = [vector.tobytes() for vector in runner.run(texts)]
        assert [runner.submit(text).result().tobytes() for text in texts] == together
    finally:
        hosts.close()
