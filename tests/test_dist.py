"""Processes as one: what they tell each other, and that one which dies takes the others with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import dist
from packhorse.dist import Team, add_in_buckets, decode, encode, launch, told
from packhorse.errors import InputError

PLAIN = """
    import json, os, signal, sys, time
    from pathlib import Path
"""
RANK = """
    import torch
    from packhorse.dist import RankLost, decode, encode, joined

    def end(error):
        print(f"packhorse: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """What each rank runs, as a command."""

    def written(text: str, header: str = RANK) -> list[str]:
        file = tmp_path / "rank.py"
        file.write_text("".join(map(textwrap.dedent, (PLAIN, header, text))))
        return [sys.executable, "-W", "error", str(file)]

    return written


def test_what_is_told_comes_back_as_it_was() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    value = {
        "tensors": [whole, whole.T, whole[0], torch.tensor(3), torch.zeros(0, 2), whole.bfloat16()],
        "array": (7, np.arange(4, dtype=np.float32)[::2]),
        "plain": [None, True, -1, 0.1, float("inf"), "é", [], (), {}],
    }
    found = decode(encode(value))
    for one, other in zip(value["tensors"], found["tensors"], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    assert isinstance(found["array"][1], np.ndarray) and isinstance(found["array"], tuple)
    assert (found["array"][0], found["array"][1].tolist()) == (7, [0.0, 2.0])
    assert found["plain"] == value["plain"] and type(found["plain"][-2]) is tuple


@pytest.mark.parametrize("value", [object(), {1: 2}, [Path()], b"bytes"])
def test_nothing_else_is_told(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be told"):
        encode(value)


def test_small_tensors_are_added_together() -> None:
    tensors = [torch.full((n,), float(n)) for n in (3, 5, 40, 2, 2)]
    tensors += [torch.ones(2, 3, dtype=torch.float64).T, torch.ones(1, dtype=torch.float64)]
    wanted, calls = [2 * tensor for tensor in tensors], []

    def add(mine: torch.Tensor) -> torch.Tensor:
        calls.append(mine.numel())
        return 2 * mine

    add_in_buckets(tensors, add, size=64)
    assert calls == [8, 40, 4, 7]
    assert all(map(torch.equal, tensors, wanted))


def test_alone_everything_is_what_it_is() -> None:
    assert told({}) == told({"RANK": "0"}) == Team()
    mine = torch.ones(2)
    with dist.joined(torch.device("cpu")) as team:
        assert team.add(mine) is mine
        assert (team.gather(b"me"), team.hear(b"me")) == ([b"me"], b"me")
        team.share([mine])
        team.wait()
    assert not torch.distributed.is_initialized()


def test_the_environment_says_who_one_is() -> None:
    few = {"RANK": "1", "WORLD_SIZE": "4"}
    assert told(few) == Team(1, 4, 1, 4)
    assert told(few | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}) == Team(1, 4, 0, 2)
    for wrong in ({"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}):
        with pytest.raises(InputError, match="names no rank"):
            told(few | wrong)


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    dist._take(torch.device("cuda"), Team(3, 4, local=1, local_world=2))
    assert taken == [1]
    with pytest.raises(InputError, match="3 ranks, but 2 of cuda"):
        dist._take(torch.device("cuda"), Team(0, 3, 0, 3))
    with pytest.raises(InputError, match="each rank takes its own: say cuda"):
        dist._take(torch.device("cuda:1"), Team(0, 2, 0, 2))


def test_ranks_meet_tell_each_other_and_part(script: Any, capfd: Any) -> None:
    command = script("""
        with joined(torch.device("cpu"), timeout=30) as team:
            sums = team.add(torch.tensor([2**53 + team.rank, 1]))
            exact = team.add(torch.tensor([0.1 + team.rank], dtype=torch.float64))
            mine = encode({"rank": team.rank, "ids": torch.arange(3 * team.rank)})
            every = [decode(each) for each in team.gather(mine)]
            said = team.hear(b"from 0" if team.rank == 0 else None)
            nothing = team.hear(b"" if team.rank == 0 else None)
            weights = torch.full((4,), float(team.rank))
            team.share([weights])
            sent = [sums.tolist(), exact.tolist(), [e["ids"].tolist() for e in every]]
            sent += [said.decode(), nothing.decode(), weights.tolist()]
            seen = team.gather(json.dumps(sent).encode())
            names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "GONE")
            told = {name: os.environ.get(name) for name in names}
            print(json.dumps([team.rank, [json.loads(each) for each in seen], told]))
            print("a note", file=sys.stderr)
    """)
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ["GONE"] = "still here"
    assert launch(2, command, environ={"GONE": None, "OMP_NUM_THREADS": "1"}) == 0
    assert os.environ.pop("GONE") == "still here"
    assert dict(os.environ) == before and signal.getsignal(signal.SIGTERM) is handler
    out, err = capfd.readouterr()
    (line,) = out.splitlines()  # of rank 0 alone
    rank, seen, environ = json.loads(line)
    assert rank == 0 and err.count("a note") == 1
    wanted = [[2**54 + 1, 2], [0.1 + 1.1], [[], [0, 1, 2]], "from 0", "", [0.0] * 4]
    assert seen == [wanted, wanted]
    assert environ["MASTER_ADDR"] == "127.0.0.1" and environ["OMP_NUM_THREADS"] == "1"
    assert environ["GONE"] is None
    assert environ["GLOO_SOCKET_IFNAME"] == dist.LOOPBACK.get(sys.platform)


def test_a_killed_rank_ends_the_others_and_is_named(script: Any, capfd: Any) -> None:
    command = script("""
        try:
            with joined(torch.device("cpu"), timeout=60) as team:
                team.wait()
                if team.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                team.wait()
        except RankLost as error:
            end(error)
    """)
    said = []
    assert launch(2, command, say=said.append) == 128 + signal.SIGKILL
    (line,) = said
    assert line.startswith("rank 1 was killed by SIGKILL")


def test_what_a_rank_said_before_it_ended_is_shown(script: Any) -> None:
    command = script(
        """
        if os.environ["RANK"] == "1":
            print("packhorse: the file is missing", file=sys.stderr)
            sys.exit(2)
        time.sleep(60)
        """,
        header="",
    )
    said = []
    assert launch(2, command, say=said.append) == 2
    (line,) = said
    assert line.startswith("rank 1 ended with exit code 2")
    assert line.endswith("packhorse: the file is missing")
    with pytest.raises(InputError, match="at least one"):
        launch(0, command)


def test_a_signal_is_passed_on_and_waited_for(script: Any) -> None:
    command = script(
        """
        came, rank = [], os.environ["RANK"]
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
        here = Path(__file__).parent
        (here / f"ready {rank}").touch()
        while not all((here / f"ready {each}").exists() for each in "01"):
            time.sleep(0.01)
        print("ready", flush=True)
        while not came:
            time.sleep(0.01)
        (here / f"asked {rank}").touch()
        while not all((here / f"asked {each}").exists() for each in "01"):
            time.sleep(0.01)
        if rank == "0":
            time.sleep(0.5)
            print("saved", flush=True)
        """,
        header="",
    )
    start = f"import sys; from packhorse.dist import launch; sys.exit(launch(2, {command!r}))"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.stdout.read() == b"saved\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
def test_ranks_end_with_their_launcher(script: Any) -> None:
    command = script("""
        with joined(torch.device("cpu"), timeout=30) as team:
            print(json.dumps([int(pid) for pid in team.gather(str(os.getpid()).encode())]))
            sys.stdout.flush()
            team.wait()
            time.sleep(20)
    """)
    start = f"import sys; from packhorse.dist import launch; sys.exit(launch(2, {command!r}))"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ranks = json.loads(process.stdout.readline())
        process.kill()
        deadline = time.monotonic() + 10
        while any(map(running, ranks)):
            assert time.monotonic() < deadline, "they work on without it"
            time.sleep(0.05)


def running(pid: int) -> bool:
    """A process that has ended may be there until someone asks how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_rank_whose_launcher_is_gone_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    monkeypatch.setenv(dist.LAUNCHER, str(gone.pid))
    if sys.platform == "linux":
        with pytest.raises(dist.RankLost, match="started this rank has ended"):
            dist._end_with_launcher()
    monkeypatch.setenv(dist.LAUNCHER, str(os.getpid()))
    dist._end_with_launcher()


@pytest.mark.slow
def test_a_rank_that_stands_still_is_given_up(script: Any) -> None:
    command = script("""
        try:
            with joined(torch.device("cpu"), timeout=3) as team:
                team.wait()
                if team.rank == 1:
                    time.sleep(600)
                team.wait()
        except RankLost as error:
            print(error, file=sys.stderr)
            sys.exit(9)
    """)
    assert launch(2, command, patience=2) == 9


@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_waited_for_without_end(script: Any) -> None:
    command = script("""
        if os.environ["RANK"] == "1":
            time.sleep(600)
        try:
            with joined(torch.device("cpu"), timeout=3):
                pass
        except RankLost as error:
            end(error)
    """)
    assert launch(2, command) == dist.RankLost.exit_code
