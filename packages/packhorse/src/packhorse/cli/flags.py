"""The flags of `packhorse run`, as one frozen value; cyclopts reads them off its fields.

Long names have hyphens; the underscores and the short names of several letters (`-bs`, `-ml`,
`-cp`) are those of the tool that this command replaces, so that its command lines still work.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from packhorse.cli.tasks import Ask

GELUS = {"erf": "exact (erf)", "tanh": "approximated by tanh (gelu_new)"}  # as tables say it
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

MODEL, TASK = Group("Model", sort_key=1), Group("Task", sort_key=2)
FILES, SPEED = Group("Files", sort_key=3), Group("Measuring", sort_key=4)


def _flag(group: Group, *names: str, help: str) -> Parameter:
    return Parameter(name=names, group=group, help=help, negative="", show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Beside:
    """What else belongs to a model, where it does not lie beside its weights."""

    config: Annotated[
        Path | None,
        _flag(MODEL, "--config", help="Its configuration (bert_config.json, config.json)."),
    ] = None
    vocab: Annotated[
        Path | None, _flag(MODEL, "--vocab", help="Its vocab.txt or tokenizer.json.")
    ] = None
    heads: Annotated[
        int | None, _flag(MODEL, "--heads", help="Attention heads, where no configuration says.")
    ] = None
    gelu: Annotated[
        Literal["erf", "tanh"] | None,
        _flag(
            MODEL,
            "--gelu",
            help="Which GELU it is, where no graph shows it: exact (erf), or by tanh as in "
            "Google's code since February 2019.",
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        _flag(
            MODEL,
            "--ignore",
            help="Tensors of the file that are no part of the model, as 'teacher/*'; repeatable.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """As keywords of `packhorse.load`."""
        return {
            "config": self.config,
            "vocab": self.vocab,
            "heads": self.heads,
            "gelu": self.gelu,
            "ignore": tuple(self.ignore or ()),
        }


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Options:
    """The flags of `packhorse run`."""

    model: Annotated[
        str,
        _flag(
            MODEL,
            *("--model", "-m"),
            help="A folder, a file, a TensorFlow prefix or a hub id; default all-MiniLM-L6-v2.",
        ),
    ] = DEFAULT_MODEL
    checkpoint: Annotated[
        str | None,
        _flag(MODEL, "--checkpoint", "-cp", help="As --model, and goes before it."),
    ] = None
    beside: Beside = Beside()
    device: Annotated[
        str | None,
        _flag(
            MODEL,
            "--device",
            help="cpu, cuda, cuda:1; default PACKHORSE_DEVICE, else the accelerator.",
        ),
    ] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "auto"] | None,
        _flag(
            MODEL,
            "--dtype",
            help="Number format; auto takes the fastest that keeps the answers. Default fp32 on a "
            "CPU and without text, else bf16.",
        ),
    ] = None
    kernel: Annotated[
        str | None, _flag(MODEL, "--kernel", help="Attention kernel; default the fastest here.")
    ] = None
    graphs: Annotated[
        bool, _flag(MODEL, "--graphs", "--use_graphs", help="Compile; on CUDA replay as graphs.")
    ] = False
    invariant: Annotated[
        bool,
        _flag(MODEL, "--invariant", help="The same bits for a text in every batch; a bit slower."),
    ] = False
    max_length: Annotated[
        int,
        _flag(
            MODEL,
            *("--max-length", "--max_length", "-ml"),
            help="Tokens a text at most; 0 or less: the model's own length (the default).",
        ),
    ] = 0

    task: Annotated[
        Literal["hidden", "embed", "fill", "answer", "classify", "rerank", "label"],
        _flag(TASK, "--task", help="What to ask of the model; default hidden."),
    ] = "hidden"
    query: Annotated[
        str | None,
        _flag(TASK, "--query", "--question", help="For rerank and answer: what to look for."),
    ] = None
    pair: Annotated[
        bool, _flag(TASK, "--pair", help="Each text is two, with a tab between them.")
    ] = False
    prompt: Annotated[
        str | None, _flag(TASK, "--prompt", help="For embed: one of the model's prompts, by name.")
    ] = None
    top_k: Annotated[
        int | None,
        _flag(TASK, "--top-k", "--top_k", help="For fill, answer and rerank: how many to give."),
    ] = None

    input: Annotated[
        str | None,
        Parameter(
            name="--input",
            group=FILES,
            help="Texts from txt, jsonl, csv, tsv, parquet, a folder that datasets saved (a split "
            "is FOLDER/train); - is standard input, a text a line, which is read by itself where "
            "text is piped in.",
            allow_leading_hyphen=True,
        ),
    ] = None
    column: Annotated[
        list[str] | None,
        _flag(FILES, "--column", help="The column of the text; given twice: of a pair."),
    ] = None
    skip_empty: Annotated[
        bool, _flag(FILES, "--skip-empty", help="Pass over rows without text.")
    ] = False
    out: Annotated[
        Path | None,
        _flag(
            FILES,
            "--out",
            help="Results to npy, jsonl or parquet. After a kill the same command continues.",
        ),
    ] = None
    overwrite: Annotated[
        bool, _flag(FILES, "--overwrite", help="Replace the file, and what is left of another run.")
    ] = False
    chunk: Annotated[
        int | None,
        _flag(FILES, "--chunk", help="Texts a kill may cost; default 2048, hidden 64."),
    ] = None
    json: Annotated[
        bool, _flag(FILES, "--json", help="All the numbers, as one line of JSON on stdout.")
    ] = False

    perf: Annotated[bool, _flag(SPEED, "--perf", "-p", help="Measure, do not answer.")] = False
    batch_size: Annotated[
        int,
        _flag(
            SPEED,
            *("--batch-size", "--batch_size", "-bs"),
            help="Copies of each text that make one batch; default 1.",
        ),
    ] = 1
    iterations: Annotated[
        int, _flag(SPEED, "--iterations", "-i", help="Passes over the texts; default 1.")
    ] = 1

    @property
    def ask(self) -> Ask:
        """What the task is told besides its texts."""
        return Ask(self.query, self.prompt, self.top_k, self.max_length)
