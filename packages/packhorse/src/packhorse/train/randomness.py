"""Random numbers that go on where they stopped: the states of torch's generators, as tensors.

Training draws from two of them, the CPU's and the accelerator's (dropout; Philox' seed and place on
CUDA). Order and masks of the data are functions of seed and place (`data.order`,
`data.packed.masking`), and nothing draws from Python's or numpy's generators, so there is no more
to keep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

CPU = "cpu"


def capture(device: torch.device) -> dict[str, Tensor]:
    """The states of this process, by kind of device; `device` is the one it trains on."""
    states = {CPU: torch.get_rng_state()}
    if device.type != CPU:
        states[device.type] = torch.get_device_module(device.type).get_rng_state()
    return states


def begin(seed: int, rank: int) -> None:
    """Each rank draws its own; the first as a run without ranks would."""
    torch.manual_seed(_seed(torch.tensor(seed), rank) if rank else seed)


def put_back(
    states: Sequence[Mapping[str, Tensor]], device: torch.device, rank: int, world: int
) -> list[str]:
    """Let this rank draw on as it would have; notes say where it cannot.

    A rank that was not there, or a kind of device, begins anew from what rank 0 had and its own
    number: always the same, and unlike the other ranks.
    """
    notes = []
    if len(states) != world:
        notes.append(
            f"ranks: {len(states)} when it was written, {world} now; "
            "from here on other random numbers are drawn than would have been"
        )
    own = states[rank] if rank < len(states) else {}
    if not {CPU, device.type} <= own.keys():
        torch.manual_seed(_seed(states[0][CPU], rank))
    if own and device.type not in own:
        notes.append(f"it was not written on {device.type}: random numbers there begin anew")
    if CPU in own:
        torch.set_rng_state(own[CPU])
    if device.type != CPU and device.type in own:
        torch.get_device_module(device.type).set_rng_state(own[device.type])
    return notes


def _seed(state: Tensor, rank: int) -> int:
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:7], "little")
