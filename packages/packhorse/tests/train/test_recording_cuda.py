"""Steps replayed as CUDA graphs: the same weights, to the bit, as steps that are not.

Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse.train import recording
from packhorse.train.job import TrainingJob, assemble
from packhorse.train.loop import train
from packhorse.train.ranks import RankGroup
from packhorse.train.settings import TrainSettings
from packhorse.train.step import set_rates, train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
STEPS = 24


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder whose heads are wide enough for the fastest kernel, and labeled texts."""
    from packhorse import attention, checkpoint
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.model.heads import Pooler
    from packhorse.model.model import Model

    home = tmp_path_factory.mktemp("wide")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(59))]
    (home / "vocab").mkdir()
    (home / "vocab" / "vocab.txt").write_text("\n".join(words) + "\n")
    config = BertConfig(64, 64, 2, 2, 128, max_positions=48)
    torch.manual_seed(0)
    model = Model(Bert(config, attention.kernel("reference")), {"pooled": Pooler(config)})
    wide_checkpoint = checkpoint.Checkpoint(config, model.eval(), home / "vocab", "wide", 48)
    checkpoint.write(home / "model", wide_checkpoint)
    chance = random.Random(0)
    rows = [
        " ".join(f"w{chance.randrange(59)}" for _ in range(chance.randint(1, 30)))
        for _ in range(200)
    ]
    lines = [f"{row}\t{len(row.split()) % 2}" for row in rows]
    (home / "train.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    return home


def job(wide: Path, **options: Any) -> TrainingJob:
    defaults = {"task": "classify", "model": str(wide / "model"), "train": str(wide / "train.tsv")}
    defaults |= {
        "batch": 16,
        "steps": STEPS,
        "device": "cuda",
        "precision": "bf16",
        "save_every": 0,
    }
    return assemble(
        TrainSettings(**{**defaults, "learning_rate": 1e-3, "compile": "on", **options})
    )


def learned(job: TrainingJob) -> list[list[float]]:
    torch.manual_seed(1)
    steps, rows = job.feed.steps(None), []
    for number in range(STEPS):
        set_rates(job, number)
        rows.append(train_step(job, next(steps), RankGroup()).row)
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_recorded_step_is_the_step(wide: Path, optimizer: str, monkeypatch) -> None:
    graphs = job(wide, optimizer=optimizer)
    rows = learned(graphs)
    assert not graphs.recorder.refused and graphs.recorder.recorded
    monkeypatch.setattr(recording, "WARMUP_STEPS", STEPS)
    plain = job(wide, optimizer=optimizer)
    assert learned(plain) == rows and not plain.recorder.recorded
    for graph_weight, plain_weight in zip(
        graphs.model.parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(graph_weight, plain_weight)
    ages = {int(state["step"]) for state in graphs.optimizer.state.values()}
    assert ages == {STEPS}


def test_a_graph_of_full_rows_serves_no_others(wide: Path, monkeypatch) -> None:
    """Rows that texts fill, then rows with gaps: the same shapes, but results elsewhere."""
    chance = random.Random(3)
    for name, shortest in (("full", 46), ("gaps", 1)):
        lines = []
        for number in range(64):  # one in four has a gap: few enough for the same bucket
            words = chance.randint(shortest, 46) if number % 4 == 0 else 46
            text = " ".join(f"w{chance.randrange(59)}" for _ in range(words))
            lines.append(f"{text}\t{number % 2}")
        (wide / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    options = {"layout": "padded", "max_length": 48}

    def rows() -> tuple[TrainingJob, list[list[float]]]:
        full, gaps = (
            job(wide, train=str(wide / f"{name}.tsv"), **options) for name in ("full", "gaps")
        )
        torch.manual_seed(1)
        first, second = full.feed.steps(None), gaps.feed.steps(None)
        steps = [next(feed) for feed in [first] * 5 + [second] * 5 + [first] * 2]
        reports = []
        for number, step in enumerate(steps):
            set_rates(full, number)
            reports.append(train_step(full, step, RankGroup()).row)
        return full, [row.tolist() for row in reports]

    graphs, by_graph = rows()
    assert graphs.recorder.recorded and not graphs.recorder.refused
    shapes = {key[0] for key in graphs.recorder.seen}
    assert len(shapes) == 1 < len(graphs.recorder.seen), "or the key was never asked"
    monkeypatch.setattr(recording, "WARMUP_STEPS", STEPS)
    plain, one_by_one = rows()
    assert not plain.recorder.recorded
    assert by_graph == one_by_one


def test_the_rate_that_is_set_is_followed(wide: Path) -> None:
    """The control: with another schedule the weights are others, and with none they stay."""
    jobs = [job(wide, schedule=schedule) for schedule in ("linear", "constant")]
    assert learned(jobs[0]) != learned(jobs[1])
    still = job(wide, learning_rate=0.0, weight_decay=0.0)
    before = [p.detach().clone() for p in still.model.parameters()]
    learned(still)
    assert still.recorder.recorded
    assert all(torch.equal(a, b) for a, b in zip(before, still.model.parameters(), strict=True))


def test_a_run_goes_on_to_the_bit(wide: Path, tmp_path: Path) -> None:
    train(job(wide), tmp_path / "whole")
    signals = iter([0] * 13 + [15])
    train(job(wide), tmp_path / "stopped", stop_signal=lambda: next(signals))
    train(job(wide), tmp_path / "stopped")
    whole, stopped = (_steps(tmp_path / run) for run in ("whole", "stopped"))
    assert whole == stopped


def _steps(run: Path) -> list[str]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [line for line in lines if "gradient_norm" in line]
