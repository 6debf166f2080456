"""All ways learn the same from the same, the figures add up, what fails is a row."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from packhorse import checkpoint
from packhorse.errors import InputError
from packhorse.reports import tables as report
from packhorse.train import cost
from packhorse.train.settings import TrainSettings
from packhorse_bench import plots as bench_plots
from packhorse_bench import training, training_lanes, training_sets
from packhorse_bench.training import TrainingTrial, TrainRow
from packhorse_bench.training_lanes import TrainingLane
from packhorse_bench.training_sets import IGNORED, TrainingExample
from packhorse_bench.training_stage import TrainingSetup, TrainingStage, open_stage

SMALL: dict[str, Any] = {
    "config": "tiny",
    "device": "cpu",
    "batch": 8,
    "steps": 2,
    "max_length": 48,
}
TASKS = ("pretrain", "classify")


def small(**changes: Any) -> TrainingSetup:
    values: dict[str, Any] = {**SMALL, "repeats": 2, **changes}
    return TrainingSetup(**values)


def staged(folder: Path, **changes: Any) -> TrainingStage:
    """With weights so large that a loss tells them from others."""
    stage = open_stage(small(dropout=0.0, **changes), torch.device("cpu"), folder)
    with torch.no_grad():
        for parameter in stage.job.model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    checkpoint.write(stage.folder, stage.job.checkpoint, overwrite=True)
    return stage


def test_lengths_are_those_of_the_task(tmp_path: Path) -> None:
    phrases = training_sets.draw_lengths("classify", 20_000, 128, seed=1)
    assert 12.5 < phrases.mean() < 14 and np.median(phrases) in (10, 11, 12)
    assert phrases.min() == 3 and 40 < np.percentile(phrases, 99) < 48 and phrases.max() <= 66
    pages = training_sets.draw_lengths("pretrain", 20_000, 512, seed=1)
    assert 240 < pages.mean() < 265 and 0.2 < (pages == 512).mean() < 0.26
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([0] * 29 + [7]))
    assert set(training_sets.draw_lengths("pretrain", 50, 20, 1, str(path)).tolist()) == {20}


def test_the_real_phrases_are_as_long(shared_data: Path) -> None:
    from packhorse.tokens import Tokenizer

    lines = (shared_data / "glue/SST-2-train.tsv").read_text("utf-8").splitlines()[1:4001]
    tokenizer = Tokenizer.load(shared_data / "vocab/bert-base-uncased-vocab.txt")
    real = np.array([len(e) for e in tokenizer.encode([line.split("\t")[0] for line in lines])])
    drawn = training_sets.draw_lengths("classify", 20_000, 128, seed=0)
    assert abs(real.mean() - drawn.mean()) < 1 and abs(real.std() - drawn.std()) < 1


def test_pretraining_steps_hold_every_row_once() -> None:
    lengths = training_sets.draw_lengths("pretrain", 300, 128, seed=3)
    fed = training_sets.pretraining(lengths, 2048, 128, steps=4, micro_tokens=1024, seed=3)
    steps = list(fed.steps(None))
    assert len(steps) == 4 and {len(step.batches) for step in steps} == {fed.parts}
    assert fed.shape.tokens <= 1024 < 2 * fed.shape.tokens
    assert all(batch.tokens <= fed.shape.tokens for step in steps for batch in step.batches)
    all_examples = [
        e for step in steps for batch in step.batches for e in training_sets.examples(batch)
    ]
    assert fed.batch * 4 == len(all_examples) and 0 <= len(lengths) - len(all_examples) < 20
    spare = np.bincount(lengths, minlength=129) - np.bincount(
        [len(e.ids) for e in all_examples], minlength=129
    )
    assert spare.min() >= 0
    guessed = np.mean([(e.words != IGNORED).mean() for e in all_examples])
    assert 0.13 < guessed < 0.18 and {e.label for e in all_examples} == {0, 1}
    for example in all_examples:
        assert example.ids[0] == 101 and example.ids[-1] == 102 and example.words is not None
        assert example.ids[np.flatnonzero(example.types == 0)[-1]] == 102
        assert not np.isin(example.words, (101, 102)).any() and (example.words != IGNORED).any()
    hidden = sum(int((e.ids == 103).sum()) for e in all_examples)
    assert 0.7 < hidden / sum(int((e.words != IGNORED).sum()) for e in all_examples) < 0.9


def test_too_little_for_a_step_is_reported() -> None:
    with pytest.raises(InputError, match="too few for 4 steps"):
        training_sets.pretraining(np.full(4, 8), 2048, 64, steps=4, micro_tokens=64, seed=0)


def test_classification_gives_each_sequence_a_label() -> None:
    settings = TrainSettings(task="classify", batch=6, steps=2, seed=5)
    lengths = training_sets.draw_lengths("classify", 12, 128, seed=5)
    fed = training_sets.classification(lengths, 2048, settings, 4096)
    step = next(fed.steps(None))
    all_examples = [e for batch in step.batches for e in training_sets.examples(batch)]
    assert len(all_examples) == 6 and all(
        e.words is None and not e.types.any() for e in all_examples
    )
    assert {len(e.ids) for e in all_examples} <= set(lengths.tolist())


def example(length: int, words: bool = True) -> TrainingExample:
    ids = np.arange(1, length + 1)
    guess = np.where(ids == 2, 77, IGNORED) if words else None
    return TrainingExample(ids, (ids > 2).astype(int), length % 2, guess)


def test_padding_is_masked_and_not_guessed() -> None:
    part = training_lanes.pad([example(3), example(9)])
    assert part["input_ids"].shape == (2, 16)  # the longest, to a multiple of eight
    assert part["attention_mask"].sum(1).tolist() == [3, 9]
    assert part["token_type_ids"][0].tolist() == [0, 0, 1] + [0] * 13
    assert part["labels"][0].tolist() == [IGNORED, 77] + [IGNORED] * 14
    assert part["next_sentence_label"].tolist() == [1, 1]
    part = training_lanes.pad([example(4, words=False)], 32)
    assert part["input_ids"].shape == (1, 32) and part["labels"].tolist() == [0]
    assert "next_sentence_label" not in part


def test_what_a_round_holds_is_counted() -> None:
    counted = training_sets.work([example(3), example(9)], places=32)
    assert counted == cost.StepWork(tokens=12, squares=90, masked=2, computed=32)
    assert counted.fill == 12 / 32


def test_batches_of_one_size_and_sorted(tmp_path: Path) -> None:
    stage = staged(tmp_path, batch=30, micro_tokens=200)
    plain, grouped = training_lanes.cut(stage), training_lanes.cut(stage, grouped=True)
    for steps in (plain, grouped):
        assert len(steps) == 2 and len({len(chunk) for step in steps for chunk in step}) == 1
        assert max(len(chunk) * 48 for step in steps for chunk in step) <= 200
    lengths = [len(e.ids) for step in grouped for chunk in step for e in chunk]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(lengths) == sorted(len(e.ids) for s in plain for chunk in s for e in chunk)
    have = sum(step.sequences for step in stage.steps)
    assert 0 <= have - len(lengths) < sum(map(len, plain))


def per_sequence(
    module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any
) -> tuple[Any, None]:
    """What flash attention does with the boundaries that it is given."""
    bounds = options["cu_seq_lens_q"].tolist()
    pieces = [
        scaled_dot_product_attention(*(x[:, :, begin:end] for x in (q, k, v)))
        for begin, end in pairwise(bounds)
    ]
    return torch.cat(pieces, 2).transpose(1, 2), None


@pytest.mark.parametrize("task", TASKS)
def test_every_way_learns_the_same(task: str, tmp_path: Path) -> None:
    """Step by step the loss is the same; with other weights it is not (control)."""
    library = pytest.importorskip("transformers")
    library.AttentionInterface.register("per_sequence", per_sequence)
    stage = staged(tmp_path / "a", task=task, steps=1, batch=6)
    lanes = [
        training_lanes.ours(stage),
        training_lanes.padded(stage),
        training_lanes.padded(stage, grouped=True),
        training_lanes.padding_free(stage, "per_sequence"),
    ]
    first, *others = lanes
    curve = [float(first.step(first.steps[0])) for _ in range(4)]
    assert curve[0] == pytest.approx(first.loss, abs=1e-5) and curve[3] < curve[0] - 2e-3
    for lane in others:
        assert lane.loss == pytest.approx(first.loss, abs=1e-5)
        assert lane.sequences == first.sequences and lane.work.tokens == first.work.tokens
        losses = [float(lane.step(lane.steps[0])) for _ in range(4)]
        assert losses == pytest.approx(curve, abs=1e-4), lane.name
    second_stage = staged(tmp_path / "b", task=task, steps=1, batch=6, seed=1)
    strange = training_lanes.padded(replace(stage, folder=second_stage.folder))
    assert abs(strange.loss - first.loss) > 1e-3


def test_float8_is_measured_as_it_trains(float8_anywhere: None, tmp_path: Path) -> None:
    half, eighth = (staged(tmp_path / name, dtype=name) for name in ("bf16", "float8"))
    lanes = [training_lanes.ours(stage) for stage in (half, eighth)]
    losses = [float(lane.step(lane.steps[0])) for lane in lanes]
    assert 0 < abs(losses[0] - losses[1]) < 0.1
    facts = training.describe(small(), training._comparison((), eighth))
    assert facts["dtype"].startswith("float8 products, else bf16")


def test_parts_of_a_step_add_up(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    whole = staged(tmp_path / "a", task="classify", steps=1)
    divided = replace(whole, micro_tokens=4 * 48)
    lane = training_lanes.padded(divided)
    assert len(lane.steps[0]) == 2
    assert float(lane.step(lane.steps[0])) == pytest.approx(lane.loss, abs=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_all_in_one_run(task: str) -> None:
    pytest.importorskip("transformers")
    progress = []
    names = ("padded", "grouped", "padding-free")
    comparison = training.measure(small(task=task, peers=names), lambda *at: progress.append(at))
    packhorse_row, padded, grouped, free = comparison.rows
    assert [row.way for row in comparison.rows] == [
        "packhorse, packed",
        "transformers, padded to 48",
        "transformers, grouped by length",
        "transformers, padding-free",
    ]
    assert free.problem == "flash attention runs on CUDA, in bf16 or fp16"
    assert progress[:3] == [(1, 12), (2, 12), (3, 12)] and progress[3:] == [
        (i, 10) for i in range(4, 11)
    ]
    assert packhorse_row.fill == 1 and padded.fill < grouped.fill < 1
    assert padded.best_over_padded == padded.over_padded == 1
    for row in (packhorse_row, padded, grouped):
        assert row.loss == pytest.approx(packhorse_row.loss, abs=1e-5)
        assert row.sequences_per_second <= row.best_sequences_per_second
        assert row.tokens_per_second > row.sequences_per_second > 0
        assert row.update_ms > 0 and row.step_ms > 0 and row.warm_up_seconds > 0
        assert row.mfu is None and row.memory is None
    facts = training.describe(small(task=task), comparison)
    assert "2 steps per round" in facts["batches"] and "random weights, tiny" in facts["model"]
    assert ("LAMB" in facts["learning"]) == (task == "pretrain")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's, about torch.jit
def test_compiled_peers_compute_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    stage = staged(tmp_path, task="classify", steps=1)
    plain = training_lanes.padded(stage)
    for name in ("padded-compiled", "grouped-compiled"):
        lane = training_lanes.PEERS[name](stage)
        assert lane.name.endswith(", compiled")
        assert float(lane.step(lane.steps[0])) == pytest.approx(plain.loss, abs=1e-4)


def test_without_peers_there_is_nothing_to_compare_with() -> None:
    (row,) = training.measure(small(repeats=1, peers=())).rows
    assert row.best_over_padded is None and row.over_padded is None and row.problem is None


def test_what_a_peer_raises_is_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(stage: TrainingStage) -> TrainingLane:
        raise RuntimeError("the boiler burst\nat line 3")

    def missing(stage: TrainingStage) -> TrainingLane:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    monkeypatch.setitem(training_lanes.PEERS, "padded-compiled", explode)
    monkeypatch.setitem(training_lanes.PEERS, "grouped", missing)
    rows = training.measure(small(repeats=1, peers=("padded-compiled", "grouped"))).rows
    assert report.problems(rows) == [
        "transformers, padded to 48, compiled: RuntimeError: the boiler burst",
        "transformers, grouped by length: x is not installed; pip install 'packhorse[peers]'",
    ]


def test_figures_are_those_of_the_rounds(tmp_path: Path) -> None:
    stage = staged(tmp_path)

    def trial(name: str, seconds: list[float], sequences: int, peaks: list[int]) -> TrainingTrial:
        work = cost.StepWork(tokens=400, squares=9000, masked=60, computed=800)
        optimizer, step = stage.job.optimizer, torch.zeros
        lane = TrainingLane(name, "sdpa", step, [0, 0], optimizer, sequences, work, loss=7)
        return TrainingTrial(lane, 100, 1.5, seconds, [0.003, 0.001, 0.002], peaks)

    trials = [
        trial("packhorse, packed", [2.0, 1.0, 4.0], 40, [500, 700]),
        trial("transformers, padded to 48", [3.0, 2.0, 1.0], 10, []),
        trial("transformers, padded to 48, compiled", [8.0, 4.0, 5.0], 40, []),
    ]
    packhorse_row, plain, compiled = training._rows(trials, stage.job)
    assert (packhorse_row.best_sequences_per_second, packhorse_row.sequences_per_second) == (40, 20)
    assert (packhorse_row.best_tokens_per_second, packhorse_row.tokens_per_second) == (400, 200)
    assert (packhorse_row.best_over_padded, packhorse_row.over_padded) == (
        4,
        2.5,
    )  # the compiled one counts
    assert (plain.over_padded, compiled.over_padded) == (0.625, 1)
    assert packhorse_row.fill == 0.5 and packhorse_row.memory == 700 and plain.memory is None
    assert (packhorse_row.step_ms, packhorse_row.update_ms, packhorse_row.loss) == (1000, 2, 7)
    config = stage.job.checkpoint.config
    assert packhorse_row.operations_per_second == cost.operations(config, trials[0].lane.work) / 2


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"task": "answer"}, "unknown task 'answer'"),
        ({"repeats": 0}, "--repeats 0"),
        ({"batch": 0}, "--batch 0"),
        ({"steps": -1}, "--steps -1"),
        ({"max_length": 7}, "--max-length (7)"),
        ({"micro_tokens": -1}, "--micro-tokens"),
        ({"peers": ("keras",)}, "unknown peer 'keras'"),
        ({"dtype": "fp16"}, "choose one of fp32, bf16, float8"),
        ({"dtype": "float8"}, "'float8', which cpu"),
        ({"config": "huge"}, "unknown configuration 'huge'"),
        ({"max_length": 600}, "pass --max-length 512"),
    ],
)
def test_a_wrong_question_is_an_error(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as caught:
        training.measure(small(**changes))
    assert part in str(caught.value)


ROWS = (
    TrainRow(
        *("packhorse, packed, compiled", "varlen", 878.0, 870.0, 213_000.0, 211_000.0, 2.31, 2.29),
        *(0.995, 412e12, 0.417, 3 << 30, 291.5, 4.25, 11.0361, 30.0),
    ),
    TrainRow("transformers, padded to 512, compiled", "sdpa", 380.0, 379.0, 93_000.0, 92_000.0),
    TrainRow("transformers, padding-free", problem="flash_attn is not installed"),
)


def test_the_table_says_what_there_is() -> None:
    table = training.table(ROWS)
    cells = [[cell.strip() for cell in row] for row in table.rows]
    assert len(cells) == 2 and all(len(row) == len(table.columns) for row in cells)
    assert cells[0] == [
        *("packhorse, packed, compiled", "varlen", "878.0", "870.0", "213,000", "2.31", "2.29"),
        *("99.5%", "412", "41.7%", "3.0", "291.5", "4.2", "11.0361"),
    ]
    assert cells[1][5:7] == ["-", "-"] and cells[1][9:11] == ["-", "-"]


def test_plot_and_csv_have_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    bench_plots.draw_training(tmp_path / "a.svg", ROWS, "a model")
    text = (tmp_path / "a.svg").read_text("utf-8")
    assert "878  (2.31x, 213,000 real tokens/s, MFU 42%)" in text
    assert "380  (93,000 real tokens/s)" in text and "padding-free" not in text
    report.write_csv(tmp_path / "a.csv", ROWS)
    with (tmp_path / "a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [set(line) for line in lines] == [set(asdict(ROWS[0]))] * 3
    assert lines[0]["memory"] == str(3 << 30) and lines[2]["problem"].startswith("flash_attn")
