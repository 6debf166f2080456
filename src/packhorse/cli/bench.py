"""`packhorse bench`: the tables of this house, side by side, in one run.

Each measurement can be kept as JSON, as a plot, and as a note with the date, the machine and the
command, which is what a claim of speed rests on.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from packhorse.cli.console import emit, note, progress, table
from packhorse.cli.flags import DEFAULT_MODEL
from packhorse.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from packhorse.bench.report import Table

app = App(
    name="bench",
    help="Measure encoders and packers, ours and others, side by side.",
    help_format="plaintext",
)

Mix = Literal["wikipedia", "squad", "normal"]


def _flag(*names: str, help: str) -> Parameter:
    return Parameter(name=names, help=help, negative="")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Load:
    """What lengths are measured on: a mix of our own, or a histogram."""

    workload: Annotated[
        Mix, _flag("--workload", help="A seeded mix: like Wikipedia, like SQuAD, or N(128,128).")
    ] = "normal"
    histogram: Annotated[
        str | None, _flag("--histogram", help="FILE[:NAME] of real lengths, before --workload.")
    ] = None
    max_length: Annotated[
        int | None, _flag("--max-length", help="The longest of the mix; default its own.")
    ] = None
    seed: Annotated[int, _flag("--seed", help="Of lengths and token ids.")] = 0

    @property
    def name(self) -> str:
        """What it is called in a title."""
        return self.workload if self.histogram is None else Path(self.histogram).name

    def lengths(self, count: int) -> "np.ndarray":
        """`count` lengths."""
        from packhorse.bench import lengths, workloads

        if self.histogram is None:
            return workloads.draw(self.workload, count, seed=self.seed, longest=self.max_length)
        counts = lengths.read_histogram(self.histogram)
        return workloads.sample(counts, count, seed=self.seed, longest=self.max_length)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Keep:
    """Where a measurement goes besides the screen."""

    plot: Annotated[Path | None, _flag("--plot", help="Draw it: png, svg, pdf.")] = None
    note: Annotated[
        Path | None, _flag("--note", help="A dated note in Markdown: machine, command, table.")
    ] = None
    json: Annotated[bool, _flag("--json", help="One line of JSON at the end.")] = False

    def check(self) -> None:
        """Before the long part."""
        from packhorse.bench import plots, report

        plots.check(self.plot)
        report.check_writable(self.note)


@app.command
def encode(
    *,
    model: Annotated[
        str, _flag("--model", "-m", help="A folder or a hub id; default all-MiniLM-L6-v2.")
    ] = DEFAULT_MODEL,
    config: Annotated[
        Literal["tiny", "minilm", "base", "large"] | None,
        _flag("--config", help="Random weights of this geometry, in place of a model."),
    ] = None,
    dtype: Annotated[str, _flag("--dtype", help="fp32, bf16, fp16; several with commas.")] = "fp32",
    device: Annotated[str | None, _flag("--device", help="cpu, cuda …")] = None,
    count: Annotated[int, _flag("--count", help="Sequences.")] = 256,
    repeats: Annotated[int, _flag("--repeats", help="Timed rounds, all engines in each.")] = 3,
    batch_size: Annotated[int, _flag("--batch-size", "-bs", help="Of the peers.")] = 16,
    budget: Annotated[int | None, _flag("--budget", help="Tokens a batch of ours.")] = None,
    peers: Annotated[
        str | None, _flag("--peers", help="Names with commas, or none; default the installed.")
    ] = None,
    graphs: Annotated[bool, _flag("--graphs", help="Ours compiled as well.")] = False,
    compile_peers: Annotated[
        bool, _flag("--compile-peers", help="transformers under torch.compile as well.")
    ] = False,
    int8: Annotated[bool, _flag("--int8", help="Peers in int8 as well.")] = False,
    load: Load = Load(),  # noqa: B008
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Encode the same token ids with Packhorse and with every peer that is installed.

    Peers: transformers, sentence-transformers, onnxruntime, openvino and
    ctranslate2, each in the order of arrival and sorted by length. Speeds are
    those of the best round, cosines those to our vectors in fp32; "x hf" is how
    many times faster than transformers in the same number format.

    Try:
      packhorse bench encode --dtype fp32,bf16 --note note.md
      packhorse bench encode --config large --dtype bf16 --compile-peers
    """
    from packhorse.bench import encode as bench
    from packhorse.bench import plots, report
    from packhorse.device import choose_device

    keep.check()
    lengths = load.lengths(count)
    request = bench.Request(
        lengths=lengths,
        model=model,
        config=config,
        dtypes=_names(dtype),
        device=device,
        peers=None if peers is None else tuple(n for n in _names(peers) if n != "none"),
        batch_size=batch_size,
        budget=budget,
        repeats=repeats,
        graphs=graphs,
        compile_peers=compile_peers,
        int8=int8,
        seed=load.seed,
    )
    with progress("opening and timing the engines") as advance:
        rows = bench.measure(request, advance)
    about = {
        "model": f"random weights, {config}" if config else model,
        "workload": f"{load.name}: {len(lengths):,} sequences of {lengths.mean():.1f} tokens "
        f"({lengths.min()} to {lengths.max()}), seed {load.seed}",
        "batches": f"ours {budget or _budget(device):,} tokens, the peers' {batch_size} sequences; "
        f"best of {repeats} rounds",
        **report.machine(choose_device(device)),
    }
    _show("Encoding", about, report.encode_table(rows), report.problems(rows), keep)
    if keep.plot:
        plots.draw_encode(keep.plot, rows, f"{about['model']}, {load.name}, {about['device']}")
    emit({**about, "rows": [asdict(row) for row in rows]}, keep.json)


