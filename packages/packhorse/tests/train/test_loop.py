"""One loop for every objective: resuming to the bit, weights of parts and ranks, and its ends."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse.data.packed import loader, shards
from packhorse.errors import InputError
from packhorse.train import checkpoints
from packhorse.train.job import TrainingJob, assemble
from packhorse.train.journal import Diverged
from packhorse.train.loop import RunOutcome, train
from packhorse.train.objectives import Objective
from packhorse.train.step import RankGroup, set_rates, train_step

Make = Callable[..., Any]


def stopping_after(steps: int) -> Callable[[], int]:
    """A wish to stop that comes when so many steps are done in this process."""
    calls = count()
    return lambda: signal.SIGTERM if next(calls) >= steps else 0


def files(run: Path) -> dict[str, bytes]:
    """What must be equal of two runs; state.json has the name of its own folder in it."""
    (last,) = [path for step, path in state_folders(run) if step == 20]
    contents = {
        name: (last / name).read_bytes() for name in ("model.safetensors", "rng.safetensors")
    }
    contents["optimizer"] = (last / "optimizer.safetensors").read_bytes()
    contents["result"] = (run / "model" / "model.safetensors").read_bytes()
    return contents | {"log": (run / "log.jsonl").read_bytes()}


def state_folders(run: Path) -> list[tuple[int, Path]]:
    return [(int(path.name[5:]), path) for path in sorted(run.glob("step-*"))]


@pytest.fixture
def twenty(settings: Make) -> Any:
    """Steps with dropout, accumulation, epochs' ends within them, and evaluations."""
    return settings(
        *(),
        steps=20,
        eval_every=7,
        log_every=6,
        warmup=2,
        micro_tokens=150,
    )


@pytest.fixture
def whole(twenty: Any, tmp_path: Path) -> dict[str, bytes]:
    """The run that was never stopped."""
    train(assemble(twenty), tmp_path / "whole")
    return files(tmp_path / "whole")


def test_a_run_stopped_at_every_step_is_the_run_that_was_not(
    twenty: Any, whole: dict[str, bytes], tmp_path: Path
) -> None:
    run = tmp_path / "stopped"
    for step in range(1, 20):
        outcome = train(assemble(twenty), run, stop_signal=stopping_after(1))
        assert (outcome.step, outcome.signal, outcome.model) == (step, signal.SIGTERM, None)
    assert train(assemble(twenty), run).signal == 0
    assert files(run) == whole


def test_without_the_random_state_it_is_another_run(
    twenty: Any, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "restore_rng", lambda *states: [])
    run = tmp_path / "stopped"
    train(assemble(twenty), run, stop_signal=stopping_after(10))
    train(assemble(twenty), run)
    different = files(run)
    assert all(different[name] != whole[name] for name in ("model.safetensors", "log"))
    assert different["log"].splitlines()[:10] == whole["log"].splitlines()[:10]


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 20))
def test_stopped_once_anywhere(
    step: int, twenty: Any, whole: dict[str, bytes], tmp_path: Path
) -> None:
    run = tmp_path / "stopped"
    train(assemble(twenty), run, stop_signal=stopping_after(step))
    train(assemble(twenty), run)
    assert files(run) == whole


def test_bf16_goes_on_to_the_bit_and_keeps_weights_in_fp32(settings: Make, tmp_path: Path) -> None:
    half = settings(precision="bf16", steps=20, learning_rate=1e-3)
    job = assemble(half)
    assert {p.dtype for p in job.model.parameters()} == {torch.bfloat16}
    train(job, tmp_path / "whole")
    train(assemble(half), tmp_path / "stopped", stop_signal=stopping_after(5))
    train(assemble(half), tmp_path / "stopped")
    assert files(tmp_path / "whole") == files(tmp_path / "stopped")
    written = read_weights(tmp_path / "whole" / "model")
    masters = [state["master"] for state in job.optimizer.state.values()]
    assert len(masters) == len(list(job.model.parameters()))
    assert all(tensor.dtype == torch.float32 for tensor in written.values())
    assert any(torch.equal(master, written[WORDS]) for master in masters)
    assert not torch.equal(written[WORDS].bfloat16().float(), written[WORDS])


WORDS = "bert.embeddings.word_embeddings.weight"


def read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def gradients(job: TrainingJob, ranks: RankGroup | None = None) -> list[Tensor]:
    """Of the first step, as they are applied, in double precision."""
    job.model.double()
    set_rates(job, 0)
    train_step(job, next(job.feed.steps(None)), ranks or RankGroup())
    return [p.grad.clone() for p in job.model.parameters() if p.grad is not None]


