"""Seeded runs and their logs: plain training underneath, whatever interrupts them."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mlperf_logging", reason="no mlperf-logging: pip install 'packhorse[train]'")

from packhorse import executable
from packhorse.errors import InputError
from packhorse.train import estimate, mlperf, submission
from packhorse.train.job import assemble
from packhorse.train.journal import RunStatus
from packhorse.train.loop import train
from packhorse.train.mlperf import SubmissionEntry
from packhorse.train.submission import (
    RunResult,
    SubmissionInterrupted,
    SubmissionPlan,
    carry_out,
    score,
    with_mlperf_defaults,
)

Make = Callable[..., Any]
WHO = SubmissionEntry("Packhorse", "open", "two cores")
NEVER = 0.999


@pytest.fixture
def plan(settings: Make, corpus: Path, tmp_path: Path) -> Callable[..., SubmissionPlan]:
    """Runs of 12 steps, with dropout, and an evaluation every third step on enough to tell."""

    def make(
        runs: int = 2, out: str = "results", start_seed: int = 42, **options: Any
    ) -> SubmissionPlan:
        usual = {"steps": 0, "max_sequences": 192, "eval_every_sequences": 48, "target": NEVER}
        usual |= {"division": "open", "log_every": 4, "save_every": 5, "warmup": 2}
        usual |= {"eval": str(corpus / "train"), "learning_rate": 0.05, "mask_probability": 0.4}
        completed_settings = with_mlperf_defaults(settings(**{**usual, **options}))
        return SubmissionPlan(tmp_path / out, completed_settings, WHO, runs, start_seed)

    return make


def stopping_after(steps: int) -> Callable[[], int]:
    calls = count()
    return lambda: signal.SIGTERM if next(calls) >= steps else 0


def test_each_run_is_a_plain_run_with_the_next_seed(plan: Make, tmp_path: Path) -> None:
    submission_plan = plan()
    first, second = carry_out(submission_plan)
    assert (first.seed, second.seed) == (42, 43) and first.accuracies != second.accuracies
    assert first.problems == second.problems == ()
    assert first.paused == 0 and first.compiled == 0
    assert [n // 48 for n, _ in first.accuracies] == [1, 2, 3, 4]
    plain = train(assemble(replace(submission_plan.settings, seed=43)), tmp_path / "plain")
    assert plain.sequences == second.sequences == second.accuracies[-1][0]
    for name in ("log.jsonl", "model/model.safetensors"):
        actual, expected = submission_plan.folder(1) / name, tmp_path / "plain" / name
        assert actual.read_bytes() == expected.read_bytes()
    assert not list(submission_plan.folder(1).glob("step-*"))  # a finished run needs none


def test_the_target_ends_a_run_and_the_log_says_so(plan: Make) -> None:
    submission_plan = plan(1)
    (never,) = carry_out(submission_plan)
    assert not never.reached and len(never.accuracies) == 4 and never.problems == ()
    second = sorted(accuracy for _, accuracy in never.accuracies[:2])[-1]
    begun = time.monotonic()
    (reached,) = carry_out(plan(1, "again", target=second))
    whole = time.monotonic() - begun
    assert reached.reached and reached.problems == ()
    assert reached.accuracies == never.accuracies[: len(reached.accuracies)]
    assert len(reached.accuracies) <= 2 and reached.accuracies[-1][1] == second
    assert 0 < reached.seconds <= whole


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 1])
def test_stopped_again_and_again_it_ends_with_the_same_logs(plan: Make, steps: int) -> None:
    whole = list(carry_out(plan()))
    submission_plan, stops, first = plan(out="stopped"), 0, None
    while True:
        try:
            results = list(carry_out(submission_plan, stop_signal=stopping_after(steps)))
            break
        except SubmissionInterrupted as stopped:
            stops += 1
            assert stopped.signal == signal.SIGTERM
        log = submission_plan.log(0).read_bytes()
        assert first is None or log == first  # once finished, it is never touched again
        first = log if b"run_stop" in log else None
    assert stops >= 2 * (12 // steps)
    for actual, expected in zip(results, whole, strict=True):
        assert actual.problems == () and actual.paused > 0
        assert (actual.accuracies, actual.sequences) == (expected.accuracies, expected.sequences)
        assert actual.seconds >= actual.paused - 0.1


@pytest.mark.slow
def test_a_crash_behind_an_evaluation_takes_it_back(plan: Make) -> None:
    """The log is written before the checkpoint: a crash between them leaves it ahead."""
    (whole,) = carry_out(plan(1))
    submission_plan = plan(1, "crashed", save_every=5)
    evaluations = count(1)

    def crash(run: int, shown: RunStatus) -> None:
        if shown.evaluation and next(evaluations) in (1, 3, 5):
            raise RuntimeError("power cut")

    cuts = []
    while True:
        try:
            (result,) = carry_out(submission_plan, watch=crash)
            break
        except RuntimeError:
            events = mlperf.read(submission_plan.log(0))
            cuts.append([e.metadata["epoch_num"] for e in events if e.key == "eval_accuracy"])
    assert len(cuts) == 3 and result.problems == ()
    assert result.accuracies == whole.accuracies
    known = {n for n, _ in whole.accuracies}
    assert all(set(cut) <= known for cut in cuts)


@pytest.mark.slow
def test_a_log_that_is_gone_means_that_run_again(plan: Make) -> None:
    submission_plan = plan(1)
    (before,) = carry_out(submission_plan)
    marker = submission_plan.folder(0) / "marker"
    marker.touch()
    submission_plan.log(0).unlink()
    (after,) = carry_out(submission_plan)
    assert after.accuracies == before.accuracies and not marker.exists()


@pytest.mark.slow
def test_more_runs_are_added_and_the_finished_ones_stay(plan: Make) -> None:
    submission_plan = plan(1)
    list(carry_out(submission_plan))
    log = submission_plan.log(0).read_bytes()
    notes: list[str] = []
    assert len(list(carry_out(plan(2), report=notes.append))) == 2
    assert submission_plan.log(0).read_bytes() == log
    assert [note for note in notes if note.startswith("run ")] == ["run 1 of 2: seed 43"]


def everything(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file and when it was written, but for locks."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_folder_holds_one_submission(plan: Make) -> None:
    list(carry_out(plan(1)))
    before = everything(plan(1).out)
    list(carry_out(plan(1, log_every=7)))  # decides no figure, and what is finished stays
    for name, changes in (
        ("learning_rate 0.05, now 0.02", {"learning_rate": 0.02}),
        ("start_seed 42, now 7", {"start_seed": 7}),
    ):
        with pytest.raises(InputError, match=f"holds a submission with {name}. Continue with"):
            list(carry_out(plan(1, **changes)))
    assert everything(plan(1).out) == before
    changes = replace(plan(1), entry=replace(WHO, status="cloud"))
    with pytest.raises(InputError, match="holds a submission with status 'onprem'"):
        list(carry_out(changes))
    (plan(1).out / "submission.json").write_text("{")
    with pytest.raises(InputError, match="move it away"):
        list(carry_out(plan(1)))


def test_two_at_once_are_refused(plan: Make) -> None:
    runs = carry_out(plan(2))
    next(runs)
    with pytest.raises(InputError, match="another process"):
        list(carry_out(plan(2)))
    runs.close()


@pytest.mark.slow
def test_a_run_that_diverges_missed_the_target_and_the_next_goes_on(
    plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(job: Any, *arguments: Any, **options: Any) -> Any:
        if job.settings.seed == 42:
            word = next(iter(job.model.parameters()))
            word.data.fill_(math.nan)
        return train(job, *arguments, **options)

    monkeypatch.setattr(submission, "train", lost)
    notes: list[str] = []
    lost_run, next_run = carry_out(plan(), report=notes.append)
    assert not lost_run.reached and lost_run.problems and lost_run.accuracies == ()
    assert any("missed the target" in note and "loss is nan" in note for note in notes)
    assert next_run.problems == () and len(next_run.accuracies) == 4


def test_what_the_recipe_leaves_open_is_mlperfs(settings: Make) -> None:
    completed_settings = with_mlperf_defaults(settings(division="open", batch=3072, eval_every=0))
    assert (completed_settings.target, completed_settings.eval_every_sequences) == (0.720, 175_000)
    assert completed_settings.measure == "mlm_accuracy"
    completed_settings = with_mlperf_defaults(settings(division="open", target=0.3, eval_every=5))
    assert (
        completed_settings.target,
        completed_settings.eval_every_sequences,
        completed_settings.eval_every,
    ) == (0.3, 0, 5)


def test_the_closed_division_fixes_what_it_fixes(settings: Make, corpus: Path) -> None:
    with pytest.raises(InputError) as refused:
        with_mlperf_defaults(settings(division="closed", target=0.7, optimizer="adamw", batch=3072))
    for requirement in (
        "lamb (here adamw)",
        "target 0.72 (here 0.7)",
        "10000 (here 8)",
        "512 (here 48)",
    ):
        assert requirement in str(refused.value)
    assert "eval_every_sequences" not in str(refused.value)  # filled in as it must be
    for wrong in ({"task": "classify"}, {"division": "half"}, {"measure": "mlm_loss"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            with_mlperf_defaults(settings(**wrong))


def test_a_closed_run_that_falls_short_is_logged_and_refused(
    plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlperf, "CLOSED_SAMPLES", 80)
    monkeypatch.setattr(mlperf, "CLOSED_LENGTH", 48)
    submission_plan = plan(1, division="closed", target=0.0, eval_every_sequences=0)
    assert (submission_plan.settings.target, submission_plan.settings.eval_every_sequences) == (
        0.72,
        150_000,
    )
    submission_plan = replace(submission_plan, entry=replace(WHO, division="closed"))
    (result,) = carry_out(submission_plan)
    assert not result.reached and len(result.accuracies) == 1
    (refusal,) = result.problems
    assert refusal.startswith("MLPerf's checker") and "0.720" in refusal


def timed(*minutes: float) -> list[RunResult]:
    """Results of so many minutes; below 0: the target was missed."""
    return [
        RunResult(i, i, minute > 0, 60 * abs(minute), 0.0, 1, (), 0, ())
        for i, minute in enumerate(minutes)
    ]


def test_the_score_is_the_mean_without_best_and_worst() -> None:
    assert score(timed(3, 1, 2)) == 120
    assert score(timed(10, 4, 5, 9, 1)) == pytest.approx(360)
    assert score(timed(3, 0.1, -2)) == 180  # the missed one is the worst there is
    assert score(timed(3, 1, -2, -2)) is None
    assert score(timed(3, 1)) == 120 and score(timed(-1)) is None


def test_made_up_batches_have_the_shape_of_real_ones(settings: Make) -> None:
    job = assemble(settings(micro_tokens=192, dropout=0.0))
    real = next(iter(job.feed.steps(None))).batches[0]
    synthetic = estimate.synthetic_batch(len(real.packed.ids), 48)
    loss, stats = job.objective.loss(job.model, synthetic)
    assert math.isfinite(loss.item()) and stats.tokens == real.tokens
    assert synthetic.packed.lengths.tolist()[:-1] == [48] * (len(synthetic.packed) - 1)
    assert synthetic.packed.positions.max() < 48 and len(synthetic.next_labels) == len(
        synthetic.packed
    )
    held_out = job.feed.evaluate_on
    assert held_out is not None
    tokens = [len(batch.packed.ids) for batch in held_out()]
    assert abs(submission._usual_tokens(held_out()) - tokens[0]) <= 0.3 * tokens[0]
    submission.compile_ahead(job)  # nothing is compiled here, so nothing is done
    assert all(p.grad is None for p in job.model.parameters())


def test_what_the_disk_refuses_is_reported(plan: Make) -> None:
    submission_plan = plan(1)
    submission_plan.out.write_text("in the way")
    with pytest.raises(Exception, match="cannot be written"):
        list(carry_out(submission_plan))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing is compiled")
def test_from_the_second_run_on_nothing_is_compiled(
    plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    before = executable.cache_misses()
    submission_plan = plan(3, device="cuda", compile="on", precision="bf16")
    runs = carry_out(submission_plan)
    first = next(runs)
    assert first.compiled == executable.cache_misses() - before > 0
    compiled = [
        event for event in mlperf.read(submission_plan.log(0)) if event.key == mlperf.COMPILED
    ]
    assert [event.value for event in compiled] == [first.compiled]
    assert [result.compiled for result in runs] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [1, 2, 3, 4])
@pytest.mark.parametrize("save_every", [1, 2, 3, 5, 0])
def test_crashes_anywhere(plan: Make, evaluation: int, save_every: int) -> None:
    (whole,) = carry_out(plan(1))
    submission_plan, seen = plan(1, "crashed", save_every=save_every), count(1)

    def crash(run: int, shown: RunStatus) -> None:
        if shown.evaluation and next(seen) == evaluation:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        list(carry_out(submission_plan, watch=crash))
    shutil.copytree(submission_plan.out, submission_plan.out.with_name("kept"))
    (result,) = carry_out(submission_plan, watch=crash)
    assert result.accuracies == whole.accuracies and result.problems == ()
    assert json.loads((submission_plan.out / "submission.json").read_text())["start_seed"] == 42
