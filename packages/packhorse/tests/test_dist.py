"""Processes as one: what they tell each other, and that one which dies takes the others with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import dist
from packhorse.dist import Team, add_in_buckets, decode, encode, team_from_environment
from packhorse.errors import InputError, RankLost
from packhorse.launcher import LAUNCHER


def test_sent_values_arrive_unchanged() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    value = {
        "tensors": [whole, whole.T, whole[0], torch.tensor(3), torch.zeros(0, 2), whole.bfloat16()],
        "array": (7, np.arange(4, dtype=np.float32)[::2]),
        "plain": [None, True, -1, 0.1, float("inf"), "é", [], (), {}],
    }
    result = decode(encode(value))
    for single, another in zip(value["tensors"], result["tensors"], strict=True):
        assert (
            single.dtype == another.dtype
            and single.shape == another.shape
            and torch.equal(single, another)
        )
    assert isinstance(result["array"][1], np.ndarray) and isinstance(result["array"], tuple)
    assert (result["array"][0], result["array"][1].tolist()) == (7, [0.0, 2.0])
    assert result["plain"] == value["plain"] and type(result["plain"][-2]) is tuple


@pytest.mark.parametrize("value", [object(), {1: 2}, [Path()], b"bytes"])
def test_other_values_cannot_be_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(value)


def test_small_tensors_are_added_together() -> None:
    tensors = [torch.full((n,), float(n)) for n in (3, 5, 40, 2, 2)]
    tensors += [torch.ones(2, 3, dtype=torch.float64).T, torch.ones(1, dtype=torch.float64)]
    expected, calls = [2 * tensor for tensor in tensors], []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.numel())
        return 2 * tensor

    add_in_buckets(tensors, add, size=64)
    assert calls == [8, 40, 4, 7]
    assert all(map(torch.equal, tensors, expected))


def test_alone_everything_is_what_it_is() -> None:
    assert team_from_environment({}) == team_from_environment({"RANK": "0"}) == Team()
    tensor = torch.ones(2)
    with dist.joined(torch.device("cpu")) as team:
        assert team.add(tensor) is tensor
        assert (team.gather(b"me"), team.broadcast(b"me")) == ([b"me"], b"me")
        team.share([tensor])
        team.wait()
    assert not torch.distributed.is_initialized()


def test_a_rank_reads_its_place_from_the_environment() -> None:
    few = {"RANK": "1", "WORLD_SIZE": "4"}
    assert team_from_environment(few) == Team(1, 4, 1, 4)
    assert team_from_environment(few | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}) == Team(
        1, 4, 0, 2
    )
    for wrong in ({"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}):
        with pytest.raises(InputError, match="names no rank"):
            team_from_environment(few | wrong)


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    dist._take_device(torch.device("cuda"), Team(3, 4, local=1, local_world=2))
    assert taken == [1]
    with pytest.raises(InputError, match="3 ranks, but 2 of cuda"):
        dist._take_device(torch.device("cuda"), Team(0, 3, 0, 3))
    with pytest.raises(InputError, match="each rank takes its own: say cuda"):
        dist._take_device(torch.device("cuda:1"), Team(0, 2, 0, 2))


def test_a_rank_whose_launcher_is_gone_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    monkeypatch.setenv(LAUNCHER, str(gone.pid))
    if sys.platform == "linux":
        with pytest.raises(RankLost, match="started this rank has ended"):
            dist._end_with_launcher()
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    dist._end_with_launcher()
