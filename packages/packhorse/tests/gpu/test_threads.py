"""One model with CUDA graphs under several callers: threads, streams and runners.

A graph has one set of inputs and one output, so a caller that comes between another's replay and
the copy of its output would give it the wrong vectors. Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import packhorse
from packhorse import attention
from packhorse.packing.batch import Packed
from packhorse.runtime import proof
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.runner import PackRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")
CALLERS = 4
CALLS = 400  # of each; within a few dozen some went wrong where nobody waited for his turn
WORDS = "the cat sat on a mat and saw one red hat while an old horse carries sacks to market"


@pytest.fixture(autouse=True)
def _hasty() -> Iterator[None]:
    """Threads take turns every few microseconds, so that what can come between does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def make_packed(lengths: list[int], seed: int) -> Packed:
    chance = np.random.default_rng(seed)
    return Packed.build(
        [proof.SyntheticSequence(chance.integers(0, 97, n), np.zeros(n, int)) for n in lengths]
    )


def at_once(work: Callable[[int], int]) -> int:
    """The sum of what each caller returns; all begin together."""
    begin = threading.Barrier(CALLERS)

    def caller(number: int) -> int:
        begin.wait(60)
        return work(number)

    with ThreadPoolExecutor(CALLERS) as pool:
        return sum(pool.map(caller, range(CALLERS)))


@pytest.mark.parametrize("streams", ["one", "each its own"])
def test_callers_get_their_own_results(make_model, streams: str) -> None:
    """Batches of four shapes, from four threads: what the model without graphs makes of each."""
    model = make_model(torch.float16, width=128, heads=4, positions=512, std=0.1)
    model.bert.use(attention.pick(CUDA, torch.float16).kernel)
    shapes = ([100, 20, 7], [60, 60, 8], [300, 200, 90], [5, 3])
    packs = [make_packed(shapes[seed % len(shapes)], seed) for seed in range(16)]
    eager = TorchBackend(model, CUDA)
    expected = [eager(packed, ["hidden"])[0].float().cpu() for packed in packs]
    graphs = TorchBackend(model, CUDA, graphs=True)

    def distance(result: torch.Tensor, which: int) -> float:
        return float((result - expected[which]).norm() / expected[which].norm())

    # One batch's results are this far from those of another of its shape; rounding is far below.
    apart = min(distance(expected[i + len(shapes)], i) for i in range(len(packs) - len(shapes)))
    for which in (0, 1, 2):  # the last shape is recorded by whichever thread comes first
        alone = graphs(packs[which], ["hidden"])[0].float().cpu()
        assert distance(alone, which) < apart / 3

    def work(number: int) -> int:
        chance, wrong = random.Random(number), 0
        with torch.cuda.stream(torch.cuda.Stream()) if streams != "one" else nullcontext():
            for _ in range(CALLS):
                which = chance.randrange(len(packs))
                result = graphs(packs[which], ["hidden"])[0].float().cpu()
                wrong += distance(result, which) >= apart / 3
        return wrong

    assert at_once(work) == 0


def test_runners_beside_embed(minilm: Path) -> None:
    """Two runners over one encoder and two threads that call `embed`: each text its own vector."""
    plain, graphs = (packhorse.load(minilm, device="cuda", graphs=on) for on in (False, True))
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS.split(), k=1 + n % 30)) for n in range(400)]
    texts = list(dict.fromkeys(texts))[:200]
    vectors = plain.embed(texts)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def wrong(indices: list[int], result: list[np.ndarray]) -> int:
        """How many are nearer to another text than to their own, or far from it."""
        likeness = np.stack(result) @ vectors.T / np.linalg.norm(result, axis=1)[:, None]
        separate = likeness[np.arange(len(indices)), indices]
        return int(((separate < 0.99) | (separate < likeness.max(1) - 1e-3)).sum())

    options = {"rows": 8, "capacity": 64, "timeout": 0.0, "publish": False}
    with PackRunner(graphs, **options) as first, PackRunner(graphs, **options) as second:

        def work(number: int) -> int:
            chance, mistakes = random.Random(number), 0
            for _ in range(CALLS // 8):
                indices = [chance.randrange(len(texts)) for _ in range(32)]
                requests = [texts[i] for i in indices]
                ask = (first.run, second.run, graphs.embed, graphs.embed)[number]
                mistakes += wrong(indices, list(ask(requests)))
            return mistakes

        assert at_once(work) == 0