def apart(first: list[Tensor], second: list[Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs)


def test_parts_change_nothing(settings: Make) -> None:
    plain = settings(dropout=0.0)  # words are averaged over tokens, and parts differ in those
    cut = replace(plain, micro_tokens=100)
    whole, parts = assemble(plain), assemble(cut)
    assert (whole.feed.parts, parts.feed.parts) == (1, 4)
    expected = gradients(whole)
    assert apart(expected, gradients(parts)) < 1e-10

    class Mean:
        """The mistake: every part is averaged by itself."""

        def __getattr__(self, name: str) -> Any:
            return getattr(parts.objective, name)

        def loss(self, model: Any, batch: Any, totals: Tensor) -> Any:
            loss, stats = parts.objective.loss(model, batch)
            return loss / 4, stats

    wrong = replace(assemble(cut), objective=Mean())
    assert apart(expected, gradients(wrong)) > 1e-3


def test_ranks_change_nothing(settings: Make) -> None:
    plain = settings(dropout=0.0, batch=13)
    expected = gradients(assemble(plain))
    barrier, shared = threading.Barrier(2), {}

    def add(rank: int, tensor: Tensor) -> Tensor:
        shared[rank] = tensor.clone()
        barrier.wait(60)
        total = shared[0] + shared[1]
        barrier.wait(60)
        return total

    by_rank: dict[int, list[Tensor]] = {}

    def work(rank: int) -> None:
        job = assemble(plain, rank=rank, world=2)
        by_rank[rank] = gradients(job, RankGroup(rank, 2, lambda tensor: add(rank, tensor)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert apart(by_rank[0], by_rank[1]) == 0.0
    assert apart(expected, by_rank[0]) < 1e-10


@dataclass(frozen=True)
class Poisoned:
    """An objective whose loss is no number at one step."""

    inner: Objective
    step: int
    value: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def loss(self, model: Any, batch: Any, totals: Tensor | None = None) -> Any:
        loss, stats = self.inner.loss(model, batch, totals)
        bad = batch.cursor["batch"] == self.step
        return loss * self.value if bad else loss, stats


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_with_its_step_and_rows(
    value: float, settings: Make, corpus: Path, tmp_path: Path
) -> None:
    poisoned = settings(steps=20, save_every=4, log_every=100, batch=8)
    job = assemble(poisoned)
    job = replace(job, objective=Poisoned(job.objective, 6, value))
    with pytest.raises(Diverged, match=r"step 6: the loss is (nan|inf)") as caught:
        train(job, tmp_path)
    dataset = shards.open_dataset(corpus / "train")
    stream = loader.Loader(dataset, rows=4, seed=poisoned.seed)
    numbers = stream._ordered(*np.divmod(np.arange(20, 24), len(dataset)))
    assert f"rows {', '.join(map(str, numbers))} of" in str(caught.value)
    assert [step for step, _ in state_folders(tmp_path)] == [4]
    assert "step-00000004" in str(caught.value)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert train(assemble(poisoned), tmp_path).step == 20  # the last good one is good


def test_a_gradient_that_is_no_number_is_found_too(settings: Make, tmp_path: Path) -> None:
    job = assemble(settings(steps=6, log_every=1))
    weight = job.model.bert.layers[0].get_parameter("down.weight")
    weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(Diverged, match="step 1: the gradient's norm"):
        train(job, tmp_path)


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_every_step_has_its_line(settings: Make, tmp_path: Path) -> None:
    outcome = train(assemble(settings(steps=7, log_every=5, eval_every=3)), tmp_path)
    lines = log(tmp_path)
    steps = [line for line in lines if "evaluation" not in line]
    assert [line["step"] for line in steps] == list(range(1, 8))
    assert [line["step"] for line in lines if "evaluation" in line] == [3, 6, 7]
    assert steps[-1]["sequences"] == outcome.sequences == 7 * 16
    assert steps[-1]["tokens"] == outcome.tokens
    assert all(abs(line["mlm_loss"] + line["nsp_loss"] - line["loss"]) < 1e-5 for line in steps)
    assert {"gradient_norm", "learning_rate", "mlm_accuracy"} <= steps[0].keys()


def test_evaluations_by_sequences(settings: Make, tmp_path: Path) -> None:
    train(assemble(settings(steps=10, eval_every_sequences=50)), tmp_path)
    evaluated_at = [line["sequences"] for line in log(tmp_path) if "evaluation" in line]
    assert evaluated_at == [64, 112, 160]  # the first multiple of 16 at or behind 50, 100, 150


def test_it_ends_at_its_target(settings: Make, tmp_path: Path) -> None:
    aims = {"measure": "loss", "eval_every": 2, "steps": 8}
    outcome = train(assemble(settings(**aims, target=100.0)), tmp_path / "easy")
    assert (outcome.step, outcome.reached) == (2, True)
    again = train(assemble(settings(**aims, target=100.0)), tmp_path / "easy")
    assert (again.step, again.reached) == (2, True)  # it is over, and stays so
    for folder in ("hard", "easy"):  # what was easy goes on with a harder one
        outcome = train(assemble(settings(**aims, target=1e-3)), tmp_path / folder)
        assert (outcome.step, outcome.reached) == (8, False)


def test_a_log_that_was_lost_is_reported(settings: Make, tmp_path: Path) -> None:
    train(assemble(settings(steps=2)), tmp_path)
    notes: list[str] = []
    train(assemble(settings(steps=3)), tmp_path, report=notes.append)
    assert not [note for note in notes if "log.jsonl" in note]
    (tmp_path / "log.jsonl").unlink()
    train(assemble(settings(steps=4)), tmp_path, report=notes.append)
    assert [note for note in notes if "log.jsonl was truncated or deleted" in note]


def test_it_ends_after_its_sequences(settings: Make, tmp_path: Path) -> None:
    outcome = train(assemble(settings(steps=0, max_sequences=40)), tmp_path)
    assert (outcome.step, outcome.sequences) == (3, 48)


def test_the_best_is_kept_and_written(settings: Make, tmp_path: Path) -> None:
    worse = settings(
        *(),
        steps=9,
        eval_every=3,
        measure="loss",
        write="best",
        save_every=3,
        learning_rate=2.0,
        schedule="constant",
        keep=1,
    )
    outcome = train(assemble(worse), tmp_path)
    values = {x["step"]: x["evaluation"]["loss"] for x in log(tmp_path) if "evaluation" in x}
    best = min(values, key=lambda step: values[step])
    assert best != 9, "the rate was meant to be too high to get better"
    assert [step for step, _ in state_folders(tmp_path)] == [best, 9]
    assert outcome.best == values[best]
    best_folder, last = (tmp_path / f"step-{step:08}" for step in (best, 9))
    assert torch.equal(read_weights(tmp_path / "model")[WORDS], read_weights(best_folder)[WORDS])
    assert not torch.equal(read_weights(best_folder)[WORDS], read_weights(last)[WORDS])


def test_resume_says_what_it_does(settings: Make, tmp_path: Path) -> None:
    plain = settings(steps=6, save_every=2)
    train(assemble(plain), tmp_path / "run", stop_signal=stopping_after(5))
    last = tmp_path / "run" / "step-00000005" / "optimizer.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    notes: list[str] = []
    changed = replace(plain, weight_decay=0.5)
    train(assemble(changed), tmp_path / "run", report=notes.append)
    text = "\n".join(notes)
    assert "skipped" in text and "resuming after step 4" in text
    assert "weight_decay is now 0.5; it was 0.01" in text
    with pytest.raises(InputError, match="holds a run that has reached step 6"):
        train(assemble(plain), tmp_path / "run", resume="never")
    elsewhere = train(
        assemble(plain), tmp_path / "other", resume=str(tmp_path / "run" / "step-00000006")
    )
    assert elsewhere.step == 6 and not (tmp_path / "other" / "log.jsonl").read_bytes()


def test_other_data_is_refused_with_what_to_do(
    settings: Make, corpus: Path, tmp_path: Path
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    train(assemble(settings(steps=2)), run)
    shutil.copytree(corpus, moved)  # the same rows elsewhere are the same data
    assert train(assemble(settings(steps=3, train=str(moved))), run).step == 3
    held_out = settings(steps=5, train=str(corpus / "eval"), eval=str(corpus / "eval"))
    with pytest.raises(InputError, match=r"step-00000003 learned from other data") as caught:
        train(assemble(held_out), run)
    message = str(caught.value)
    assert (
        f"train is now '{corpus / 'eval'}'; it was '{moved}'" in message and "cursor" not in message
    )
    assert f"--model {run / 'step-00000003'} and another --out" in message
    shutil.rmtree(moved / "train")
    shutil.copytree(corpus / "eval", moved / "train")
    with pytest.raises(InputError, match=f"the content of {moved} has changed since"):
        train(assemble(settings(steps=5, train=str(moved))), run)
    anew = replace(held_out, model=str(run / "step-00000003"), steps=1)
    assert train(assemble(anew), tmp_path / "another").step == 1  # as the message says


def test_another_run_is_never_overwritten(settings: Make, tmp_path: Path) -> None:
    short, long = settings(steps=2, save_every=1), settings(steps=4, save_every=2)
    train(assemble(short), tmp_path / "one")
    train(assemble(long), tmp_path / "two")
    before = {path: path.read_bytes() for path in (tmp_path / "two").rglob("*") if path.is_file()}
    named = str(tmp_path / "one" / "step-00000001")
    with pytest.raises(InputError, match=r"two holds another run .* choose another --out"):
        train(assemble(short), tmp_path / "two", resume=named)
    assert all(path.read_bytes() == held for path, held in before.items())
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "log.jsonl").write_text('{"step": 1, "of": "a run that saved nothing"}\n')
    train(assemble(short), tmp_path / "three", resume=named)
    assert [line["step"] for line in log(tmp_path / "three") if "loss" in line] == [2]
    first_checkpoint = str(tmp_path / "two" / "step-00000002")  # which may be wound back
    assert train(assemble(long), tmp_path / "two", resume=first_checkpoint).step == 4
    assert all(path.read_bytes() == before[path] for path in before if path.name == "log.jsonl")


def test_a_checkpoint_that_is_not_there_is_named_so(settings: Make, tmp_path: Path) -> None:
    plain = settings(steps=4, save_every=2)
    train(assemble(plain), tmp_path)
    message = r"step-00000012 does not exist; in .* there is step-00000002, step-00000004$"
    with pytest.raises(InputError, match=message):
        train(assemble(plain), tmp_path, resume=str(tmp_path / "step-00000012"))
    with pytest.raises(InputError, match=r"there is no checkpoint$"):
        train(assemble(plain), tmp_path / "new", resume=str(tmp_path / "none" / "step-00000012"))
    assert not (tmp_path / "new").exists()


def test_another_seed_or_optimizer_is_refused_first(settings: Make, tmp_path: Path) -> None:
    plain, notes = settings(steps=4, seed=42), []
    train(assemble(plain), tmp_path, stop_signal=stopping_after(2))
    with pytest.raises(InputError, match=r"the seed is 7, .* use --seed 42 or another --out"):
        train(assemble(replace(plain, seed=7)), tmp_path, report=notes.append)
    with pytest.raises(InputError, match=r"state of LAMB, not of LAMB without .*AdamW"):
        train(assemble(replace(plain, optimizer="adamw")), tmp_path, report=notes.append)
    assert not notes and train(assemble(plain), tmp_path).step == 4


def test_two_runs_in_one_folder_are_refused(settings: Make, tmp_path: Path) -> None:
    with checkpoints.claim(tmp_path), pytest.raises(InputError, match="another process"):
        train(assemble(settings()), tmp_path)


def test_figures_reach_the_watcher(settings: Make, tmp_path: Path) -> None:
    shown: list[Any] = []
    job = assemble(settings(steps=4, log_every=2, eval_every=4))
    train(job, tmp_path, watch=shown.append)
    assert [entry.step for entry in shown] == [2, 4, 4]
    assert shown[0].sequences_per_second > 0 and shown[0].fill == 1.0
    assert shown[-1].evaluation.keys() >= {"mlm_accuracy", "loss"}


@pytest.mark.slow  # tensorboard takes seconds to be imported
def test_figures_reach_tensorboard(settings: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    train(assemble(settings(steps=2, eval_every=2, tensorboard=True)), tmp_path)
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"train/mlm_accuracy" in events and b"evaluation/loss" in events


def test_what_a_run_lacks_is_reported_before_it_begins(settings: Make, corpus: Path) -> None:
    for wrong, message in (
        ({"steps": 0}, "nothing ends this run"),
        ({"train": ""}, "names no data"),
        ({"train": str(corpus / "train"), "eval": str(corpus / "nowhere")}, "nowhere"),
        ({"measure": "bleu"}, "mlm_accuracy"),
        ({"layers": 0}, "layers is not set"),
        ({"vocab_size": 10}, "the data has 64 words"),
        ({"task": "classify"}, "set model"),
        ({"averages": True}, "from a model"),
    ):
        with pytest.raises(InputError, match=message):
            assemble(settings(**wrong))


def test_outcome_is_plain(settings: Make, tmp_path: Path) -> None:
    outcome = train(assemble(settings(steps=2)), tmp_path)
    assert isinstance(outcome, RunOutcome) and outcome.model == tmp_path / "model"
    assert (tmp_path / "settings.toml").read_text().count("steps = 2") == 1
