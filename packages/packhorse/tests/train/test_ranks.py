"""Training in several processes: the same as in one, to the end or until one of them dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from packhorse.train import checkpoints

HOST = Path(__file__).with_name("rank_host.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STEPS = 8
# Three rows a step that run one by one: one rank has two parts, the other one.
UNEVEN = {"batch": 6, "micro_tokens": 48, "steps": 10, "dropout": 0.0, "log_every": 4}
KILLED, LOST, INPUT = -signal.SIGKILL, 4, 2

Ask = Callable[..., dict[str, Any]]
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def host() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(HOST)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        yield process
        process.kill()


@pytest.fixture
def ask(host: subprocess.Popen[str], settings: Make, tmp_path: Path) -> Ask:
    """Train on so many ranks; how they ended and what they said."""
    from dataclasses import asdict

    def asked(world: int, out: str, of: dict[str, Any], **options: Any) -> dict[str, Any]:
        line = {"world": world, "out": str(tmp_path / out), "settings": asdict(settings(**of))}
        assert host.stdin is not None and host.stdout is not None
        host.stdin.write(json.dumps({**line, **options}) + "\n")
        host.stdin.flush()
        return json.loads(host.stdout.readline())

    return asked


@pytest.fixture
def twenty() -> dict[str, Any]:
    """Steps with dropout, accumulation and evaluations, computed in bf16."""
    return {
        "steps": STEPS,
        "eval_every": 3,
        "log_every": 2,
        "save_every": 2,
        "keep": 9,
        "micro_tokens": 150,
        "precision": "bf16",
        "learning_rate": 0.02,
    }


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def contents_of(run: Path, step: int = STEPS) -> dict[str, bytes]:
    """What must be equal of two runs."""
    names = ("model.safetensors", "rng.safetensors", "optimizer.safetensors")
    contents = {name: (run / f"step-{step:08}" / name).read_bytes() for name in names}
    result = (run / "model" / "model.safetensors").read_bytes()
    return {**contents, "result": result, "log": (run / "log.jsonl").read_bytes()}


def furthest(
    first_run: Path, second_run: Path, names: tuple[str, ...] = ("loss", "gradient_norm")
) -> float:
    """The largest relative difference of what two runs logged, step by step."""
    pairs = list(zip(log(first_run), log(second_run), strict=True))
    assert all(
        first["step"] == second["step"] and first["sequences"] == second["sequences"]
        for first, second in pairs
    )
    return max(
        abs(first[name] / second[name] - 1)
        for first, second in pairs
        for name in names
        if "evaluation" not in first
    )


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-10)])
def test_the_number_of_ranks_changes_nothing(
    ask: Ask, tmp_path: Path, dtype: str, bound: float
) -> None:
    for world in (1, 2):
        assert ask(world, str(world), UNEVEN, dtype=dtype, unlike=True)["codes"] == [0] * world
    assert furthest(tmp_path / "1", tmp_path / "2") < bound
    ends = [log(tmp_path / str(world))[-1]["evaluation"] for world in (1, 2)]
    assert ends[0]["sequences"] == ends[1]["sequences"] == 8
    assert abs(ends[0]["loss"] / ends[1]["loss"] - 1) < bound


def test_without_the_gradients_of_others_it_is_another_run(ask: Ask, tmp_path: Path) -> None:
    for world, apart in ((1, False), (2, True)):
        ask(world, str(world), UNEVEN, dtype="float64", apart=apart)
    assert furthest(tmp_path / "1", tmp_path / "2", ("loss",)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_more_ranks(ask: Ask, tmp_path: Path, world: int, optimizer: str) -> None:
    of = {**UNEVEN, "batch": 20, "optimizer": optimizer, "average": "sequence"}
    reports = [ask(count, str(count), of, dtype="float64")["reports"] for count in (1, world)]
    assert furthest(tmp_path / "1", tmp_path / str(world)) < 1e-10
    assert len({tuple(report["weights"]) for report in reports[1]}) == 1, "ranks have grown apart"


def test_texts_of_all_ranks_are_negatives_of_each_other(
    ask: Ask, tiny: Path, tmp_path: Path
) -> None:
    """A step of pairs is the same in one process, in parts, and on two ranks."""
    rows = [f"{word} horse{' cart' * (i % 5)}\t{word} mule" for i, word in enumerate(WORDS)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["anchor\tpositive", *rows]) + "\n")
    table = str(tmp_path / "pairs.tsv")
    of = {"task": "contrastive", "train": table, "eval": table, "model": str(tiny), "batch": 5}
    sizes = {"layers": 0, "hidden_size": 0, "heads": 0, "optimizer": "adamw", "dropout": 0.0}
    of = {**of, **sizes, "steps": 4}
    for world, name, more in ((1, "1", {}), (2, "2", {}), (2, "parts", {"micro_tokens": 16})):
        assert ask(world, name, {**of, **more}, dtype="float64")["codes"] == [0] * world
    for name in ("2", "parts"):
        assert furthest(tmp_path / "1", tmp_path / name) < 1e-9
    ends = [log(tmp_path / name)[-1]["evaluation"] for name in ("1", "2")]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)


@pytest.mark.parametrize("kind", [{}, {"lora_rank": 2}], ids=["weights", "adapter"])
def test_a_killed_step_of_pairs_goes_on_to_the_bit(
    ask: Ask, tiny: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    """Killed between the two passes over its parts, with dropout; the same command goes on."""
    rows = [f"{word} horse{' cart' * (i % 5)}\t{word} mule" for i, word in enumerate(WORDS)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["anchor\tpositive", *rows]) + "\n")
    of = {"task": "contrastive", "train": str(tmp_path / "pairs.tsv"), "model": str(tiny)}
    of |= {"layers": 0, "hidden_size": 0, "heads": 0, "optimizer": "adamw", "batch": 5, **kind}
    of |= {"steps": 5, "micro_tokens": 16, "save_every": 2, "dropout": 0.2}
    assert ask(2, "whole", of)["codes"] == [0, 0]
    strike = {"rank": 1, "at": "forward", "number": 15, "how": "kill"}
    assert KILLED in ask(2, "cut", of, strike=strike)["codes"]
    assert checkpoints.newest(tmp_path / "cut") is not None
    assert not (tmp_path / "cut" / "model").exists()
    assert ask(2, "cut", of)["codes"] == [0, 0]
    name = "model/adapter_model.safetensors" if kind else "model/model.safetensors"
    for file in (name, "log.jsonl"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_task_is_learned_and_measured_together(ask: Ask, tiny: Path, tmp_path: Path) -> None:
    rows = [f"{word} horse{' cart' * (i % 5)}\t{i % 2}" for i, word in enumerate(WORDS)]
    (tmp_path / "table.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    table = str(tmp_path / "table.tsv")
    of = {"task": "classify", "train": table, "eval": table, "model": str(tiny), "batch": 5}
    sizes = {"layers": 0, "hidden_size": 0, "heads": 0, "optimizer": "adamw", "dropout": 0.0}
    for world in (1, 2):
        ask(world, str(world), {**of, **sizes}, dtype="float64")
    assert furthest(tmp_path / "1", tmp_path / "2") < 1e-10
    ends = [log(tmp_path / str(world))[-1]["evaluation"] for world in (1, 2)]
    assert ends[0]["sequences"] == len(rows)
    assert ends[0].keys() == ends[1].keys()
    assert all(abs(ends[0][name] - ends[1][name]) < 1e-9 for name in ends[0])


WORDS = ("good", "bad", "fine", "poor", "nice", "ugly", "good", "ugly", "nice", "bad", "fine")


@pytest.mark.slow
def test_two_ranks_stop_and_go_on_to_the_bit(ask: Ask, twenty: dict, tmp_path: Path) -> None:
    whole = ask(2, "whole", twenty)
    assert whole["codes"] == [0, 0]
    for rank, after in ((1, 3), (0, 2)):  # the second time from there on
        answer = ask(2, "stopped", twenty, stop={"rank": rank, "after": after})
        assert [report["outcome"]["signal"] for report in answer["reports"]] == [signal.SIGTERM] * 2
    shutil.copytree(tmp_path / "stopped", tmp_path / "forgetful")
    assert ask(2, "stopped", twenty)["codes"] == [0, 0]
    assert contents_of(tmp_path / "stopped") == contents_of(tmp_path / "whole")
    # The result is the optimizer's fp32, of both ranks' tensors; and all draw numbers of their own.
    result = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    weights = [tensor for name, tensor in result.items() if name.endswith("dense.weight")]
    assert all(not torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    ask(2, "forgetful", twenty, forget=True)
    different, same = contents_of(tmp_path / "forgetful"), contents_of(tmp_path / "whole")
    assert all(different[name] != same[name] for name in ("model.safetensors", "result", "log"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stopped_at_every_step(ask: Ask, twenty: dict, tmp_path: Path, precision: str) -> None:
    of = {**twenty, "steps": 20, "precision": precision}
    ask(2, "whole", of)
    for step in range(1, 20):
        answer = ask(2, "stopped", of, stop={"rank": step % 2, "after": 1})
        assert answer["reports"][0]["outcome"]["step"] == step
    ask(2, "stopped", of)
    assert contents_of(tmp_path / "stopped", 20) == contents_of(tmp_path / "whole", 20)


@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((1, 3, 2), marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on(ask: Ask, tmp_path: Path, worlds: tuple) -> None:
    ask(1, "whole", UNEVEN)
    for world in worlds[:-1]:
        ask(world, "changed", UNEVEN, stop={"rank": 0, "after": 3})
    report = ask(worlds[-1], "changed", UNEVEN)["reports"][0]
    assert f"ranks: {worlds[-2]} when it was written, {worlds[-1]} now" in report["notes"][0]
    assert furthest(tmp_path / "whole", tmp_path / "changed") < 1e-5


def strikes() -> Iterator[Any]:
    """A rank is killed in the forward pass, while adding up, loading, saving and evaluating."""
    for at, number in (("forward", 9), ("add", 21), ("load", 9), ("gather", 2), ("write", 5)):
        for rank in (0, 1) if at != "write" else (0,):
            quick = (rank, at) in ((1, "add"), (0, "write"))
            yield pytest.param(rank, at, number, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("rank", "at", "number"), list(strikes()))
def test_a_killed_rank_ends_all_and_the_run_goes_on(
    ask: Ask, twenty: dict, tmp_path: Path, rank: int, at: str, number: int
) -> None:
    of = {**twenty, "steps": 6}
    answer = ask(2, "struck", of, strike={"rank": rank, "at": at, "number": number, "how": "kill"})
    assert [answer["codes"][rank], answer["codes"][1 - rank]] == [KILLED, LOST]
    kind, reason = answer["reports"][1 - rank]["error"]
    assert kind == "RankLost" and "another rank has ended" in reason
    assert [path.name for path in (tmp_path / "struck").glob("step-*")], "struck too early"
    assert ask(2, "struck", of)["codes"] == [0, 0]
    ask(2, "whole", of)
    assert contents_of(tmp_path / "struck", 6) == contents_of(tmp_path / "whole", 6)


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up(ask: Ask, twenty: dict) -> None:
    strike = {"rank": 1, "at": "add", "number": 21, "how": "hang"}
    answer = ask(2, "hanging", twenty, strike=strike, timeout=3.0)
    assert answer["codes"] == [LOST, None]
    assert "Timed out" in answer["reports"][0]["error"][1]


def test_a_full_disk_is_told_to_all_and_nothing_is_lost(ask: Ask, twenty: dict, tmp_path) -> None:
    answer = ask(2, "full", twenty, strike={"rank": 0, "at": "write", "number": 4, "how": "fail"})
    assert answer["codes"] == [INPUT, INPUT]
    (kind, reason), (second_kind, same) = (report["error"] for report in answer["reports"])
    assert kind == second_kind == "CheckpointError" and "No space left" in reason
    assert same == f"rank 0: {reason}"
    newest = checkpoints.newest(tmp_path / "full")
    assert newest is not None and newest.step == 2 and newest.world == 2


def test_a_folder_that_is_in_use_is_refused_by_all(ask: Ask, twenty: dict, tmp_path: Path) -> None:
    with checkpoints.claim(tmp_path / "used"):
        answer = ask(2, "used", twenty)
    assert answer["codes"] == [INPUT, INPUT]
    assert all("another process" in report["error"][1] for report in answer["reports"])


def command(settings: Any, out: Path, *more: str) -> list[str]:
    file = out.with_suffix(".toml")
    file.write_text(settings.toml())
    packhorse = [sys.executable, "-m", "packhorse", "train", "--config", str(file)]
    return [*packhorse, "--out", str(out), *more]


def test_one_command_starts_the_ranks(settings: Make, tmp_path: Path) -> None:
    of = settings(**{**UNEVEN, "steps": 99, "learning_rate": 0.5})
    out = tmp_path / "run"
    # The file's word is not the last: the environment's goes before it, and the flag's before both.
    variables = {
        **ENVIRONMENT,
        "PACKHORSE_TRAIN_STEPS": "50",
        "PACKHORSE_TRAIN_LEARNING_RATE": "0.01",
    }
    completed = subprocess.run(
        command(of, out, "--nproc", "2", "--steps", "3", "--json"),
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    document = json.loads(completed.stdout)
    assert (document["step"], document["settings"]["learning_rate"]) == (3, 0.01)
    assert completed.stderr.count(str(out / "model")) == 1  # the table's
    assert completed.stderr.count("2 ranks") == 1
    newest = checkpoints.newest(out)
    assert newest is not None and newest.world == 2


@pytest.mark.slow
def test_ranks_of_one_command_stop_together(settings: Make, tmp_path: Path) -> None:
    of, out = settings(**{**UNEVEN, "steps": 100_000, "log_every": 1}), tmp_path / "run"
    with subprocess.Popen(
        command(of, out, "--nproc", "2"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("step"):
                process.send_signal(signal.SIGINT)
                break
        lines += process.stderr.readlines()
    assert process.returncode == 130, "".join(lines)
    assert any("stopped after step" in line for line in lines)
    assert checkpoints.newest(out) is not None
