"""A recorded micro batch through torch's inductor, with what it compiled kept on disk.

    graph = compile_graph(graph, inputs, folder="poptorch-cache")

The folder is the one of `enableExecutableCaching` or `POPTORCH_CACHE_DIR`, else that of
`packhorse.executable`; compiled code is loaded from nowhere else, and from there only if nobody but
the user can write to it. Random numbers are left to torch's own kernels, so that dropout draws what
it would have drawn. Sums are taken in another order than modules take them: the numbers are those
of the plain loop within rounding, no longer to the bit.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from packhorse import executable
from packhorse.cache import keep_compiled_code_private
from packhorse_port.losses import Untraceable
from packhorse_port.trace import Graph

SETTINGS = {"fallback_random": True}
NAMES = ("PACKHORSE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def compile_graph(graph: Graph, inputs: Sequence[Tensor], folder: str | None) -> Graph:
    """The same graph, compiled for these inputs; `Untraceable` where it cannot be."""
    if executable.cpp_compiler() is None:
        raise Untraceable("no C++ compiler is installed (g++ or clang++)")
    from torch._inductor import config

    run = torch.compile(graph.module, dynamic=False, fullgraph=True)
    copies, state = [each.clone() for each in inputs], torch.get_rng_state()
    with _cached(folder), warnings.catch_warnings(), config.patch(SETTINGS), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            run(*copies)  # which compiles it
        except Exception as error:  # the compiler's own troubles are many, and none is the user's
            raise Untraceable(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
        finally:
            torch.set_rng_state(state)
    return replace(graph, run=run, mode=torch.no_grad)


@contextmanager
def _cached(folder: str | None) -> Iterator[None]:
    """Within it, compiled code goes to and comes from the folder."""
    before = {name: os.environ.get(name) for name in NAMES}
    if folder:
        os.environ["PACKHORSE_CACHE"] = folder
    keep_compiled_code_private()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
