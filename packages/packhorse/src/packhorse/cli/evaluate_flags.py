"""The flags of `packhorse evaluate`, as one frozen value, and which of them a task has.

One command has one list of flags; a flag that its task does not know is refused, because what it
was meant to change would silently stay as it is.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from packhorse.cli.console import note
from packhorse.cli.flags import DEFAULT_MODEL, Beside
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.runtime.encoder import Encoder

Task = Literal["squad", "stsb", "sts", "retrieval", "classification"]

SWITCH = Parameter(negative="", show_default=False)
SQUAD = Parameter(group=Group("Squad", sort_key=3))
SCORED = Parameter(group=Group("Similarity, retrieval, classification", sort_key=2))

# A flag that is not here is every task's.
ONLY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("stride", "max_answer_tokens", "no_answer", "top_k"), ("squad",)),
    **dict.fromkeys(("predictions", "overwrite", "predictions_in"), ("squad",)),
    **dict.fromkeys(("text", "label"), ("stsb", "sts", "classification")),
    "train": ("classification",),
    **dict.fromkeys(("split", "similarity", "skip_same_id"), ("retrieval",)),
    **dict.fromkeys(("peer", "batch_size", "note"), ("stsb", "sts", "retrieval", "classification")),
}
COUNTS = ("top_k", "limit", "max_answer_tokens", "batch_size")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of `packhorse evaluate`."""

    task: Annotated[Task, Parameter(help="What is in the input.")]
    input: Annotated[
        Path,
        Parameter(
            help="squad: JSON, also in gzip or zip. stsb, sts, classification: csv, tsv, jsonl, "
            "parquet. retrieval: a folder as BEIR lays it out, or SQuAD."
        ),
    ]
    model: Annotated[
        str | None,
        Parameter(
            name=("--model", "-m"),
            help="A folder, a file or a hub id; default all-MiniLM-L6-v2, not for squad.",
        ),
    ] = None
    beside: Beside = Beside()  # noqa: RUF009 (frozen)
    device: Annotated[str | None, Parameter(help="cpu, cuda, cuda:1.")] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "auto"] | None, Parameter(help="Number format.")
    ] = None
    max_length: Annotated[
        int | None,
        Parameter(
            help="Tokens a text at most; default the model's own length, for squad windows of 384."
        ),
    ] = None
    limit: Annotated[
        int | None, Parameter(help="Only the first so many questions, rows or queries.")
    ] = None
    json: Annotated[bool, SWITCH, Parameter(help="One line of JSON at the end.")] = False

    peer: Annotated[
        Literal["sentence-transformers", "transformers", "none"] | None,
        SCORED,
        Parameter(
            name="--beside",
            help="Score the same weights by this library too; default one that is installed.",
        ),
    ] = None
    batch_size: Annotated[int, SCORED, Parameter(help="Of that library.")] = 32
    text: Annotated[
        tuple[str, ...],
        SCORED,
        SWITCH,
        Parameter(help="The column of the text; given twice: of a pair."),
    ] = ()
    label: Annotated[
        tuple[str, ...], SCORED, SWITCH, Parameter(help="The column of the label or score.")
    ] = ()
    train: Annotated[
        Path | None,
        SCORED,
        Parameter(help="For classification with vectors: labelled rows to learn from."),
    ] = None
    split: Annotated[
        str | None, SCORED, Parameter(help="For retrieval: qrels/SPLIT.tsv; default test.")
    ] = None
    similarity: Annotated[
        Literal["cosine", "dot"] | None,
        SCORED,
        Parameter(help="For retrieval: what makes texts near; default the model's own way."),
    ] = None
    skip_same_id: Annotated[
        bool,
        SCORED,
        SWITCH,
        Parameter(help="For retrieval: a document with the query's id is no answer (ArguAna)."),
    ] = False
    note: Annotated[
        Path | None, SCORED, Parameter(help="A dated note in Markdown: machine, command, table.")
    ] = None

    stride: Annotated[
        int | None,
        SQUAD,
        Parameter(help="Tokens that windows share; default 128, or a quarter of shorter ones."),
    ] = None
    max_answer_tokens: Annotated[int, SQUAD, Parameter(help="Tokens an answer has at most.")] = 30
    no_answer: Annotated[
        float | None,
        SQUAD,
        Parameter(
            help="Answer nothing where that scores higher than the best answer by more than this; "
            "default 0 for v2.0, for v1.1 always answer."
        ),
    ] = None
    top_k: Annotated[int, SQUAD, Parameter(help="Also count the best of so many answers.")] = 1
    predictions: Annotated[
        Path | None, SQUAD, Parameter(help="Write what is predicted, as JSON of id and text.")
    ] = None
    overwrite: Annotated[bool, SQUAD, SWITCH, Parameter(help="Replace that file.")] = False
    predictions_in: Annotated[
        Path | None, SQUAD, Parameter(help="Score this file of predictions; no model is needed.")
    ] = None


def check(options: Options) -> None:
    """Refuse counts below 1, and flags of another task."""
    for name in COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"{_flag(name)} is {value}; it must be 1 or more")
    for field in fields(options):
        tasks = ONLY.get(field.name, (options.task,))
        if options.task not in tasks and getattr(options, field.name) != field.default:
            raise InputError(f"{_flag(field.name)} is for --task {' or '.join(tasks)}")


def _flag(name: str) -> str:
    return "--beside" if name == "peer" else f"--{name.replace('_', '-')}"


def open_model(options: Options) -> "Encoder":
    """The model, and a line on how it runs."""
    from packhorse.device import describe, dtype_name
    from packhorse.runtime.loading import load

    kind = {"device": options.device, "dtype": options.dtype}
    encoder = load(options.model or DEFAULT_MODEL, **kind, **options.beside.given())
    how = (describe(encoder.device), dtype_name(encoder.dtype), f"{encoder.kernel} kernel")
    note(f"{encoder.name}: {', '.join(how)}")
    return encoder
