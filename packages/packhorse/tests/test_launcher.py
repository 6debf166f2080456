"""Ranks started as one command: they meet, end together, and are open to nobody else."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from packhorse.errors import InputError, RankLost
from packhorse.launcher import LOOPBACK, launch

PLAIN = """
    import json, os, signal, sys, time
    from pathlib import Path
"""
RANK = """
    import torch
    from packhorse.dist import decode, encode, joined
    from packhorse.errors import RankLost

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


def test_ranks_join_exchange_values_and_leave(
    script: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = script("""
        with joined(torch.device("cpu"), timeout=300) as team:
            sums = team.add(torch.tensor([2**53 + team.rank, 1]))
            exact = team.add(torch.tensor([0.1 + team.rank], dtype=torch.float64))
            mine = encode({"rank": team.rank, "ids": torch.arange(3 * team.rank)})
            every = [decode(each) for each in team.gather(mine)]
            said = team.broadcast(b"from 0" if team.rank == 0 else None)
            nothing = team.broadcast(b"" if team.rank == 0 else None)
            weights = torch.full((4,), float(team.rank))
            team.share([weights])
            sent = [sums.tolist(), exact.tolist(), [e["ids"].tolist() for e in every]]
            sent += [said.decode(), nothing.decode(), weights.tolist()]
            seen = team.gather(json.dumps(sent).encode())
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "GONE")
            told = {name: os.environ.get(name) for name in names}
            print(json.dumps([team.rank, [json.loads(each) for each in seen], told]))
            print("a note", file=sys.stderr)
    """)
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("GONE", "still here")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # of a cluster; these ranks are on one machine
    assert launch(2, command, environ={"GONE": None, "OMP_NUM_THREADS": "1"}) == 0
    assert dict(os.environ) == before | {"GONE": "still here", "GLOO_SOCKET_IFNAME": "eth0"}
    assert signal.getsignal(signal.SIGTERM) is handler
    out, err = capfd.readouterr()
    (line,) = out.splitlines()  # of rank 0 alone
    rank, seen, environ = json.loads(line)
    assert rank == 0 and err.count("a note") == 1
    expected = [[2**54 + 1, 2], [0.1 + 1.1], [[], [0, 1, 2]], "from 0", "", [0.0] * 4]
    assert seen == [expected, expected]
    assert environ["GONE"] is None and environ["OMP_NUM_THREADS"] == "1"
    loopback = LOOPBACK.get(sys.platform)
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == loopback


PAUSED = """
    with joined(torch.device("cpu"), timeout=60) as team:
        team.wait()
        if team.rank == 0:
            print("met", flush=True)
            sys.stdin.readline()
        team.wait()
        print("parted", flush=True)
"""
TORCHRUN = """
    import sys
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    settings = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    config = LaunchConfig(1, 1, 2, run_id="control", max_restarts=0, **settings)
    elastic_launch(config, sys.argv[1])(*sys.argv[2:])
"""
OURS = "import sys; from packhorse.launcher import launch; sys.exit(launch(2, sys.argv[1:]))"


class Payload:
    """A pickle that makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses at which a process and all that it started accept connections."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    sockets = [socket for process in tree for socket in process.net_connections("inet")]
    return [(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN]


def attack(port: int, payload: Payload) -> None:
    """Send a pickle as plain bytes, and write it under every key that a store of torch's has."""
    pickled = pickle.dumps(payload)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(pickled)
    with contextlib.suppress(RuntimeError):  # it is no store; noticed when the other side ends
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
        for key in store.list_keys():
            store.set(key, base64.b64encode(pickled))  # as torchrun's rendezvous keeps its state


def attacked(start: str, command: list[str], payload: Payload) -> tuple[list[Any], int, str]:
    """Run two ranks, attack all that listens while they are going, and let them end.

    Returns the addresses that were attacked, the exit code and what came after the attack.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    words = [sys.executable, "-W", "error", "-c", textwrap.dedent(start), *command]
    with subprocess.Popen(words, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "met\n"
        addresses = listening(process.pid)
        attackers = [Thread(target=attack, args=(port, payload)) for _, port in addresses]
        for attacker in attackers:
            attacker.start()
        for attacker in attackers:
            attacker.join(1)  # a client of a store waits forever for one that is none
        output, _ = process.communicate("\n", timeout=60)
    for attacker in attackers:
        attacker.join(60)
    return addresses, process.returncode, output


def test_ranks_listen_on_loopback_and_unpickle_nothing(script: Any, tmp_path: Path) -> None:
    payload = Payload(tmp_path / "unpickled")
    addresses, code, output = attacked(OURS, script(PAUSED), payload)
    assert not payload.file.exists()
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    assert len(addresses) == 2, "Gloo's, one a rank"
    assert (code, output) == (0, "parted\n")


@pytest.mark.slow
def test_the_attack_succeeds_against_torchrun(script: Any, tmp_path: Path) -> None:
    """The control: the same attack runs code where torchrun's rendezvous listens."""
    payload = Payload(tmp_path / "unpickled")
    addresses, _, _ = attacked(TORCHRUN, script(PAUSED), payload)
    assert payload.file.exists()
    assert not {host for host, _ in addresses} <= {"127.0.0.1", "::1"}


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
    messages = []
    assert launch(2, command, report=messages.append) == 128 + signal.SIGKILL
    (line,) = messages
    assert line.startswith("rank 1 was killed by SIGKILL")


def test_what_a_rank_said_before_it_ended_is_shown(script: Any, tmp_path: Path) -> None:
    command = script(
        """
        import subprocess
        if os.environ["RANK"] == "1":
            own = subprocess.Popen(["sleep", "600"])
            (Path(__file__).parent / "own").write_text(str(own.pid))
            print("packhorse: the file is missing", file=sys.stderr)
            os._exit(2)
        time.sleep(600)
        """,
        header="",
    )
    messages = []
    assert launch(2, command, report=messages.append) == 2
    (line,) = messages
    assert line.startswith("rank 1 ended with exit code 2")
    assert line.endswith("packhorse: the file is missing")
    await_end([int((tmp_path / "own").read_text())])  # what ranks started ends with them
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
    words = [sys.executable, "-c", OURS, *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.stdout.read() == b"saved\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
def test_ranks_end_with_their_launcher(script: Any) -> None:
    command = script("""
        with joined(torch.device("cpu"), timeout=300) as team:
            print(json.dumps([int(pid) for pid in team.gather(str(os.getpid()).encode())]))
            sys.stdout.flush()
            team.wait()
            time.sleep(600)
    """)
    words = [sys.executable, "-c", OURS, *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ranks = json.loads(process.stdout.readline())
        process.kill()
        await_end(ranks)


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 300
    while any(map(running, pids)):
        assert time.monotonic() < deadline, "they work on alone"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """A process that has ended may be there until someone asks how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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
    assert launch(2, command) == RankLost.exit_code
