"""Flags that several commands share, and those of `packhorse run` as one frozen value.

cyclopts reads flags off the fields of these classes. Long names have hyphens; the underscores and
the short names of several letters (`-bs`, `-ml`, `-cp`) of `packhorse run` are those of the tool
that this command replaces, so that its command lines still work.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from packhorse.cli.tasks import TaskOptions
from packhorse.data.delimited import CsvFormat
from packhorse.data.tables import ALL_COLUMNS, Kept
from packhorse.errors import InputError

GELUS = {"erf": "exact (erf)", "tanh": "approximated by tanh (gelu_new)"}  # as tables show it
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

MODEL = Group("Model", sort_key=1)
TASK = Group("Task", sort_key=2)
FILES = Group("Files", sort_key=3)
SPEED = Group("Measuring", sort_key=4)


def flag(
    *names: str, help: str, group: Group | None = None, show_default: bool = False
) -> Parameter:
    """Describe a flag; without names it takes that of its field, and no flag gets a --no-flag."""
    # cyclopts hides a flag whose group is None; the usual group is that of a flag without one.
    grouped: dict[str, Any] = {} if group is None else {"group": group}
    return Parameter(name=names, help=help, negative="", show_default=show_default, **grouped)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ModelFlags:
    """What a model needs besides its weights, if it is not stored next to them."""

    config: Annotated[
        Path | None,
        flag(
            group=MODEL,
            help="The model's configuration (bert_config.json or config.json), if it is not next "
            "to the weights.",
        ),
    ] = None
    vocab: Annotated[
        Path | None,
        flag(
            group=MODEL,
            help="The model's vocab.txt or tokenizer.json, if it is not next to the weights.",
        ),
    ] = None
    heads: Annotated[
        int | None,
        flag(group=MODEL, help="Number of attention heads, if no configuration states it."),
    ] = None
    gelu: Annotated[
        Literal["erf", "tanh"] | None,
        flag(
            group=MODEL,
            help="Form of GELU, if no graph shows it: exact (erf), or the tanh approximation of "
            "Google's code since February 2019.",
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        flag(
            group=MODEL,
            help="Ignore tensors of the file that match this pattern, such as 'teacher/*'; "
            "repeatable.",
        ),
    ] = None

    adapter: Annotated[
        str | None,
        flag(
            group=MODEL,
            help="A LoRA adapter to merge into the weights: a folder in PEFT's layout, or a hub "
            "id; or the name of one that the model's own file has, such as retrieval.query.",
        ),
    ] = None

    def load_options(self) -> dict[str, Any]:
        """Return the flags as keyword arguments of `packhorse.load`."""
        return {
            "config": self.config,
            "vocab": self.vocab,
            "heads": self.heads,
            "gelu": self.gelu,
            "ignore": tuple(self.ignore or ()),
            "adapter": self.adapter,
        }


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RunFlags:
    """The flags of `packhorse run`."""

    model: Annotated[
        str,
        flag(
            "--model",
            "-m",
            group=MODEL,
            help="A folder, a file, a TensorFlow prefix or a hub id; default all-MiniLM-L6-v2.",
        ),
    ] = DEFAULT_MODEL
    checkpoint: Annotated[
        str | None,
        flag("--checkpoint", "-cp", group=MODEL, help="Same as --model, and overrides it."),
    ] = None
    model_flags: ModelFlags = ModelFlags()
    device: Annotated[
        str | None,
        flag(
            group=MODEL,
            help="cpu, cuda or cuda:1; default PACKHORSE_DEVICE, else the accelerator.",
        ),
    ] = None
    devices: Annotated[
        str | None,
        flag(
            group=MODEL,
            help="With --out: several devices, such as cuda:0,cuda:1, which take turns; cpu,cpu "
            "divides the cores.",
        ),
    ] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "int8", "float8", "auto"] | None,
        flag(
            group=MODEL,
            help="Number format; auto takes the fastest that keeps the answers. Default fp32 on a "
            "CPU and without text, else bf16.",
        ),
    ] = None
    kernel: Annotated[
        str | None, flag(group=MODEL, help="Attention kernel; default the fastest here.")
    ] = None
    graphs: Annotated[
        bool,
        flag(
            "--graphs",
            "--use_graphs",
            group=MODEL,
            help="Compile the model; on CUDA also replay it as CUDA graphs.",
        ),
    ] = False
    invariant: Annotated[
        bool,
        flag(
            group=MODEL,
            help="Give a text bit-identical results in every batch; slightly slower.",
        ),
    ] = False
    max_length: Annotated[
        int,
        flag(
            "--max-length",
            "--max_length",
            "-ml",
            group=MODEL,
            help="Truncate texts to this many tokens; 0 or less is the model's own limit (the "
            "default).",
        ),
    ] = 0

    task: Annotated[
        Literal[
            "hidden", "embed", "sparse", "multi", "fill", "answer", "classify", "rerank", "label"
        ],
        flag(group=TASK, help="What to compute; default hidden (the hidden states)."),
    ] = "hidden"
    query: Annotated[
        str | None,
        flag("--query", "--question", group=TASK, help="For rerank and answer: the question."),
    ] = None
    pair: Annotated[bool, flag(group=TASK, help="Each text is a pair, separated by a tab.")] = False
    prompt: Annotated[
        str | None,
        flag(group=TASK, help="For embed, sparse and multi: name of one of the model's prompts."),
    ] = None
    as_query: Annotated[
        bool,
        flag(group=TASK, help="For sparse and multi: the texts are queries, not documents."),
    ] = False
    top_k: Annotated[
        int | None,
        flag(
            "--top-k",
            "--top_k",
            group=TASK,
            help="For fill, answer and rerank: how many results; for sparse: words of a text.",
        ),
    ] = None
    stride: Annotated[
        int | None,
        flag(
            group=TASK,
            help="For label and answer: read long texts in windows that share this many tokens; "
            "answer always does, label cuts them by default.",
        ),
    ] = None
    truncate_dim: Annotated[
        int | None,
        flag(
            group=TASK,
            help="For embed: keep this many numbers of each vector; default those that the "
            "model's folder names, else all.",
        ),
    ] = None
    raw: Annotated[
        bool,
        flag(group=TASK, help="For rerank: logits, without the model's activation."),
    ] = False
    precision: Annotated[
        Literal["float32", "int8", "uint8", "binary", "ubinary"],
        flag(
            group=TASK,
            help="For embed: a byte per number, or a bit; default float32.",
        ),
    ] = "float32"
    calibration: Annotated[
        Path | None,
        flag(
            group=TASK,
            help="File with the ranges of int8 and uint8; default fixed ones, as the server's.",
        ),
    ] = None

    input: Annotated[
        str | None,
        Parameter(
            name="--input",
            group=FILES,
            help="Read texts from txt, jsonl, csv, tsv, parquet or a folder saved by the datasets "
            "library (FOLDER/train for one split). - is standard input, one text per line; it is "
            "the default if text is piped in.",
            allow_leading_hyphen=True,
        ),
    ] = None
    column: Annotated[
        list[str] | None,
        flag(group=FILES, help="Column of the text; pass it twice for the two texts of a pair."),
    ] = None
    skip_empty: Annotated[bool, flag(group=FILES, help="Skip rows without text.")] = False
    keep_empty: Annotated[
        bool,
        flag(group=FILES, help="Encode rows without text too, as the model's special tokens."),
    ] = False
    keep: Annotated[
        list[str] | None,
        flag(
            group=FILES,
            help="Column of the input to write beside the results, NAME or NAME=NEW; repeatable; "
            "none keeps none. Default all, in jsonl and parquet.",
        ),
    ] = None
    delimiter: Annotated[
        str,
        flag(
            group=FILES,
            help="What separates the cells of csv and tsv: a character, or tab. Default guessed "
            "among comma, semicolon, tab and |.",
        ),
    ] = ""
    quote: Annotated[
        str, flag(group=FILES, help='What cells of csv and tsv are quoted by, or none; default ".')
    ] = '"'
    escape: Annotated[
        str,
        flag(
            group=FILES,
            help="What stands before quotes within cells of csv and tsv, such as \\; by default "
            "such quotes are doubled.",
        ),
    ] = ""
    encoding: Annotated[
        str,
        flag(
            group=FILES,
            help="Encoding of text files, such as cp1252; default UTF-8, or UTF-16 by its mark.",
        ),
    ] = ""
    out: Annotated[
        Path | None,
        flag(
            group=FILES,
            help="Write results to npy, npz (sparse and multi), jsonl or parquet. The same command "
            "resumes after a kill.",
        ),
    ] = None
    write_calibration: Annotated[
        Path | None,
        flag(
            group=FILES,
            help="Write the ranges of the texts' vectors to this npy file, for --calibration here "
            "and of serve.",
        ),
    ] = None
    overwrite: Annotated[
        bool, flag(group=FILES, help="Replace an existing file or an unfinished run.")
    ] = False
    chunk: Annotated[
        int | None,
        flag(
            group=FILES,
            help="Texts per chunk, the unit of a resumed run and of a device's turn; default 2048 "
            "(GPU 16384), multi 512, hidden 64.",
        ),
    ] = None
    json: Annotated[
        bool, flag(group=FILES, help="Print all results as one line of JSON on stdout.")
    ] = False

    perf: Annotated[
        bool, flag("--perf", "-p", group=SPEED, help="Measure the speed; print no results.")
    ] = False
    batch_size: Annotated[
        int,
        flag(
            "--batch-size",
            "--batch_size",
            "-bs",
            group=SPEED,
            help="Copies of each text that form one batch; default 1.",
        ),
    ] = 1
    iterations: Annotated[
        int, flag("--iterations", "-i", group=SPEED, help="Passes over the texts; default 1.")
    ] = 1

    @property
    def form(self) -> CsvFormat:
        """Return what text files of the input do not say about themselves."""
        delimiter = {"tab": "\t", "\\t": "\t"}.get(self.delimiter, self.delimiter)
        quote = "" if self.quote == "none" else self.quote
        return CsvFormat(delimiter, quote, self.escape, self.encoding)

    @property
    def kept(self) -> Kept | None:
        """Return the columns to keep: all unless they are named; None if the file holds none."""
        if self.out is None or self.out.suffix.lower() in (".npy", ".npz"):
            return None
        if self.keep is None:
            return ALL_COLUMNS
        names: dict[str, str] = {}
        for item in self.keep:
            name, _, new = item.partition("=")
            names[name] = new or name
        if len(set(names.values())) < len(names) or "id" in names.values():
            raise InputError("--keep gives two columns one name; the id is kept anyway")
        return {} if list(names) == ["none"] else names

    @property
    def task_options(self) -> TaskOptions:
        """Return what the task needs besides its texts."""
        return TaskOptions(
            self.query,
            self.prompt,
            self.top_k,
            self.max_length,
            self.precision,
            self.calibration,
            self.stride,
            self.as_query,
            self.raw,
        )
