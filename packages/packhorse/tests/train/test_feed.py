"""Data as steps: where a step ends, what its parts are, and one shape for a compiled model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.data.packed import shards
from packhorse.data.packed.masking import Recipe
from packhorse.data.tasks import targets
from packhorse.errors import InputError, KernelError
from packhorse.train import cost, feed
from packhorse.train.estimate import estimate
from packhorse.train.job import StepSchedule, assemble
from packhorse.train.objectives import Pretrain
from packhorse.train.settings import TrainSettings
from packhorse.train.step import RankGroup, set_rates, train_step

Make = Callable[..., Any]


def test_a_step_is_the_same_however_it_is_cut(settings: Make) -> None:
    def seen(**options: Any) -> list[list[int]]:
        feed = assemble(settings(batch=14, **options)).feed
        parts = [[b.packed.ids for b in step.batches] for step in islice(feed.steps(None), 8)]
        return [sorted(torch.cat(part).tolist()) for part in parts]

    assert seen() == seen(micro_tokens=60)
    assert seen() != seen(seed=7)


def test_a_step_goes_on_behind_its_cursor(settings: Make) -> None:
    fed = assemble(settings(batch=14, micro_tokens=100)).feed
    stream = list(islice(fed.steps(None), 9))  # more than an epoch of 40 rows
    for i in (1, 5, 7):
        again = next(fed.steps(stream[i - 1].after))
        for actual, expected in zip(again.batches, stream[i].batches, strict=True):
            assert torch.equal(actual.packed.ids, expected.packed.ids)
            assert torch.equal(actual.masked_at, expected.masked_at)
    assert fed.parts == 4 and fed.epoch == 40 / 7 and fed.batch == 14.0
    assert stream[0].sequences == 14


def test_evaluation_sees_the_same_masks_whatever_the_seed(settings: Make) -> None:
    def seen(seed: int) -> list[int]:
        job = assemble(settings(seed=seed))
        assert job.feed.evaluate_on is not None
        return [id for batch in job.feed.evaluate_on() for id in batch.packed.ids.tolist()]

    assert seen(1) == seen(2)


def test_masks_are_as_the_data_says_but_for_what_is_set(settings: Make, corpus: Path) -> None:
    data = shards.open_dataset(corpus / "train")
    built = Recipe(mask_probability=0.4, max_predictions=3, whole_words=True)
    data.manifest = replace(data.manifest, masking=built)
    assert feed.masking(settings(), data) == built
    for options in ({"mask_probability": 0.2}, {"max_predictions": 9}, {"whole_words": False}):
        assert feed.masking(settings(**options), data) == replace(built, **options)
    layout = replace(data.manifest.layout, static_masks=True)
    data.manifest = replace(data.manifest, layout=layout)
    assert feed.masking(settings(whole_words=True), data) is None


def test_the_next_sentence_is_learned_where_there_is_one(
    settings: Make, corpus: Path, tmp_path: Path
) -> None:
    assert assemble(settings()).objective == Pretrain("token", True)
    assert assemble(settings(next_sentence=False)).objective == Pretrain("token", False)
    for part in ("train", "eval"):
        write_single(corpus / part, tmp_path / part)
    single = settings(train=str(tmp_path))
    job = assemble(single)
    assert job.objective == Pretrain("token", False)
    assert train_step(job, next(job.feed.steps(None)), RankGroup()).work.tokens
    with pytest.raises(InputError, match=r"train has no second segments.*set next_sentence"):
        assemble(replace(single, next_sentence=True))
    with pytest.raises(InputError, match="eval has no second segments"):
        assemble(settings(eval=str(tmp_path)))


def write_single(pairs: Path, folder: Path) -> None:
    """The same rows, each sequence as one segment."""
    data = shards.open_dataset(pairs)
    layout = replace(data.manifest.layout, next_sentence=False)
    writer = shards.Writer(folder, layout, data.manifest.specials, {})
    rows = data.take(range(len(data)))
    writer.add(replace(rows, first=rows.lengths, random_next=rows.random_next * 0))
    writer.finish()


def test_one_shape_changes_nothing(settings: Make) -> None:
    """As a compiled model is fed; uncompiled, so that it runs here."""
    plain = settings(dropout=0.0, batch=13, micro_tokens=200)
    rows = []
    for compiled in (False, True):
        job = replace(assemble(plain), compiled=compiled)
        job.model.double()
        set_rates(job, 0)
        report = train_step(job, next(job.feed.steps(None)), RankGroup())
        rows.append([p.grad for p in job.model.parameters() if p.grad is not None])
        assert (report.work.fill == 1.0) is not compiled
    for first, second in zip(*rows, strict=True):
        assert float((first - second).norm()) <= 1e-10 * float(first.norm()) + 1e-15


def test_shapes_are_few(settings: Make) -> None:
    fed = assemble(settings(batch=13, micro_tokens=200)).feed
    batches = [batch for step in islice(fed.steps(None), 12) for batch in step.batches]
    shaped = [feed.fill_to_shape(batch.packed, fed.shape) for batch in batches]
    shapes = {(len(p.ids), len(p.cu_seqlens), p.max_seqlen) for p in shaped}
    assert len({len(batch.packed.ids) for batch in batches}) > 10
    assert len(shapes) <= 2 and {tokens for tokens, *_ in shapes} == {fed.shape.tokens}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_shapes_of_examples_are_few(apart: bool, parts: int, settings: Make) -> None:
    """Slots and the longest sequence are the same for all batches; tokens are buckets."""
    train, held_out = (examples(count, apart, seed) for seed, count in enumerate((400, 90)))
    options = settings(batch=24, train="a table")
    tokens = sum(len(s.ids) for example in train.examples for s in example.sequences) * 24 / 400
    fed = feed.examples(train, held_out, options, micro_tokens=int(tokens / parts) + 1)
    assert fed.parts == parts and fed.evaluate_on is not None
    batches = [batch for step in islice(fed.steps(None), 40) for batch in step.batches]
    for met, shape in ((batches, fed.shape), (list(fed.evaluate_on())[:-1], fed.eval_shape)):
        shaped = [feed.fill_to_shape(batch.packed, shape) for batch in met]
        assert {(len(p.cu_seqlens), p.max_seqlen) for p in shaped} == {
            (len(shaped[0].cu_seqlens), 64)
        }
        assert all(p.places == batch.packed.places for p, batch in zip(shaped, met, strict=True))
    shaped = [feed.fill_to_shape(batch.packed, fed.shape) for batch in batches]
    assert len({len(p.ids) for p in shaped}) <= 5
    free = [feed.fill_to_shape(batch.packed, feed.BatchShape()) for batch in batches]  # the control
    assert len({(len(p.cu_seqlens), p.max_seqlen) for p in free}) > 1


def examples(count: int, apart: bool, seed: int) -> targets.TrainingTask:
    """Of 3 to 20 tokens mostly, now and then of 60."""
    rng = np.random.default_rng(seed)

    def one() -> Any:
        length = 60 if rng.random() < 0.01 else int(rng.integers(3, 20))
        return SimpleNamespace(ids=rng.integers(5, 60, length), types=np.zeros(length, int))

    examples = [
        targets.TaskExample(tuple(one() for _ in range(1 + apart)), 0.5) for _ in range(count)
    ]
    return targets.TrainingTask(examples, "similarity" if apart else "regression")


def test_a_kernel_that_cannot_be_compiled_says_so(settings: Make) -> None:
    with pytest.raises(KernelError, match="leave compile off"):
        assemble(settings(compile="on", kernel="reference"))


def test_data_is_found_by_either_folder(settings: Make, corpus: Path) -> None:
    whole, part = settings(), settings(train=str(corpus / "train"))
    for options in (whole, part):
        fed = assemble(options).feed
        assert fed.evaluate_on is not None and fed.epoch == 5.0
    vocabulary = assemble(part).checkpoint.vocabulary
    assert vocabulary == corpus / "tokenizer"
    with pytest.raises(InputError, match="manifest"):
        assemble(settings(train=str(corpus / "tokenizer")))


def test_the_step_schedule() -> None:
    options = TrainSettings(batch=10, epochs=2.0, learning_rate=1.0, warmup=0.5, decay_steps=40)
    pace = StepSchedule(options, batch=10, epoch=10.5)
    assert (pace.limit, pace.steps) == (21, 21)
    assert [pace.rate(step) for step in (0, 10, 20, 30, 40)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    ends = replace(options, steps=50, max_sequences=95)
    assert (StepSchedule(ends, 10, 10.5).limit, StepSchedule(ends, 10, 10.5).steps) == (21, 10)
    only = replace(options, epochs=0.0, max_sequences=95)
    assert (StepSchedule(only, 10, 10.5).limit, StepSchedule(only, 10, 10.5).steps) == (0, 10)
    moving = replace(options, beta1=0.6, beta1_end=0.4, beta1_steps=10, beta2=0.9)
    betas = [StepSchedule(moving, 10, 10.5).betas(step)[0] for step in (0, 5, 10, 99)]
    assert betas == pytest.approx([0.6, 0.5, 0.4, 0.4])
    assert StepSchedule(moving, 10, 10.5, power=2.0).betas(10) == pytest.approx((0.16, 0.81))


def test_the_packing_rule(settings: Make) -> None:
    rows = assemble(settings(packing_keeps="batch", batch=6, beta1=0.8)).schedule
    assert rows.batch == 12.0 and rows.power == 2.0
    assert rows.betas(0)[0] == pytest.approx(0.64)
    assert assemble(settings(batch=6)).schedule.power == 1.0


def test_what_a_step_costs(settings: Make) -> None:
    job = assemble(settings(batch=8))
    step = next(job.feed.steps(None))
    work = cost.work(step.batches)
    lengths = step.batches[0].packed.lengths.tolist()
    assert (work.tokens, work.squares) == (sum(lengths), sum(n * n for n in lengths))
    assert work.masked == len(step.batches[0].masked_at) and work.fill == 1.0
    assert cost.work(step.batches, tokens_each=1000).fill == work.tokens / 1000
    linear = sum(p.numel() for n, p in job.model.bert.layers.named_parameters() if p.ndim == 2)
    alone = cost.StepWork(tokens=work.tokens)
    assert cost.operations(job.checkpoint.config, alone) == 6 * linear * work.tokens
    assert cost.operations(job.checkpoint.config, work) > 6 * linear * work.tokens
    assert cost.peak(torch.device("cpu")) is None
    assert cost.micro_tokens(job.checkpoint.config, torch.device("cpu"), half=True) == 8192


def test_an_estimate_matches_its_settings(settings: Make, tmp_path: Path) -> None:
    outlook = estimate(settings(steps=0, epochs=3.0, micro_tokens=100), tmp_path)
    assert (outlook.steps, outlook.accumulation, outlook.global_batch) == (15, 4, 16.0)
    assert outlook.hours > 0 and outlook.precision == "fp32" and "trial" in outlook.rate
    speed = '{"step": 1, "sequences_per_second": 2.0, "devices": 1}\n'
    (tmp_path / "speed.jsonl").write_text(speed)
    (tmp_path / "settings.toml").write_text(settings(steps=3).toml())
    assert estimate(settings(steps=450), tmp_path).hours == pytest.approx(1.0)
    assert "trial" in estimate(settings(steps=450, layers=3), tmp_path).rate  # another model's run
    assert "trial" in estimate(settings(steps=450), tmp_path, world=2).rate
    with pytest.raises(InputError, match="0 processes"):
        estimate(settings(), tmp_path, world=0)


def test_spans_in_place_of_words(settings: Callable[..., Any], tmp_path: Path) -> None:
    """A run masks spans of data that was built without them, and goes on to the bit."""
    from packhorse.train.loop import train

    spans = settings(steps=4, span_length=3.0)
    recipe = feed.masking(spans, feed.open_dataset(spans.train, "train"))
    assert recipe is not None and recipe.span_length == 3.0
    train(assemble(spans), tmp_path / "whole")
    train(assemble(settings(steps=4)), tmp_path / "tokens")
    calls = iter((0, 0, signal.SIGTERM))
    train(assemble(spans), tmp_path / "cut", stop_signal=lambda: next(calls))
    train(assemble(spans), tmp_path / "cut")
    logs = [(tmp_path / run / "log.jsonl").read_bytes() for run in ("whole", "cut", "tokens")]
    assert logs[0] == logs[1] != logs[2]