def _budget(device: str | None) -> int:
    from packhorse.device import choose_device
    from packhorse.runtime.encoder import TOKENS_A_BATCH

    return TOKENS_A_BATCH.get(choose_device(device).type, 16384)


@app.command
def packing(
    *,
    capacity: Annotated[int | None, _flag("--capacity", help="Tokens a pack; default longest.")] = (
        None
    ),
    depths: Annotated[
        str, _flag("--depths", help="Sequences a pack at most, with commas; 0 is unlimited.")
    ] = "2,3,4,8,16,0",
    algorithms: Annotated[
        str, _flag("--algorithms", help="With commas: optimum, spfhp, lpfhp, nnlshp.")
    ] = "optimum,spfhp,lpfhp,nnlshp",
    count: Annotated[int, _flag("--count", help="Sequences drawn from a mix.")] = 1_000_000,
    load: Load = Load(),  # noqa: B008
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Plan the same lengths with every algorithm at several depths.

    A histogram given by file is packed whole; of a mix, --count lengths are
    drawn. The gap is that to the best lower bound proved at the same depth.

    Try:
      packhorse bench packing --workload wikipedia --plot depths.svg
      packhorse bench packing --histogram lengths.json:squad-384 --depths 2,3
    """
    from packhorse.bench import lengths as files
    from packhorse.bench import packing as bench
    from packhorse.bench import plots, report
    from packhorse.packing.histogram import histogram_of

    keep.check()
    counts = (
        histogram_of(load.lengths(count))
        if load.histogram is None
        else files.read_histogram(load.histogram)
    )
    room = len(counts) if capacity is None else capacity
    limits = [_depth(text) for text in _names(depths)]
    with progress("planning") as advance:
        rows = bench.compare(counts, room, _names(algorithms), limits, advance)
    about = {
        "workload": f"{load.name}: {int(counts.sum()):,} sequences, rows of {room} tokens",
        **report.machine(),
    }
    _show("Packing", about, report.packing_table(rows), report.problems(rows), keep)
    if keep.plot:
        plots.draw_packing(keep.plot, rows)
    emit({**about, "capacity": room, "rows": [asdict(row) for row in rows]}, keep.json)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _depth(text: str) -> int | None:
    if not text.isdecimal():
        raise InputError(f"--depths: {text!r} is not a number of sequences")
    return int(text) or None


def _show(
    what: str, about: dict[str, Any], shown: "Table", problems: Sequence[str], keep: Keep
) -> None:
    """On the screen and, if wanted, as a note."""
    from packhorse.bench import report

    table(f"{what}, {about['workload']}", shown.columns, shown.rows)
    for problem in problems:
        note(problem)
    for kept in filter(None, (keep.plot, keep.note)):
        note(f"written: {kept}")
    if keep.note:
        command = shlex.join(["packhorse", *sys.argv[1:]])
        title = f"{what}, {about['date']}"
        facts = {name: str(value) for name, value in about.items()}
        report.write_note(keep.note, title, command, facts, shown, problems)
