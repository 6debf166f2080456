"""The data of a run: training batches as steps, evaluation batches, and the examples of tasks.

A step is a global batch: the next rows of packed shards, or the next examples of a task. Each rank
gets its share, in as many parts as its memory requires. Both kinds of loader are streams with a
cursor; their differences are handled here, so that the loop knows one kind of data. Shuffled epochs
follow each other without a gap: every step is a full batch.

The examples of a task come from a table of texts and labels, of pairs and scores, of pairs alone,
or from SQuAD's questions. The kind of problem follows from the settings and the table. A classifier
that is trained further keeps its labels and their head if the table has the same labels.

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse import checkpoint, executable
from packhorse.checkpoint import Checkpoint
from packhorse.data.order import permuted
from packhorse.data.packed import loader, shards
from packhorse.data.packed.masking import Recipe
from packhorse.data.tasks import targets
from packhorse.data.tasks.choices import read_choices
from packhorse.data.tasks.labeled import LabeledTexts, TableLayout, read_labeled
from packhorse.data.tasks.pairs import TextGroup, is_scored, read_groups
from packhorse.data.tasks.squad import read_squad
from packhorse.data.tasks.tagged import read_tagged
from packhorse.data.tasks.targets import (
    Prompts,
    TrainingTask,
    choice_task,
    contrastive_task,
    distillation_task,
    labeled_task,
    span_task,
    tagging_task,
)
from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.runtime.teaching import Teacher, open_teacher
from packhorse.tokens import Tokenizer
from packhorse.train.objectives import OBJECTIVES, Choose, Embedding, Objective, SpanEnds, Tag
from packhorse.train.objectives.span import squad_evaluation
from packhorse.train.preparing import ALIASES, LabelSet
from packhorse.train.settings import LOSSES, TrainSettings

EVAL_SEED = 12345  # of the masks in every evaluation, whatever the run's seed
USUAL_LENGTH = 128  # at least one slot per this many tokens; empty slots cost attention time
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # in a model's folder, as MTEB looks for them
SHOWN_NUMBERS = 32  # of rows or examples in a message

Cursor = Mapping[str, Any]
Batch = Any  # of `data.packed.loader` or `data.tasks.targets`


@dataclass(frozen=True, slots=True)
class StepBatches:
    """This rank's batches of a global batch, on the host, and their position in the stream."""

    batches: list[Batch]
    before: Cursor | None  # None: the beginning of the data
    after: Cursor

    @property
    def sequences(self) -> int:
        """Sequences to learn from; a pair counts once."""
        return sum(_examples(batch) for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Tokens without filler."""
        return sum(batch.tokens for batch in self.batches)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Minimum sizes to fill batches up to, so that a compiled model meets few shapes."""

    tokens: int = 0  # 0: the next bucket
    slots: int = 0  # for sequences
    longest: int = 1  # of the maximum sequence length


@dataclass(frozen=True, slots=True)
class TrainingFeed:
    """The batches of a run and their statistics; made by `pretraining` or `examples`."""

    stream: Callable[[Cursor | None], Iterator[Batch]]
    evaluate_on: Callable[[], Iterable[Batch]] | None
    describe: Callable[[StepBatches], Callable[[], str]]  # its rows or examples, for a message
    batch: float  # mean sequences per step
    epoch: float  # steps per pass over the data
    tokens: float  # mean length of a sequence
    squares: float  # mean squared length of a sequence
    parts: int  # batches that a rank's share of a step is divided into
    shape: BatchShape = BatchShape()
    eval_shape: BatchShape = BatchShape()
    data: tuple[str, ...] = ()  # the fingerprints that its cursors may have

    def steps(self, cursor: Cursor | None) -> Iterator[StepBatches]:
        """An endless stream of steps from the cursor on."""
        batches: list[Batch] = []
        before = cursor
        number = cursor["batch"] if cursor else 0
        for batch in self.stream(cursor):
            batches.append(batch)
            # The cursor advances to the next global batch with the last part of a step.
            if batch.cursor["batch"] > number:
                yield StepBatches(batches, before, batch.cursor)
                batches = []
                before = batch.cursor
                number = batch.cursor["batch"]


def pretraining(
    settings: TrainSettings, rows: int, micro_tokens: int, rank: int = 0, world: int = 1
) -> TrainingFeed:
    """Packed rows, `rows` per step, with new masks per epoch unless masks are stored."""
    dataset = open_dataset(settings.train, "train")
    eval_dataset = evaluation_dataset(settings)
    manifest = dataset.manifest
    capacity = manifest.layout.capacity
    share = math.ceil(rows / world)
    rows_at_once = max(1, micro_tokens // capacity)
    parts = math.ceil(share / rows_at_once)
    options: dict[str, Any] = {
        "masking": masking(settings, dataset),
        "rank": rank,
        "world": world,
        "rows": rows,
        "seed": settings.seed,
        "parts": parts,
        "balanced": world > 1,
    }
    eval_options: dict[str, Any] = {
        "masking": masking(settings, dataset if eval_dataset is None else eval_dataset),
        "rank": rank,
        "world": world,
        "rows": rows_at_once * world,
        "seed": EVAL_SEED,
        "shuffle": False,
        "epochs": 1,
    }
    loader.Loader(dataset, **options)  # raises now what would be raised at the first step
    return TrainingFeed(
        stream=lambda cursor: iter(loader.Loader(dataset, **options, cursor=cursor)),
        evaluate_on=(
            (lambda: loader.Loader(eval_dataset, **eval_options))
            if eval_dataset is not None
            else None
        ),
        describe=lambda step: partial(
            _describe_rows, step.before, step.after, dataset, settings.seed
        ),
        batch=rows * manifest.sequences / manifest.rows,
        epoch=manifest.rows / rows,
        tokens=manifest.tokens / manifest.sequences,
        squares=_mean_square(manifest.histogram),
        parts=parts,
        shape=BatchShape(math.ceil(share / parts) * capacity, longest=capacity),
        eval_shape=BatchShape(longest=capacity),
        data=(dataset.fingerprint,),
    )


def examples(
    task: targets.TrainingTask,
    eval_task: targets.TrainingTask | None,
    settings: TrainSettings,
    micro_tokens: int,
    rank: int = 0,
    world: int = 1,
) -> TrainingFeed:
    """Labeled examples, `settings.batch` per step."""
    lengths = [len(s.ids) for example in task.examples for s in example.sequences]
    mean_tokens = sum(lengths) / max(1, len(task.examples))
    longest = max(_longest(source) for source in (task, eval_task) if source)
    row = (settings.max_length or longest) if settings.layout == "padded" else 0
    # Tokens that are computed per example, padding included.
    computed = row * len(lengths) / max(1, len(task.examples)) if row else mean_tokens
    max_parts = max(1, settings.batch // world)
    parts = min(max_parts, math.ceil(settings.batch * computed / world / micro_tokens))
    examples_at_once = max(1, int(micro_tokens / computed)) * world
    if settings.task in ("contrastive", "distill"):
        # `accuracy` is among the texts of a batch, so its size is that of a step.
        examples_at_once = settings.batch
    options: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "row": row,
        "examples": settings.batch,
        "seed": settings.seed,
        "parts": parts,
    }
    eval_options: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "row": row,
        "examples": examples_at_once,
        "shuffle": False,
        "epochs": 1,
    }
    targets.TaskLoader(task, **options)  # raises now what would be raised at the first step
    return TrainingFeed(
        stream=lambda cursor: iter(targets.TaskLoader(task, **options, cursor=cursor)),
        evaluate_on=(lambda: targets.TaskLoader(eval_task, **eval_options)) if eval_task else None,
        describe=lambda step: partial(
            _describe_examples, [n for batch in step.batches for n in batch.numbers]
        ),
        batch=settings.batch,
        epoch=len(task.examples) / settings.batch,
        tokens=mean_tokens,
        squares=sum(length**2 for length in lengths) / len(task.examples),
        parts=parts,
        shape=BatchShape(slots=_slots(task, settings.batch / world / parts), longest=longest),
        eval_shape=BatchShape(slots=_slots(task, examples_at_once / world), longest=longest),
        data=task.fingerprints,
    )


def _longest(task: targets.TrainingTask) -> int:
    return max((len(s.ids) for example in task.examples for s in example.sequences), default=1)


def _slots(task: targets.TrainingTask, examples: float) -> int:
    """Slots for this many examples and for filler: at most a quarter of a bucket is filler."""
    per_example = max((len(example.sequences) for example in task.examples), default=1)
    sequences = math.ceil(examples) * per_example
    return sequences + sequences // 4 + 1


def _mean_square(histogram: Sequence[int]) -> float:
    """The mean squared length in a histogram of lengths, which begins at 1."""
    counts = np.array(histogram, np.float64)
    return float((counts * np.arange(1, len(counts) + 1) ** 2).sum() / counts.sum())


def open_dataset(folder: str, part: str) -> shards.Dataset:
    """A dataset by its own folder, or by the folder that `packhorse data build` made."""
    if not folder:
        raise InputError(f"{part} names no data; make some with `packhorse data build`")
    path = Path(folder)
    if not path.exists():
        target = path.parent if path.name == part else path
        command = f"`packhorse data build SOURCES {target} --tokenizer VOCAB`"
        hint = ", with --eval-hashes for the held-out part" if part == "eval" else ""
        raise InputError(f"{part} is {path}, which does not exist; {command} makes it{hint}")
    inner = path / part
    return shards.open_dataset(inner if (inner / "manifest.json").is_file() else path)


def evaluation_dataset(settings: TrainSettings) -> shards.Dataset | None:
    """The held-out dataset: as named, or the eval folder beside the training rows."""
    if settings.eval:
        return open_dataset(settings.eval, "eval")
    path = Path(settings.train)
    for candidate in (path / "eval", path.parent / "eval"):
        if candidate != path and (candidate / "manifest.json").is_file():
            return shards.open_dataset(candidate)
    return None


def masking(settings: TrainSettings, dataset: shards.Dataset) -> Recipe | None:
    """The masking of the data, with what the settings change; None if masks are stored."""
    manifest = dataset.manifest
    if manifest.layout.static_masks:
        return None
    changes: dict[str, Any] = {}
    if settings.mask_probability:
        changes["mask_probability"] = settings.mask_probability
    if settings.max_predictions:
        changes["max_predictions"] = settings.max_predictions
    if settings.whole_words is not None:
        changes["whole_words"] = settings.whole_words
    if settings.span_length:
        changes["span_length"] = settings.span_length
        changes.setdefault("whole_words", False)
    return replace(manifest.masking, **changes)


def next_sentence(settings: TrainSettings) -> bool:
    """Is next-sentence prediction trained? As set, or if the data has second segments."""
    train = open_dataset(settings.train, "train")
    enabled = settings.next_sentence
    if enabled is None:
        enabled = train.manifest.layout.next_sentence
    for dataset in (train, evaluation_dataset(settings)):
        if enabled and dataset is not None and not dataset.manifest.layout.next_sentence:
            raise InputError(
                f"{dataset.folder} has no second segments, so next-sentence prediction cannot be "
                "trained; set next_sentence to false, or build the data without --single"
            )
    return enabled


def to_device(batch: Batch, device: torch.device, shape: BatchShape | None = None) -> Batch:
    """The batch on the device; with `shape`, filled up to it for a compiled model."""
    packed = batch.packed if shape is None else fill_to_shape(batch.packed, shape)
    tensors = {
        name: send(value, device)
        for name in ("masked_at", "masked_ids", "next_labels", "targets")
        if (value := getattr(batch, name, None)) is not None
    }
    return replace(batch, packed=packed.to(device), **tensors)


def fill_to_shape(packed: Packed, shape: BatchShape) -> Packed:
    """Fill a batch up to a shape, or beyond it to powers of two, so that most have the same."""
    length = len(packed.ids)
    tokens = max(length, shape.tokens) if shape.tokens else executable.round_up(length)
    dummies = -(-(tokens - length) // packed.max_seqlen)
    slots = _next_power_of_two(max(len(packed) + dummies, shape.slots, tokens // USUAL_LENGTH))
    longest = _next_power_of_two(max(packed.max_seqlen, shape.longest))
    return replace(packed.pad(tokens, slots), max_seqlen=longest)


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; from pinned memory, so that the host does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _describe_rows(before: Cursor | None, after: Cursor, dataset: shards.Dataset, seed: int) -> str:
    """The rows of a global batch, by their numbers in the dataset."""
    size = len(dataset)
    stream = np.arange(_position(before, size), _position(after, size))
    epochs, positions = np.divmod(stream, size)
    rows = [
        int(row)
        for epoch in np.unique(epochs).tolist()
        for row in permuted(positions[epochs == epoch], size, seed, epoch)
    ]
    return f"rows {_listing(rows)} of {dataset.folder}"


def _position(cursor: Cursor | None, size: int) -> int:
    return cursor["epoch"] * size + cursor["row"] if cursor else 0


def _describe_examples(numbers: list[int]) -> str:
    return f"examples {_listing(numbers)}"


def _examples(batch: Batch) -> int:
    return batch.sequences if isinstance(batch, loader.PretrainingBatch) else len(batch.numbers)


def _listing(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN_NUMBERS]))
    return f"{shown} … ({len(numbers)} in all)" if len(numbers) > SHOWN_NUMBERS else shown


# Tasks


@dataclass(frozen=True, slots=True)
class TaskData:
    """A task's examples, and the objective that learns them."""

    train: TrainingTask
    eval: TrainingTask | None
    objective: Objective
    labels: LabelSet = LabelSet()  # noqa: RUF009 (frozen)
    prompts: Mapping[str, str] | None = None  # for the model to keep; None: as it is
    notes: tuple[str, ...] = ()


def read_task(settings: TrainSettings, model: Checkpoint) -> TaskData:
    """The examples that the settings name, tokenized for the model."""
    # Embedding models are trained up to a maximum length; other tasks may use all positions.
    max_length = model.max_length if settings.is_embedding else model.config.max_positions
    if settings.max_length > max_length:
        raise InputError(
            f"max_length is {settings.max_length}; {model.name} takes {max_length} tokens"
        )
    readers = {
        "answer": _read_questions,
        "choose": _read_choices,
        "tag": _read_tagged,
        "contrastive": _read_groups,
        "distill": _read_groups,
    }
    reader = readers.get(settings.task, _read_labelled)
    return reader(settings, model, checkpoint.tokenizer(model))


def _read_labelled(settings: TrainSettings, model: Checkpoint, tokenizer: Tokenizer) -> TaskData:
    is_similarity = settings.task == "similarity"
    layout = _layout(settings)
    problem: Any = None if settings.problem == "auto" else settings.problem
    read = partial(read_labeled, layout=layout, problem="regression" if is_similarity else problem)
    table = _read_with_model_labels(read, settings.train, model) or read(settings.train)
    make_task = partial(
        labeled_task,
        tokenizer=tokenizer,
        apart=is_similarity,
        max_length=settings.max_length or None,
    )
    train = make_task(table)
    eval_task = None
    if settings.eval:
        eval_task = make_task(
            read_labeled(settings.eval, layout, problem=table.problem, labels=table.labels)
        )
    objective = OBJECTIVES[train.problem]
    return TaskData(
        train,
        eval_task,
        _embedding(settings) if is_similarity else objective(agreement=settings.agreement),
        LabelSet() if is_similarity else LabelSet(table.labels, table.problem),
        notes=_truncation_notes(train, eval_task),
    )


def _layout(settings: TrainSettings) -> TableLayout:
    return TableLayout(
        text=settings.text,
        label=settings.label,
        separator=settings.separator,
        scale=(settings.scale[0], settings.scale[1]) if settings.scale else None,
    )


def _read_with_model_labels(
    read: partial[LabeledTexts], source: str, model: Checkpoint
) -> LabeledTexts | None:
    """The table with the labels of the classifier that is trained further, if they are the same."""
    if "classify" not in model.model.heads or model.problem == "regression":
        return None
    try:
        return read(source, labels=model.labels)
    except InputError:
        return None  # other labels, so a new head; any other error shows when it is read again


def _read_tagged(settings: TrainSettings, model: Checkpoint, tokenizer: Tokenizer) -> TaskData:
    max_length = settings.max_length or None
    columns = (*settings.text, *settings.label)
    kept = model.labels if "tokens" in model.model.heads else ()
    try:  # a tagger that is trained further keeps its labels, if they are the same
        tagged = read_tagged(settings.train, columns, kept)
    except InputError:
        tagged = read_tagged(settings.train, columns)
    train = tagging_task(tagged, tokenizer, max_length)
    eval_task = None
    if settings.eval:
        held_out = read_tagged(settings.eval, columns, tagged.labels)
        eval_task = tagging_task(held_out, tokenizer, max_length)
    labels = LabelSet(tagged.labels)
    notes = _truncation_notes(train, eval_task)
    if all(label.isdecimal() for label in tagged.labels):
        notes += (
            "labels are numbers: f1 counts entities by names (B-PER, I-PER, O), so give names, or "
            "set measure to accuracy",
        )
    return TaskData(train, eval_task, Tag(tagged.labels), labels, notes=notes)


def _read_choices(settings: TrainSettings, model: Checkpoint, tokenizer: Tokenizer) -> TaskData:
    def read(source: str) -> TrainingTask:
        return choice_task(
            read_choices(source, settings.text), tokenizer, settings.max_length or None
        )

    train = read(settings.train)
    eval_task = read(settings.eval) if settings.eval else None
    # One output, as transformers' class for it has; its configuration names no labels.
    labels = LabelSet(("choice",), "regression")
    notes = _truncation_notes(train, eval_task)
    return TaskData(train, eval_task, Choose(), labels, notes=notes)


def _embedding(settings: TrainSettings) -> Embedding:
    """The loss that is set, or the task's first."""
    kind: Any = LOSSES[settings.task][0] if settings.loss == "auto" else settings.loss
    return Embedding(
        kind, settings.temperature, settings.margin, settings.distance, settings.widths
    )


def _read_groups(settings: TrainSettings, model: Checkpoint, tokenizer: Tokenizer) -> TaskData:
    objective = _embedding(settings)
    prompts = _prompts(settings, model)
    max_length = settings.max_length or None
    is_taught = settings.task == "distill"
    groups = read_groups(
        settings.train,
        settings.text,
        settings.negatives,
        scored=is_taught and not settings.teacher,
    )
    if is_taught:
        name = ALIASES.get(settings.teacher, settings.teacher)
        teacher = open_teacher(name, settings.device) if name else None
        train = _taught(groups, objective, teacher, tokenizer, max_length, prompts)
    else:
        train = contrastive_task([g.texts for g in groups], tokenizer, max_length, prompts)
    held_out = _held_out_groups(settings, tokenizer, prompts) if settings.eval else None
    kept = {"query": prompts.query, "document": prompts.document}
    return TaskData(
        train,
        held_out,
        objective,
        prompts={**model.prompts, **kept} if any(kept.values()) else None,
        notes=(*_truncation_notes(train, held_out), *_group_notes(groups, settings, objective)),
    )


def _taught(
    groups: Sequence[TextGroup],
    objective: Embedding,
    teacher: Teacher | None,
    tokenizer: Tokenizer,
    max_length: int | None,
    prompts: Prompts,
) -> TrainingTask:
    """Groups with what a teacher says of them, now or in the data."""
    texts = [group.texts for group in groups]
    if teacher is None:
        if objective.kind == "vectors":
            raise InputError("loss is 'vectors', which a teacher makes: set teacher to a model")
        learned: Sequence[Any] = [group.scores for group in groups]
        return distillation_task(texts, learned, tokenizer, max_length, prompts)
    learned = teacher.vectors(texts) if objective.kind == "vectors" else teacher.scores(texts)
    name = f"{objective.kind} of {teacher.fingerprint}"
    return distillation_task(texts, learned, tokenizer, max_length, prompts, name)


def _held_out_groups(
    settings: TrainSettings, tokenizer: Tokenizer, prompts: Prompts
) -> TrainingTask:
    """What embeddings are evaluated on: groups to search in, or pairs with scores (STS)."""
    max_length = settings.max_length or None
    if is_scored(settings.eval):
        layout = replace(_layout(settings), text=())
        table = read_labeled(settings.eval, layout, problem="regression")
        return labeled_task(table, tokenizer, max_length, apart=True)
    groups = read_groups(settings.eval, settings.text)  # negatives are how many to learn from
    return contrastive_task([g.texts for g in groups], tokenizer, max_length, prompts)


def _prompts(settings: TrainSettings, model: Checkpoint) -> Prompts:
    """The prompts that are set, else the model's own for queries and for documents."""
    own = model.prompts
    document = next((own[name] for name in DOCUMENT_PROMPTS if name in own), "")
    return Prompts(
        settings.query_prompt or own.get("query", ""),
        settings.document_prompt or document,
        model.layout is None or model.layout.include_prompt,
    )


def _group_notes(
    groups: Sequence[TextGroup], settings: TrainSettings, objective: Embedding
) -> tuple[str, ...]:
    """What of the groups is not learned as the file may have meant it."""
    count = len(groups)
    notes: list[str] = []
    if repeated := sum(len(set(group.texts[2:])) < len(group.texts[2:]) for group in groups):
        notes.append(f"{repeated:,} of {count:,} groups have a negative twice, for lack of others")
    unused = sum(group.unused for group in groups)
    if unused and not settings.negatives:
        used = len(groups[0].texts) - 2
        notes.append(
            f"{unused:,} negatives are left out, because every group has {used}; set negatives for "
            "more, and remove rows that have none"
        )
    anchors, positives = (len({group.texts[side] for group in groups}) for side in (0, 1))
    shared = count - min(anchors, positives)
    if shared and objective.ranks:
        notes.append(
            f"{shared:,} of {count:,} groups repeat an anchor or a positive; in one step with the "
            "other, what belongs together is learned as a negative"
        )
    if settings.batch > count and objective.ranks:
        notes.append(
            f"batch is {settings.batch}, more than {count} groups: a step has groups several times,"
            " and learns each as a negative of its copies; lower batch"
        )
    return tuple(notes)


def _read_questions(settings: TrainSettings, model: Checkpoint, tokenizer: Tokenizer) -> TaskData:
    max_length = settings.max_length or None
    stride = settings.stride or None
    train, report = span_task(list(read_squad(settings.train)), tokenizer, max_length, stride)
    notes = ()
    if report.dropped:
        question, reason = next(iter(report.dropped.items()))
        notes = (f"{len(report.dropped)} questions cannot be used; {question}: {reason}",)
    if not settings.eval:
        return TaskData(train, None, SpanEnds(), notes=notes)
    evaluation = squad_evaluation(list(read_squad(settings.eval)), tokenizer, max_length, stride)
    return TaskData(train, evaluation.task(), SpanEnds(evaluation), notes=notes)


def _truncation_notes(train: TrainingTask, held_out: TrainingTask | None) -> tuple[str, ...]:
    """What was cut; of words that are cut, evaluation says nothing either."""
    tasks = (("", train), ("evaluation: ", held_out))
    return tuple(
        f"{name}{task.truncated:,} of {len(task.examples):,} examples were truncated"
        for name, task in tasks
        if task and task.truncated
    )
