"""Examples with their targets as packed batches, for fine-tuning and evaluation.

    task = labeled_task(read_labeled("SST-2/train.tsv"), tokenizer, max_length=128)
    for batch in TaskLoader(task, examples=32, seed=7, epochs=3):
        ...                                    # batch.packed, batch.targets
        state["data"] = batch.cursor           # later: TaskLoader(…, cursor=state["data"])

A batch is a number of examples (the batch of unpacked training, without its padding) or as many as
a budget of tokens holds. Targets refer to the packed batch: the ends of a span are token indices of
the flat batch, so that a loss takes its logits from there directly, whatever filler `Packed.pad`
adds at the end. The two sequences of a similarity pair are neighbors: 2i and 2i + 1.

Order, ranks, parts and cursor work as in `packed.loader`: the epochs laid end to end are one
stream, a global batch is the next piece of it whatever the number of ranks, and a cursor is a
position in it. All examples are in memory, because sets for fine-tuning are small; so nothing is
loaded ahead.

Question answering (`span_task`): a context too long for one sequence is cut into overlapping
windows, as in inference (`Encoder.answer`). A window that holds the whole answer learns its first
and last token, any other learns "no answer" at token 0. Of several gold answers the first is used
that can be taught exactly, else the first that can be taught at all. What cannot be taught exactly
is reported: where an answer begins or ends inside a token ("1990" of "1990s"), the tokens around it
are taught and the question is reported as widened; where it does not stand in the context, has no
token, or fits no window as a whole, the question is left out and reported, because teaching "no
answer" there would be wrong. Follows Devlin et al., "BERT" (2019), for SQuAD v1.1 and v2.0.

Shapes: N examples, S sequences, T tokens, C labels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse.data.order import by_tokens, permuted
from packhorse.data.tasks.choices import ChoiceTexts
from packhorse.data.tasks.labeled import LabeledTexts
from packhorse.data.tasks.squad import Gold, SquadQuestion
from packhorse.data.tasks.tagged import UNLABELED, TaggedTexts, token_targets
from packhorse.errors import InputError
from packhorse.packing.batch import Packed, TokenSequence
from packhorse.tokens.tokenizer import Encoding, Tokenizer

Problem = Literal[
    "single_label",
    "multi_label",
    "regression",
    "similarity",
    "contrastive",
    "distill",
    "tokens",
    "choice",
    "span",
]

NO_END = 1 << 60  # end of a stream of unlimited epochs
HASHED = 4096  # examples hashed at once: few calls, and little memory
QUESTIONS_PER_CHUNK = 1024


class Span(NamedTuple):
    """The first and the last token of an answer in its sequence; (0, 0), at [CLS]: no answer."""

    start: int
    end: int


NO_ANSWER = Span(0, 0)


@dataclass(frozen=True, slots=True)
class TaskExample:
    """A sequence, the two of a pair, or those of a group, and their target."""

    sequences: tuple[TokenSequence, ...]
    target: Any  # by the problem, as `COLLATE` takes it; None: contrastive


@dataclass(frozen=True)
class TrainingTask:
    """Examples of one problem, and its labels for a model's configuration."""

    examples: list[TaskExample]
    problem: Problem
    labels: tuple[str, ...] = ()
    truncated: int = 0  # examples that lost tokens to the length limit
    teacher: str = ""  # what the targets were computed by, if they are not the data's own

    @cached_property
    def lengths(self) -> np.ndarray:
        """[N] tokens of each example."""
        lengths = [sum(len(s.ids) for s in example.sequences) for example in self.examples]
        return np.array(lengths, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that is learned from: tokens, targets, their meaning and order."""
        digest = blake2b(repr((self.problem, self.labels)).encode(), digest_size=16)
        for begin in range(0, len(self.examples), HASHED):
            part = self.examples[begin : begin + HASHED]
            sequences = [sequence for example in part for sequence in example.sequences]
            lengths = [[len(s.ids) for s in example.sequences] for example in part]
            # With the lengths, tokens cannot move from one sequence to the next unnoticed.
            learned = self.teacher or [example.target for example in part]
            digest.update(repr((lengths, learned)).encode())
            for kind in ("ids", "types"):
                joined = np.concatenate([np.asarray(getattr(s, kind)) for s in sequences])
                digest.update(joined.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def fingerprints(self) -> tuple[str, str]:
        """The current fingerprint, and that of cursors of version 0.1: a sum of lengths alone."""
        return self.fingerprint, f"{zlib.crc32(self.lengths.tobytes()):08x}"


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """One rank's part of a batch; if it has no examples, `packed` holds one dummy token."""

    packed: Packed  # ragged; the sequences of an example are neighbors
    targets: Tensor  # in the form that `COLLATE` has for the problem
    numbers: tuple[int, ...]  # of the examples, in the order of the targets
    total: int  # examples of all ranks and parts: the divisor for the sum of their losses
    tokens: int
    cursor: dict[str, Any]  # where to continue after this batch

    def to(self, device: torch.device | str) -> TaskBatch:
        """The same batch on `device`."""
        targets = self.targets.to(device, non_blocking=True)
        return replace(self, packed=self.packed.to(device), targets=targets)


# Tasks -------------------------------------------------------------------------------------------


def labeled_task(
    labeled: LabeledTexts,
    tokenizer: Tokenizer,
    max_length: int | None = None,
    *,
    apart: bool = False,
) -> TrainingTask:
    """Examples of a labeled set; `apart`: pairs are two sequences, scores their similarity."""
    if not apart:
        encodings = [(encoding,) for encoding in tokenizer.encode(labeled.texts, max_length)]
        return _task(encodings, labeled.targets, labeled.problem, labeled.labels)
    if labeled.problem != "regression":
        raise InputError(
            f"similarity is learned from scores, but these are labels ({labeled.problem})"
        )
    pairs = _encode_apart(labeled.texts, tokenizer, max_length)
    return _task(pairs, labeled.targets, "similarity", labeled.labels)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What goes before the first text of a group and before the others."""

    query: str = ""
    document: str = ""
    pooled: bool = True  # whether vectors are made of the prompt's tokens too


def contrastive_task(
    groups: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    prompts: Prompts = Prompts(),  # noqa: B008 (frozen)
) -> TrainingTask:
    """Groups of an anchor, its positive and negatives; others in the batch are negatives too."""
    encodings = _encode_apart(groups, tokenizer, max_length, prompts)
    return _task(encodings, [None for _ in groups], "contrastive", ())


def distillation_task(
    groups: Sequence[Sequence[str]],
    targets: Sequence[Any],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    prompts: Prompts = Prompts(),  # noqa: B008 (frozen)
    teacher: str = "",
) -> TrainingTask:
    """Groups with a teacher's scores [K - 1], margins [K - 2] or vectors [K, E] of each."""
    encodings = _encode_apart(groups, tokenizer, max_length, prompts)
    return replace(_task(encodings, targets, "distill", ()), teacher=teacher)


def _encode_apart(
    texts: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    max_length: int | None,
    prompts: Prompts = Prompts(),  # noqa: B008 (frozen)
) -> list[tuple[Encoding, ...]]:
    """The texts of each group as sequences of their own."""
    size = len(texts[0]) if texts else 2
    for number, text in enumerate(texts):
        if isinstance(text, str):
            raise InputError(f"text {number} is not a pair; name two columns")
        if len(text) != size:
            raise InputError(f"group {number} has {len(text)} texts, and the first has {size}")
    columns: list[list[Encoding]] = []
    for number, column in enumerate(zip(*texts, strict=True)):
        prompt = prompts.document if number else prompts.query
        encodings = tokenizer.encode([prompt + text for text in column], max_length)
        if prompt and not prompts.pooled:
            # As sentence-transformers counts them: with the special tokens before the prompt, and
            # without the one after it.
            (alone,) = tokenizer.encode([prompt], max_length)
            length = len(alone) - (1 if alone.special[-1] else 0)
            encodings = [replace(encoding, prompt_length=length) for encoding in encodings]
        columns.append(encodings)
    return list(zip(*columns, strict=True))


def tagging_task(
    tagged: TaggedTexts, tokenizer: Tokenizer, max_length: int | None = None
) -> TrainingTask:
    """Sentences with a label for the first token of each word; words that are cut have none."""
    encodings = tokenizer.encode(tagged.texts, max_length)
    learned = [
        tuple(token_targets(words, tags, encoding).tolist())
        for words, tags, encoding in zip(tagged.words, tagged.tags, encodings, strict=True)
    ]
    if all(label == UNLABELED for labels in learned for label in labels):
        raise InputError(
            "no word of the data has a token to learn its label at: the tokenizer drops all of "
            "them, or max_length cuts them"
        )
    return _task([(encoding,) for encoding in encodings], learned, "tokens", tagged.labels)


def choice_task(
    choices: ChoiceTexts, tokenizer: Tokenizer, max_length: int | None = None
) -> TrainingTask:
    """Questions, each with a sequence for every choice."""
    size = len(choices.pairs[0])
    flat = tokenizer.encode([pair for pairs in choices.pairs for pair in pairs], max_length)
    groups = [tuple(flat[i : i + size]) for i in range(0, len(flat), size)]
    return _task(groups, choices.right, "choice", ())


def _task(
    encodings: Sequence[tuple[Encoding, ...]],
    targets: Sequence[Any],
    problem: Problem,
    labels: tuple[str, ...],
) -> TrainingTask:
    pairs = zip(encodings, targets, strict=True)
    examples = [TaskExample(sequences, target) for sequences, target in pairs]
    truncated = sum(any(encoding.truncated for encoding in group) for group in encodings)
    return TrainingTask(examples, problem, labels, truncated)


# Questions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpanReport:
    """How many windows the questions gave, and which questions are not taught exactly."""

    questions: int
    windows: int
    answered: int  # windows that hold their answer
    widened: tuple[str, ...]  # ids of questions whose answer ends inside a token
    dropped: dict[str, str]  # ids of questions that are left out, and the reasons


class _AnswerTokens(NamedTuple):
    """The tokens of an answer, counted in the context; `exact` if they hold nothing else."""

    first: int
    last: int
    exact: bool


def span_task(
    questions: Sequence[SquadQuestion],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    stride: int | None = None,
) -> tuple[TrainingTask, SpanReport]:
    """One example per window; max_length and stride are those of `Tokenizer.windows`."""
    examples: list[TaskExample] = []
    widened: list[str] = []
    dropped: dict[str, str] = {}
    for question, windows in _windowed(questions, tokenizer, max_length, stride):
        answer = None if question.impossible else _locate(question, windows)
        if isinstance(answer, str):
            dropped[question.id] = answer
            continue
        if answer and not answer.exact:
            widened.append(question.id)
        for window in windows:
            examples.append(TaskExample((window,), _target_span(window, answer)))
    answered = sum(example.target != NO_ANSWER for example in examples)
    report = SpanReport(len(questions), len(examples), answered, tuple(widened), dropped)
    return TrainingTask(examples, "span"), report


def _windowed(
    questions: Sequence[SquadQuestion],
    tokenizer: Tokenizer,
    max_length: int | None,
    stride: int | None,
) -> Iterator[tuple[SquadQuestion, list[Encoding]]]:
    for begin in range(0, len(questions), QUESTIONS_PER_CHUNK):
        chunk = questions[begin : begin + QUESTIONS_PER_CHUNK]
        pairs = [(question.question, question.context) for question in chunk]
        try:
            windows = tokenizer.windows(pairs, max_length, stride)
        except InputError as error:
            ids = f"{chunk[0].id} to {chunk[-1].id}"
            raise InputError(f"among the questions {ids}: {error}") from error
        yield from zip(chunk, windows, strict=True)


def _locate(question: SquadQuestion, windows: Sequence[Encoding]) -> _AnswerTokens | str:
    """The tokens of the answer to teach, exact if possible; or the reason why there are none."""
    offsets = _context_offsets(windows)
    inexact: _AnswerTokens | None = None
    reason = ""
    for gold in question.answers:
        located = _locate_gold(gold, question.context, offsets, windows)
        if isinstance(located, str):
            reason = reason or located
        elif located.exact:
            return located
        elif inexact is None:
            inexact = located
    return inexact or reason


def _locate_gold(
    gold: Gold, context: str, offsets: np.ndarray, windows: Sequence[Encoding]
) -> _AnswerTokens | str:
    if not context.startswith(*gold):
        return f"{gold.text!r:.40} does not stand at {gold.start}"
    text = gold.text.strip()
    begin = gold.start + gold.text.find(text)
    first = int(np.searchsorted(offsets[:, 1], begin, "right"))
    last = int(np.searchsorted(offsets[:, 0], begin + len(text), "left")) - 1
    if first > last or not text:
        return f"{gold.text!r:.40} has no token"
    covered = context[offsets[first, 0] : offsets[last, 1]]
    answer = _AnswerTokens(first, last, covered.strip() == text)
    if not any(_holds(window, answer) for window in windows):
        return f"{gold.text!r:.40} fits no window whole"
    return answer


def _context_offsets(windows: Sequence[Encoding]) -> np.ndarray:
    """Begin and end in the text of every token of the context, [n, 2], from all its windows."""
    offsets = np.zeros((max(w.start + _context_size(w) for w in windows), 2), np.int64)
    for window in windows:
        end = window.start + _context_size(window)
        offsets[window.start : end] = window.offsets[window.spans[-1]]
    return offsets


def _context_size(window: Encoding) -> int:
    return window.spans[-1].stop - window.spans[-1].start


def _holds(window: Encoding, answer: _AnswerTokens) -> bool:
    return window.start <= answer.first and answer.last < window.start + _context_size(window)


def _target_span(window: Encoding, answer: _AnswerTokens | None) -> Span:
    if answer is None or not _holds(window, answer):
        return NO_ANSWER
    shift = window.spans[-1].start - window.start
    return Span(answer.first + shift, answer.last + shift)


# Batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskLoader:
    """Iterate to get this rank's share of each global batch, from the cursor on."""

    task: TrainingTask
    examples: int | None = None  # per global batch, all ranks together; or instead
    tokens: int | None = None  # the most tokens per global batch
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None  # None: without end
    drop_last: bool = False  # end each epoch with its last full batch; else the next fills it up
    rank: int = 0
    world: int = 1
    parts: int = 1  # batches that a rank's share is divided into, for accumulation
    row: int = 0  # tokens that every sequence is padded to, for comparison; 0: no padding
    cursor: Mapping[str, Any] | None = None  # of the batch after which to continue

    def __post_init__(self) -> None:
        if (self.examples is None) == (self.tokens is None):
            raise InputError("set the size of a batch either in examples or in tokens")
        least = {"examples": 1, "tokens": 1, "seed": 0, "world": 1, "parts": 1, "epochs": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise InputError(f"{name} must be at least {smallest}, got {value}")
        if not 0 <= self.rank < self.world:
            raise InputError(f"there is no rank {self.rank} of {self.world}; ranks count from 0")
        if self.drop_last and self.tokens:
            raise InputError("drop_last is for batches of a number of examples, not of tokens")
        if not self._epoch_size:
            raise InputError(
                f"{len(self.task.examples)} examples are not one batch; use a smaller batch, or"
                " drop_last=False"
            )
        for number, example in enumerate(self.task.examples):
            if not all(len(sequence.ids) for sequence in example.sequences):
                raise InputError(f"example {number} has a sequence without tokens; drop it first")
        longest = int(self._lengths.argmax())
        if self.tokens and self._lengths[longest] > self.tokens:
            raise InputError(
                f"example {longest} has {self._lengths[longest]} tokens, more than a batch of "
                f"{self.tokens}; raise tokens, or lower the max_length of examples"
            )
        self._start()

    def __iter__(self) -> Iterator[TaskBatch]:
        number, begin = self._start()
        end = NO_END if self.epochs is None else self.epochs * self._epoch_size
        while begin < end:
            until = self._batch_end(begin, end)
            yield from self._share(begin, until, number)
            number += 1
            begin = until

    @property
    def _lengths(self) -> np.ndarray:
        return self.task.lengths

    @property
    def _epoch_size(self) -> int:
        size = len(self.task.examples)
        if self.drop_last and self.examples:
            return size // self.examples * self.examples
        return size

    def _batch_end(self, begin: int, end: int) -> int:
        """The end of the global batch that begins at this position of the stream."""
        if self.tokens is None:
            return min(begin + (self.examples or 1), end)
        most_examples = self.tokens // int(self._lengths.min())
        lengths = self._lengths[self._stream(begin, min(begin + most_examples, end))]
        return begin + int(np.searchsorted(lengths.cumsum(), self.tokens, "right"))

    def _stream(self, begin: int, until: int) -> np.ndarray:
        """The numbers of the examples at these positions of the stream."""
        epochs, numbers = np.divmod(np.arange(begin, until), self._epoch_size)
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                in_epoch = epochs == epoch
                size = len(self.task.examples)
                numbers[in_epoch] = permuted(numbers[in_epoch], size, self.seed, epoch)
        return numbers

    def _share(self, begin: int, until: int, number: int) -> Iterator[TaskBatch]:
        """This rank's share of a global batch, in `parts` batches."""
        numbers = self._stream(begin, until)
        shares = self.world * self.parts
        divided = by_tokens(self._lengths[numbers], shares) if shares > 1 else [slice(None)]
        rank_shares = divided[self.rank :: self.world]
        # A cursor never points into a global batch: a step that was begun is done again.
        before = self._cursor(begin, number)
        after = self._cursor(until, number + 1)
        for part, share in enumerate(rank_shares, 1):
            cursor = after if part == self.parts else before
            yield self._batch(numbers[share], len(numbers), cursor)

    def _batch(self, numbers: np.ndarray, total: int, cursor: dict[str, Any]) -> TaskBatch:
        examples = [self.task.examples[i] for i in numbers]
        sequences = [sequence for example in examples for sequence in example.sequences]
        packed = self._pack(sequences) if sequences else _empty_batch()
        targets = COLLATE[self.task.problem]([e.target for e in examples], self.task, packed)
        tokens = int(self._lengths[numbers].sum())
        return TaskBatch(packed, targets, tuple(numbers.tolist()), total, tokens, cursor)

    def _pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        if not self.row:
            return Packed.build(sequences)
        rows = Packed.rows(sequences, [[i] for i in range(len(sequences))], self.row)
        return replace(rows, capacity=0)  # the padding of a row is a sequence like any other

    def _cursor(self, position: int, batch: int) -> dict[str, Any]:
        epoch, example = divmod(position, self._epoch_size)
        return {
            "set": self.task.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": epoch,
            "example": example,
            "batch": batch,
        }

    def _start(self) -> tuple[int, int]:
        """The number of the first batch, and its position in the stream."""
        cursor = self.cursor
        if cursor is None:
            return 0, 0
        now = self._cursor(0, 0)
        if cursor.keys() != now.keys():
            raise InputError(f"not a cursor of a task: {dict(cursor)!r:.80}")
        accepted = {"set": self.task.fingerprints, "seed": (self.seed,), "shuffle": (self.shuffle,)}
        for key, values in accepted.items():
            if cursor[key] not in values:
                raise InputError(
                    f"the cursor is of another {key} ({cursor[key]!r:.40}, now {now[key]!r:.40}); "
                    "continue with the same, or begin again without the cursor"
                )
        epoch = cursor["epoch"]
        example = cursor["example"]
        batch = cursor["batch"]
        if not all(type(value) is int and value >= 0 for value in (epoch, example, batch)):
            raise InputError(f"not a cursor of a task: {dict(cursor)!r:.80}")
        if example >= self._epoch_size:
            raise InputError(f"the cursor is at example {example} of {self._epoch_size}")
        return batch, epoch * self._epoch_size + example


class _DummySequence(NamedTuple):
    ids: list[int]
    types: list[int]


def _empty_batch() -> Packed:
    """One dummy token, so that a rank without examples can take part in a step."""
    return replace(Packed.build([_DummySequence([0], [0])]), places=())


def _label_numbers(targets: list[Any], task: TrainingTask, packed: Packed) -> Tensor:
    return torch.tensor(targets, dtype=torch.int64)


def _label_flags(targets: list[Any], task: TrainingTask, packed: Packed) -> Tensor:
    flags = torch.zeros(len(targets), len(task.labels))
    for row, labels in zip(flags, targets, strict=True):
        row[list(labels)] = 1.0
    return flags


def _scores(targets: list[Any], task: TrainingTask, packed: Packed) -> Tensor:
    return torch.tensor(targets, dtype=torch.float32)


def _span_ends(targets: list[Any], task: TrainingTask, packed: Packed) -> Tensor:
    within = torch.tensor(targets, dtype=torch.int64).reshape(-1, 2)
    return within + packed.pick(packed.starts)[:, None]


def _no_targets(targets: list[Any], task: TrainingTask, packed: Packed) -> Tensor:
    return torch.empty(len(targets), 0)


def _token_labels(targets: list[Any], task: TrainingTask, packed: Packed) -> Tensor:
    pieces = [torch.tensor(labels, dtype=torch.int64) for labels in targets]
    if not pieces:
        return torch.full((len(packed.ids),), UNLABELED)
    return packed.join(pieces, fill=UNLABELED)


def _taught(targets: list[Any], task: TrainingTask, packed: Packed) -> Tensor:
    return torch.from_numpy(np.array(targets, np.float32))


COLLATE: dict[str, Callable[[list[Any], TrainingTask, Packed], Tensor]] = {
    "single_label": _label_numbers,  # int64 [N]: the label's number
    "multi_label": _label_flags,  # float32 [N, C]: 1 for labels that apply
    "regression": _scores,  # float32 [N]
    "similarity": _scores,  # float32 [N], of sequences 2i and 2i + 1
    "contrastive": _no_targets,  # [N, 0]: the first two sequences of a group belong together
    "distill": _taught,  # float32 [N, …]: what the teacher says of each group
    "tokens": _token_labels,  # int64 [T]: of the first token of each word, else -100
    "choice": _label_numbers,  # int64 [N]: the number of the right one
    "span": _span_ends,  # int64 [N, 2]: first and last token, as indices of the flat batch
}
