"""The engine of a Ray cluster, on a real one of two nodes (`ray_nodes.py`), all on 127.0.0.1.

What a user sees of it (bytes, messages, silence) is looked at from outside, through the command;
the rest from this process. Ray must not have been imported before: it reads some of its variables
then.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from packhorse.data.corpus import cluster as engine
from packhorse.data.corpus.building import BuildOptions, CorpusProgress, build
from packhorse.data.corpus.workfolder import library_versions
from packhorse.data.packed.masking import Recipe
from packhorse.errors import InputError, MissingExtra

from .. import corpora
from ..corpora import tree, write_source
from ..processes import alive, command_line, family, listening

if importlib.util.find_spec("ray") is None:
    pytest.skip("no ray: pip install 'packhorse[cluster]'", allow_module_level=True)
pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'packhorse[data]'")
pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

CORPUS = corpora.documents(120)
SMALL = {"chunk_bytes": 1000, "shard_bytes": 4000, "eval_count": 20}
FLAGS = ["--max-length", "64", "--chunk-bytes", "1000", "--shard-bytes", "4000"]
FLAGS += ["--eval-count", "20", "--eval-hashes"]
OURS = re.compile(r"(reading|(planning|writing) (eval|train)): [\d,]+ of [\d,]+ \(\d+%\).*")
QUICK_TO_NOTICE = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class Nodes:
    """A cluster in another process, which obeys."""

    process: subprocess.Popen[str]
    address: str

    def say(self, line: str) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def _variables() -> Iterator[None]:
    """On the loopback, with a secret: in this process, the cluster's and the command's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            engine.LOOPBACK: "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(32).hex(),
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def nodes(_variables: None) -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need short paths
    script = Path(__file__).parents[1] / "ray_nodes.py"
    with subprocess.Popen(
        [sys.executable, script, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUICK_TO_NOTICE},
    ) as process:
        assert process.stdin and process.stdout
        try:
            yield Nodes(process, process.stdout.readline().strip())
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary, a corpus, and what becomes of it on one machine."""
    folder = tmp_path_factory.mktemp("home")
    corpora.write_vocabulary(folder / "vocab.txt")
    write_source(folder / "source", CORPUS)
    (folder / "eval.md5").write_text("".join(f"{corpora.md5(item)}\n" for item in CORPUS[::6]))
    build(config(folder, folder / "whole", engine="local", workers=1))
    return folder


def config(home: Path, out: Path, **options: object) -> BuildOptions:
    options |= {**SMALL, "recipe": Recipe(max_length=64), "eval_hashes": home / "eval.md5"}
    return BuildOptions((home / "source",), out, home / "vocab.txt", **options)  # type: ignore[arg-type]


def command(home: Path, out: Path, address: str | None) -> list[str]:
    paths = [str(home / "source"), str(out), "--tokenizer", str(home / "vocab.txt")]
    location = ["--engine", "ray", *(["--ray-address", address] if address else [])]
    flags = [*FLAGS, str(home / "eval.md5"), *location]
    return [sys.executable, "-m", "packhorse", "data", "build", *paths, *flags]


# Without a cluster -----------------------------------------------------------------------------


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[cluster\]"), engine.ray_cluster(tmp_path):
        pass


@pytest.mark.parametrize(
    "address", ["here", "ray://127.0.0.1:10001", "127.0.0.1:ray", ":1", "127.0.0.1:99999", "a..b:1"]
)
def test_no_address(address: str, tmp_path: Path, _variables: None) -> None:
    with (
        pytest.raises(InputError, match=r"is no address of a Ray|no Ray cluster answers"),
        engine.ray_cluster(tmp_path, address=address),
    ):
        pass


def test_a_ray_address_that_refuses_connections(
    home: Path, tmp_path: Path, _variables: None
) -> None:
    with socket.socket() as mute:  # bound, never listening
        mute.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"no Ray cluster answers at {address}: Connection"):
            build(config(home, tmp_path / "out", engine="ray", ray_address=address))
    assert engine.LOOPBACK in os.environ  # as it was before


def test_its_own_cluster_asks_for_a_token_and_gets_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PACKHORSE_API_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "for gated models")
    before = dict(os.environ)
    with engine._environment(local=True):
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32
        assert "PACKHORSE_API_KEY" not in os.environ
        assert os.environ["HF_TOKEN"] == "for gated models"
    assert dict(os.environ) == before
    with engine._environment(local=False):  # the user's cluster and what the user says of it
        assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert dict(os.environ) == before


def test_what_cannot_be_meant(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--ray-address needs --engine ray"):
        build(config(home, tmp_path / "out", ray_address="192.0.2.1:6379"))
    with pytest.raises(InputError, match="1 or more"), engine.ray_cluster(tmp_path, workers=0):
        pass


def test_a_node_is_admitted_only_where_all_is_the_same(tmp_path: Path) -> None:
    same = tuple(library_versions().items())
    place, file = tmp_path / "folder" / "place", tmp_path / "source"
    place.mkdir(parents=True)
    file.write_bytes(b"12345")
    name = engine.admit(place, same, {str(file): 5})
    assert (place / name).exists()
    with pytest.raises(InputError, match=r"has numpy \S+, not 0.1: the result would differ"):
        engine.admit(place, (*same, ("numpy", "0.1")), {})
    with pytest.raises(InputError, match=r"sees \S+source with 5 bytes, not 6"):
        engine.admit(place, same, {str(file): 6})
    with pytest.raises(InputError, match=r"cannot read \S+other: No such file"):
        engine.admit(place, same, {str(tmp_path / "other"): 5})
    with pytest.raises(InputError, match=r"cannot write to \S+: Not a directory"):
        engine.admit(file, same, {})
    with pytest.raises(InputError, match=r"does not see \S+folder: .* shared disk"):
        engine.admit(tmp_path / "folder" / "elsewhere", same, {})


# On two nodes ----------------------------------------------------------------------------------


def test_the_same_bytes_and_not_a_word_of_ray(nodes: Nodes, home: Path, tmp_path: Path) -> None:
    """From another folder than the nodes', with relative paths."""
    paths = ["source", "../out", "--tokenizer", "vocab.txt"]
    words = [*command(home, tmp_path, nodes.address)[:5], *paths]
    shutil.copytree(home, tmp_path / "here")
    words += [*FLAGS, "eval.md5", "--engine", "ray", "--ray-address", nodes.address]
    message = subprocess.run(words, cwd=tmp_path / "here", capture_output=True, text=True)
    assert message.returncode == 0, message.stderr
    assert all(OURS.fullmatch(line) for line in message.stderr.splitlines()), message.stderr
    assert "no plan is fuller" in message.stdout
    assert tree(tmp_path / "out") == tree(home / "whole")
    assert (tmp_path / "out" / "eval" / "shard-00000.arrow").exists()


