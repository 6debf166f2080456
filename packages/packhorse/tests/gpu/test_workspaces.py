"""A CUDA graph writes into memory of its own alone, cuBLAS's workspace included.

torch.compile with CUDA graphs frees all workspaces when it records. Skipped where there is no
NVIDIA GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from packhorse import executable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MEBIBYTE = 1 << 20
SIZES = (64, 32, 16, 8, 4, 2)  # MiB; the workspace is one of them, by processor and torch
SENTINEL = 77


@contextmanager
def as_torch_records(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """The control: torch's own way, which takes the workspace that is there."""
    with torch.cuda.graph(graph, **options):
        yield


def overwritten(record: Any) -> int:
    """Bytes of other tensors that replays of a graph with split sums changed."""
    left_matrix, right_matrix = (torch.randn(64, 65536, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = left_matrix @ right_matrix.T  # makes the stream's workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with record(graph, stream=stream):
        product = left_matrix @ right_matrix.T
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does around captures of its own
    with torch.cuda.stream(stream):
        others = [
            torch.full((size * MEBIBYTE,), SENTINEL, dtype=torch.uint8, device="cuda")
            for size in SIZES
            for _ in range(4)
        ]
    torch.cuda.synchronize()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(product, expected)
    return sum(int((another != SENTINEL).sum()) for another in others)


def test_a_graph_keeps_its_workspace() -> None:
    assert overwritten(executable.recording) == 0


def test_the_control_writes_into_other_tensors() -> None:
    assert overwritten(as_torch_records) > 0
