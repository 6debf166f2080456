"""Are logs as MLPerf wants them? Its own checker says so, and then a stricter reader of ours.

MLPerf's checker looks for keys and values and hardly for their order: a log whose blocks are
shuffled, whose clock runs backwards or which was evaluated whenever it pleased passes. `order`
reads the log once from top to bottom and names every departure. The price of asking the checker as
a program of its own is a fifth of a second a log; within this process it would set up logging for
all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from packhorse.errors import MissingExtra
from packhorse.train.mlperf import BLOCK, END, HEADER, OWN, Event, read
from packhorse.train.presets import TARGET, evaluation_interval

RULESET = "1.0.0"
SAMPLES = 10_000  # sequences of a closed evaluation
LENGTH = 512  # tokens of a closed sequence at most


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run set out to do; of a closed one see `closed`."""

    target: float
    every: int = 0  # sequences between evaluations; 0: they are counted otherwise
    samples: int = 0  # sequences of an evaluation; 0: any number


def closed(global_batch: int) -> Rules:
    """The division's own."""
    return Rules(TARGET, evaluation_interval(global_batch), SAMPLES)


def needs_checker() -> None:
    """Refuse at once where MLPerf's checker is not installed."""
    if find_spec("mlperf_logging") is None:
        raise MissingExtra("mlperf-logging", "train")


def check(path: Path, rules: Rules) -> list[str]:
    """All that MLPerf's checker and ours find wrong with a log."""
    return [*checker(path), *order(read(path), rules)]


def checker(path: Path, ruleset: str = RULESET) -> list[str]:
    """What MLPerf's own checker has to say against a log."""
    needs_checker()
    which = ("--usage", "training", "--ruleset", ruleset, "--log_output", os.devnull)
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", *which, str(path)]
    # In a session of its own: Ctrl-C is for the submission, which ends behind the check.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode == 0:
        return []
    said = [line.strip() for line in done.stderr.splitlines() if not line.startswith("INFO")]
    return [f"MLPerf's checker: {' '.join(filter(None, said)) or done.returncode}"]


def order(events: Sequence[Event], rules: Rules) -> list[str]:
    """Each departure from the order of events, of times and of evaluations."""
    known = [event for event in events if not event.key.startswith(OWN)]
    keys = tuple(event.key for event in known)
    header, rest = keys[: len(HEADER)], keys[len(HEADER) :]
    if header != HEADER:
        return [_first_difference(header, HEADER)]
    due = (*BLOCK * max(1, rest.count(BLOCK[0])), *END)
    if rest != due:
        return [_first_difference(rest, due)]
    return [*_times(known), *_blocks(known), *_evaluations(known, rules), *_ending(known, rules)]


def _first_difference(found: Sequence[str], due: Sequence[str]) -> str:
    for number, key in enumerate(due):
        if number >= len(found):
            return f"the log ends before {key}"
        if found[number] != key:
            return f"{found[number]} stands where {key} is due"
    return f"{found[len(due)]} stands behind the end"


def _times(events: Sequence[Event]) -> Iterator[str]:
    for earlier, later in pairwise(events):
        if later.time_ms < earlier.time_ms:
            yield f"{later.key} is {earlier.time_ms - later.time_ms} ms before {earlier.key}"


def _blocks(events: Sequence[Event]) -> Iterator[str]:
    for key in BLOCK[:2]:
        numbers = [e.metadata.get("first_epoch_num") for e in events if e.key == key]
        if numbers != list(range(len(numbers))):
            yield f"{key} counts {numbers}, not from 0 up"


def _evaluations(events: Sequence[Event], rules: Rules) -> Iterator[str]:
    """Each where it is due; a run that ends without the target is evaluated once more."""
    made = [e for e in events if e.key == "eval_accuracy"]
    counts = [event.metadata.get("epoch_num", -1) for event in made]
    if counts != sorted(set(counts)) or counts[0] <= 0:
        yield f"evaluations are behind {counts} sequences, which do not rise"
    wrong = [event.value for event in made if not 0 <= event.value < 1]
    if wrong:
        yield f"accuracies are from 0 up to but not 1, not {wrong}"
    reached = [number for number, event in enumerate(made) if event.value >= rules.target]
    if reached and reached[0] < len(made) - 1:
        yield f"the target was reached behind {counts[reached[0]]} sequences, and the run went on"
    last = None if reached else -1
    for number, count in enumerate(counts[:last], 1):
        if rules.every and count // rules.every != number:
            yield f"evaluation {number} is behind {count} sequences, not {number * rules.every}"


def _ending(events: Sequence[Event], rules: Rules) -> Iterator[str]:
    made = [event for event in events if event.key == "eval_accuracy"]
    samples, learned, stop = events[-3:]
    if rules.samples and samples.value != rules.samples:
        yield f"evaluations are on {samples.value} sequences, not on {rules.samples}"
    if learned.value != made[-1].metadata.get("epoch_num"):
        yield f"train_samples is {learned.value}, but the last evaluation is elsewhere"
    due = "success" if made[-1].value >= rules.target else "aborted"
    if stop.metadata.get("status") != due:
        said = stop.metadata.get("status")
        yield f"the run says {said} at {made[-1].value}, target {rules.target}: {due}"