def test_in_order_on_both_few_in_flight(nodes: Nodes, tmp_path: Path) -> None:
    taken, ahead, results = 0, [], []

    def items() -> Iterator[tuple[int]]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield (number,)

    def work(number: int) -> tuple[int, str, str]:
        import os
        import time

        import ray

        time.sleep(0.5 if number == 20 else 0.02)
        node = ray.get_runtime_context().get_node_id()
        return number, node, os.environ["TOKENIZERS_PARALLELISM"]

    with engine.ray_cluster(tmp_path, address=nodes.address) as run:
        for result in run(work, items()):
            results.append(result)
            ahead.append(taken - len(results))
    assert [number for number, *_ in results] == [*range(40)]
    assert len({node for _, node, _ in results}) == 2
    assert {threads for *_, threads in results} == {"false"}
    assert max(ahead) == 2 * engine.AHEAD - 1  # while number 20 kept all others waiting
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_errors_of_the_work(nodes: Nodes, tmp_path: Path) -> None:
    def refuse(number: int) -> int:
        if number == 3:
            raise MissingExtra("ray", "cluster")  # of the kinds that cannot travel
        return number

    def fail(number: int) -> float:
        return 1 / number

    with engine.ray_cluster(tmp_path, address=nodes.address) as run:
        with pytest.raises(InputError) as caught:
            list(run(refuse, [(n,) for n in range(8)]))
        assert str(caught.value) == str(MissingExtra("ray", "cluster"))
        with pytest.raises(ZeroDivisionError):
            list(run(fail, [(1,), (0,)]))
        with pytest.raises(InputError, match="connected to Ray already"):
            engine.ray_cluster(tmp_path, address=nodes.address).__enter__()
        assert [*run(fail, [(1,), (2,)])] == [1, 0.5]


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_but_not_for_ever(nodes: Nodes, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def die(number: int, times: int) -> int:
        import os

        if len(os.listdir(marks)) < times:
            (marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with engine.ray_cluster(tmp_path, address=nodes.address, workers=1) as run:
        assert [*run(die, [(n, 2) for n in range(4)])] == [0, 1, 2, 3]
        assert len([*marks.iterdir()]) == 2
        with pytest.raises(InputError, match=r"died 4 times.*run the same command to go on"):
            list(run(die, [(0, 100)]))


@pytest.mark.slow
def test_a_node_that_dies_changes_nothing(nodes: Nodes, home: Path, tmp_path: Path) -> None:
    steps = 0

    def watch(progress: CorpusProgress) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            nodes.say("kill")

    try:
        build(config(home, tmp_path / "out", engine="ray", ray_address=nodes.address), watch)
    finally:
        nodes.say("add")
    assert steps > 20
    assert tree(tmp_path / "out") == tree(home / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("retries", [engine.RETRIES, 0])
def test_what_it_was_at_is_done_again(
    retries: int, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nothing is done again: the control."""
    monkeypatch.setattr(engine, "RETRIES", retries)

    def kill_and_count() -> Iterator[int]:
        with engine.ray_cluster(tmp_path, address=nodes.address) as run:
            results = run(idle(), [(n,) for n in range(20)])
            busy: set[str] = set()
            while len(busy) < 2:
                number, node = next(results)
                busy.add(node)
                yield number
            time.sleep(0.2)  # both are at the next now
            nodes.say("kill")
            yield from (number for number, _ in results)

    try:
        if retries:
            assert [*kill_and_count()] == [*range(20)]
        else:
            with pytest.raises(InputError, match="a worker of the cluster died 1 times"):
                list(kill_and_count())
    finally:
        nodes.say("add")


def idle() -> Callable[[int], tuple[int, str]]:
    """Half a second of work, and where; made here, so that it travels by value."""

    def work(number: int) -> tuple[int, str]:
        import time

        import ray

        time.sleep(0.5)
        return number, ray.get_runtime_context().get_node_id()

    return work


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_a_killed_driver_goes_on(alone: bool, nodes: Nodes, home: Path, tmp_path: Path) -> None:
    out, address = tmp_path / "out", None if alone else nodes.address
    null = subprocess.DEVNULL
    with subprocess.Popen(command(home, out, address), stdout=null, stderr=null) as process:
        _until(lambda: len([*out.glob(".build/*/part-*.arrow")]) > 3)
        processes = family(process.pid)
        logs = {
            home for pid in processes for home in re.findall(r"/tmp/ray-\w+", command_line(pid))
        }
        if alone:
            assert len(processes) > 4 and len(listening(processes)) > 4
            assert {*listening(processes)} == {"127.0.0.1"}
        process.kill()
    assert not (out / "train").exists()
    went = subprocess.run(command(home, out, address), capture_output=True, text=True)
    assert went.returncode == 0, went.stderr
    assert all(OURS.fullmatch(line) for line in went.stderr.splitlines()), went.stderr
    assert tree(out) == tree(home / "whole")
    for folder in logs if alone else ():
        shutil.rmtree(folder)
    # Ray's agents look for the dead cluster for a minute.
    _until(lambda: not [pid for pid in processes if alive(pid)], 120)


@pytest.mark.slow
def test_a_node_without_packhorse(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "packhorse").mkdir()
    (tmp_path / "packhorse" / "__init__.py").write_text("raise ImportError('not here')")
    nodes.say(f"add PYTHONPATH={tmp_path}")
    try:
        with (
            pytest.raises(InputError, match=r"not every node.*\(127.*cannot run Packhorse: not he"),
            engine.ray_cluster(tmp_path, address=nodes.address),
        ):
            pass
    finally:
        nodes.say("kill")


@pytest.mark.slow
def test_a_node_that_does_not_share_the_folder(nodes: Nodes, tmp_path: Path) -> None:
    """One that is there from the start; and one that comes when the work has begun."""
    if os.geteuid():
        pytest.skip("a folder can be hidden from a node only by root")

    unshared = f"does not see {tmp_path}: it must be on a shared disk"
    try:
        with engine.ray_cluster(tmp_path, address=nodes.address) as run:
            nodes.say(f"blind {tmp_path}")
            with pytest.raises(InputError, match=rf"the node {socket.gethostname()} {unshared}"):
                list(run(idle(), [(n,) for n in range(60)]))
        with (
            pytest.raises(InputError, match=f"not every node.*{unshared}"),
            engine.ray_cluster(tmp_path, address=nodes.address),
        ):
            pass
    finally:
        nodes.say("kill")


def _until(there: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)
