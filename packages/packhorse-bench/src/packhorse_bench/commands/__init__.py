"""`packhorse bench`: the tables of this house, side by side, in one run.

Each measurement can be kept as JSON, as a plot, and as a note with the date, the machine and the
command, which is what a claim of speed rests on.
"""

import os
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

    from packhorse.reports.tables import Table

app = App(
    name="bench",
    help="Measure encoders and packers, ours and others, side by side.",
    help_format="plaintext",
)

app.command("packhorse_bench.commands.ablation:ablation", name="ablation")
app.command("packhorse_bench.commands.curves:curves", name="curves")
app.command("packhorse_bench.commands.data:data", name="data")
app.command("packhorse_bench.commands.train:train", name="train")
app.command("packhorse_bench.commands.serve:serve", name="serve")
app.command("packhorse_bench.commands.port:port", name="port")
app.command("packhorse_bench.commands.scaling:scaling", name="scaling")
app.command("packhorse_bench.commands.retrieval:sparse", name="sparse")
app.command("packhorse_bench.commands.retrieval:multi", name="multi")

Mix = Literal["wikipedia", "squad", "normal"]
Level = Literal["avx2", "avx512", "vnni", "bf16", "amx"]


def flag(*names: str, help: str) -> Parameter:
    """A flag; one that is given is meant, so there is no --no-flag."""
    return Parameter(name=names, help=help, negative="")


Cpu = Annotated[
    Level | None,
    flag("--cpu", help="Measure as on a lesser processor; PACKHORSE_CPU is the same."),
]


def pretend(cpu: Level | None) -> None:
    """Limit this process to the instructions of a lesser processor; before torch is imported."""
    from packhorse.processor import VARIABLE, limit

    if cpu is not None:
        os.environ[VARIABLE] = cpu
    limit()


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class LoadFlags:
    """What lengths are measured on: a mix of our own, or a histogram."""

    workload: Annotated[
        Mix | None,
        flag(
            "--workload",
            help="A seeded mix: like Wikipedia, like SQuAD, or N(128,128), which is the default.",
        ),
    ] = None
    histogram: Annotated[
        str | None, flag("--histogram", help="FILE[:NAME] of real lengths, before --workload.")
    ] = None
    max_length: Annotated[
        int | None, flag("--max-length", help="The longest of the mix; default its own.")
    ] = None
    seed: Annotated[int, flag("--seed", help="Of lengths and token ids.")] = 0

    @property
    def name(self) -> str:
        """What it is called in a title."""
        return self.mix if self.histogram is None else Path(self.histogram).name

    @property
    def mix(self) -> Mix:
        """The mix that is meant, if no histogram is."""
        return self.workload or "normal"

    def lengths(self, count: int) -> "np.ndarray":
        """`count` lengths."""
        from packhorse.reports import lengths
        from packhorse_bench import workloads

        if self.histogram is None:
            return workloads.draw(self.mix, count, seed=self.seed, longest=self.max_length)
        counts = lengths.read_histogram(self.histogram)
        return workloads.sample(counts, count, seed=self.seed, longest=self.max_length)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Keep:
    """Where a measurement goes besides the screen."""

    plot: Annotated[Path | None, flag("--plot", help="Draw it: png, svg, pdf.")] = None
    note: Annotated[
        Path | None, flag("--note", help="A dated note in Markdown: machine, command, table.")
    ] = None
    json: Annotated[bool, flag("--json", help="One line of JSON at the end.")] = False

    def check(self) -> None:
        """Before the long part."""
        from packhorse.reports import plots
        from packhorse.reports import tables as report

        plots.check(self.plot)
        report.check_writable(self.note)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The model that is measured."""

    model: Annotated[
        str, flag("--model", "-m", help="A folder, a file or a hub id; default all-MiniLM-L6-v2.")
    ] = DEFAULT_MODEL
    config: Annotated[
        str | None,
        flag(
            "--config",
            help="Random weights of a geometry (tiny, minilm, base, large) in place of a model; or "
            "the model's configuration, a file.",
        ),
    ] = None
    vocab: Annotated[
        str | None, flag("--vocab", help="The model's vocab.txt or tokenizer.json.")
    ] = None
    heads: Annotated[
        int | None, flag("--heads", help="Attention heads, where no configuration says.")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class MoreWays:
    """What is measured besides everyone's default."""

    graphs: Annotated[bool, flag("--graphs", help="Ours compiled as well.")] = False
    invariant: Annotated[
        bool, flag("--invariant", help="Ours with equal bits in every batch as well.")
    ] = False
    compile_peers: Annotated[
        bool, flag("--compile-peers", help="transformers under torch.compile as well.")
    ] = False
    int8: Annotated[bool, flag("--int8", help="Ours and peers in int8 as well.")] = False
    profile: Annotated[
        bool,
        flag(
            "--profile",
            help="On CUDA: also the kernels of a full batch in the last dtype, with time, share, "
            "bytes and bound.",
        ),
    ] = False


@app.command
def encode(
    *,
    subject: ModelFlags = ModelFlags(),  # noqa: B008
    texts: Annotated[
        Path | None,
        flag("--texts", help="txt, jsonl, csv …; default docstrings of the standard library."),
    ] = None,
    tokens: Annotated[
        int | None, flag("--tokens", help="Passages of the texts, of exactly so many tokens each.")
    ] = None,
    dtype: Annotated[
        str, flag("--dtype", help="fp32, bf16, fp16, int8, float8; several with commas.")
    ] = "fp32",
    device: Annotated[str | None, flag("--device", help="cpu, cuda …")] = None,
    cpu: Cpu = None,
    count: Annotated[int, flag("--count", help="Texts or sequences.")] = 256,
    repeats: Annotated[int, flag("--repeats", help="Timed rounds, all engines in each.")] = 5,
    batch_size: Annotated[int, flag("--batch-size", "-bs", help="Of the peers.")] = 32,
    budget: Annotated[int | None, flag("--budget", help="Tokens per batch of ours.")] = None,
    peers: Annotated[
        str | None, flag("--peers", help="Names with commas, or none; default the installed.")
    ] = None,
    more: MoreWays = MoreWays(),  # noqa: B008
    load: LoadFlags = LoadFlags(),  # noqa: B008
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Encode the same texts with Packhorse and with every peer that is installed.

    Peers: transformers, sentence-transformers (through encode, which sorts by
    itself), onnxruntime (fused by its own optimizer), openvino and ctranslate2,
    in the order of arrival and sorted by length. All tokenize inside the clock;
    with --workload or --histogram random token ids of such lengths are encoded
    and tokenizing is left out for all. Speeds are medians of the rounds,
    cosines those to our vectors in fp32; "x hf" is how many times faster than
    transformers in the same number format. With --cpu peers that keep using all
    instructions are marked, and none of them is the best peer.

    Try:
      packhorse bench encode --dtype fp32,bf16 --note note.md
      packhorse bench encode --texts mine.jsonl
      packhorse bench encode --cpu avx2 --workload normal
      packhorse bench encode --device cuda --dtype bf16 --tokens 50 --count 200000
      packhorse bench encode --config large --dtype bf16 --compile-peers --workload squad
      packhorse bench encode --config large --dtype bf16,float8 --graphs --workload squad \\
        --budget 32768 --count 4000 --peers none --profile
    """
    pretend(cpu)
    from packhorse.device import choose_device
    from packhorse.reports import tables as report
    from packhorse.reports.subject import name
    from packhorse_bench import encode as bench
    from packhorse_bench import plots as bench_plots
    from packhorse_bench import tables as bench_tables

    keep.check()
    random_ids = load.workload is not None or load.histogram is not None
    if random_ids and (texts or tokens):
        raise InputError("--texts are encoded, or random ids (--workload, --histogram): pass one")
    if tokens is not None and tokens < 3:
        raise InputError(f"--tokens {tokens}: a text has 3 tokens or more, special ones included")
    request = bench.EncodeRequest(
        **asdict(subject),
        texts=() if random_ids else read_some(texts, None if tokens else count, load.seed),
        tokens=tokens,
        count=count,
        lengths=load.lengths(count) if random_ids else None,
        dtypes=split_names(dtype),
        device=device,
        peers=None if peers is None else tuple(n for n in split_names(peers) if n != "none"),
        batch_size=batch_size,
        budget=budget,
        repeats=repeats,
        **asdict(more),
        seed=load.seed,
    )
    with progress("opening and timing the engines") as advance:
        measured = bench.measure(request, advance)
    facts = {
        "model": name(request),
        "workload": f"{_source(load, texts, random_ids)}: {measured.spread}, seed {load.seed}",
        "tokenizing": "not in the clock" if random_ids else "in the clock, of all engines",
        "batches": f"ours {budget or _budget(device):,} tokens, the peers' {batch_size} sequences; "
        f"medians of {repeats} rounds",
        "ours to the best peer": "; ".join(bench.best_peers(measured.rows)) or "no peer",
        **report.machine(choose_device(device)),
    }
    rows = measured.rows
    show("Encoding", facts, bench_tables.encode_table(rows), report.problems(rows), keep)
    if keep.plot:
        bench_plots.draw_encode(keep.plot, rows, f"{facts['model']}, {facts['device']}")
    document = {**facts, "rows": [asdict(row) for row in rows]}
    if measured.kernels is not None:
        table(*bench_tables.kernel_table(measured.kernels))
        document["kernels"] = asdict(measured.kernels)
    emit(document, keep.json)


def _source(load: LoadFlags, texts: Path | None, random_ids: bool) -> str:
    if random_ids:
        return f"random token ids, {load.name}"
    return "docstrings of the standard library" if texts is None else texts.name


def read_some(path: Path | None, count: int | None, seed: int) -> tuple[str, ...]:
    """`count` texts (None: all) of a file or the standard library's docstrings, drawn by seed."""
    from random import Random

    from packhorse.reports import docstrings

    if count is not None and count < 1:
        raise InputError(f"--count {count} encodes nothing; pass 1 or more")
    texts = [entry.text for entry in docstrings.read()] if path is None else file_texts(path)
    return tuple(Random(seed).sample(texts, min(count or len(texts), len(texts))))


def file_texts(path: str | Path) -> tuple[str, ...]:
    """The texts of a file; of pairs the first."""
    from packhorse.data.tables import read_texts

    texts = (record.text for record in read_texts(str(path), skip_empty=True))
    firsts = tuple(text if isinstance(text, str) else text[0] for text in texts)
    if not firsts:
        raise InputError(f"{path} holds no text")
    return firsts


def _budget(device: str | None) -> int:
    from packhorse.device import choose_device
    from packhorse.runtime.encoder import TOKENS_PER_BATCH

    return TOKENS_PER_BATCH.get(choose_device(device).type, 16384)


@app.command
def packing(
    *,
    capacity: Annotated[int | None, flag("--capacity", help="Tokens a pack; default longest.")] = (
        None
    ),
    depths: Annotated[
        str, flag("--depths", help="Sequences a pack at most, with commas; 0 is unlimited.")
    ] = "2,3,4,8,16,0",
    algorithms: Annotated[
        str, flag("--algorithms", help="With commas: optimum, spfhp, lpfhp, nnlshp.")
    ] = "optimum,spfhp,lpfhp,nnlshp",
    count: Annotated[int, flag("--count", help="Sequences drawn from a mix.")] = 1_000_000,
    effort: Annotated[
        int | None, flag("--effort", help="Linear programs of the optimum at most; default 100.")
    ] = None,
    load: LoadFlags = LoadFlags(),  # noqa: B008
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Plan the same lengths with every algorithm at several depths.

    A histogram given by file is packed whole; of a mix, --count lengths are
    drawn. The gap is that to the best lower bound proved at the same depth.

    Try:
      packhorse bench packing --workload wikipedia --plot depths.svg
      packhorse bench packing --histogram lengths.json:squad-384 --depths 2,3
    """
    from packhorse.packing.histogram import EFFORT, histogram_of
    from packhorse.reports import lengths as files
    from packhorse.reports import packing as bench
    from packhorse.reports import plots
    from packhorse.reports import tables as report

    keep.check()
    effort = EFFORT if effort is None else effort
    counts = (
        histogram_of(load.lengths(count))
        if load.histogram is None
        else files.read_histogram(load.histogram)
    )
    room = len(counts) if capacity is None else capacity
    limits = [_depth(text) for text in split_names(depths)]
    with progress("planning") as advance:
        rows = bench.compare(counts, room, split_names(algorithms), limits, advance, effort)
    facts = {
        "workload": f"{load.name}: {int(counts.sum()):,} sequences, rows of {room} tokens",
        **report.machine(),
    }
    notes = [*report.problems(rows), *bench.unfinished(rows, effort)]
    show("Packing", facts, report.packing_table(rows), notes, keep)
    if keep.plot:
        plots.draw_packing(keep.plot, rows)
    emit({**facts, "capacity": room, "rows": [asdict(row) for row in rows]}, keep.json)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Online:
    """The flags of `modes`, under the names of `modes.ModesSetup`."""

    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        flag("--dtype", help="Of all modes; default fp32 on a CPU, else bf16."),
    ] = None
    device: Annotated[str | None, flag("--device", help="cpu, cuda …")] = None
    rows: Annotated[int, flag("--rows", help="Rows a batch.")] = 16
    capacity: Annotated[int, flag("--capacity", help="Tokens a row, the longest request.")] = 256
    requests: Annotated[int, flag("--requests", help="How many.")] = 1600
    workload: Annotated[
        Mix, flag("--workload", help="Lengths: N(1/2, 1/2) of a row, like SQuAD, like Wikipedia.")
    ] = "normal"
    seed: Annotated[int, flag("--seed", help="Of lengths, token ids and arrivals.")] = 2023
    timeout: Annotated[
        float, flag("--timeout", help="Seconds that a batch may wait to be full.")
    ] = 0.015
    graphs: Annotated[
        bool, flag("--graphs", help="What can be compiled is; on CUDA as graphs.")
    ] = False
    host: Annotated[
        bool, flag("--host", help="No model, zeros at once: what a request costs the host.")
    ] = False
    repeats: Annotated[int, flag("--repeats", help="Timed rounds, all modes in each.")] = 3
    load_repeats: Annotated[
        int, flag("--load-repeats", help="Rounds under load; 0: no latencies.")
    ] = 1
    rate: Annotated[
        float | None,
        flag("--rate", help="Requests a second of the open loop; default 70 % of the mode's own."),
    ] = None


@app.command
def modes(
    *,
    subject: ModelFlags = ModelFlags(),  # noqa: B008
    online: Online = Online(),  # noqa: B008
    peers: Annotated[
        str | None,
        flag("--peers", help="With commas, or none; default transformers, ONNX padded, packed."),
    ] = None,
    csv: Annotated[Path | None, flag("--csv", help="All figures, a line a mode.")] = None,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Padded against packed, offline and online: PopRT's six modes and ours.

    Speeds are medians of the rounds, "x padded" is how many times Original:
    our own model with one request a row. Offline modes are timed without
    packing, "with packing" includes it. Latencies are those of a closed loop
    of 3.5 clients per row, and of random arrivals, from when they were due.

    Try:
      packhorse bench modes --dtype bf16 --plot modes.svg --note note.md
      packhorse bench modes --config large --rows 64 --graphs --peers none
    """
    from packhorse.reports import tables as report
    from packhorse_bench import modes as bench
    from packhorse_bench import plots as bench_plots
    from packhorse_bench import tables as bench_tables

    keep.check()
    report.check_writable(csv)
    others = None if peers is None else tuple(n for n in split_names(peers) if n != "none")
    setup = bench.ModesSetup(**asdict(subject), **asdict(online), peers=others)
    with progress("timing the modes") as advance:
        comparison = bench.measure(setup, advance)
    facts = bench.describe(setup, comparison) | report.machine(comparison.device)
    show(
        "Modes",
        facts,
        bench_tables.modes_table(comparison.rows),
        report.problems(comparison.rows),
        keep,
    )
    if csv:
        report.write_csv(csv, comparison.rows)
        note(f"written: {csv}")
    if keep.plot:
        bench_plots.draw_modes(keep.plot, comparison.rows, f"{facts['model']}, {facts['workload']}")
    emit({**facts, "modes": [asdict(row) for row in comparison.rows]}, keep.json)


@app.command
def load(
    *,
    config: Annotated[
        str, flag("--config", help="Geometry of the checkpoint: tiny, minilm, base, large.")
    ] = "large",
    repeats: Annotated[
        int, flag("--repeats", help="Rounds; the median counts, the best stands beside it.")
    ] = 5,
    folder: Annotated[
        Path | None, flag("--folder", help="Where to write it; default the system's own place.")
    ] = None,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Open a TensorFlow checkpoint: here, with TensorFlow, and as a plain read.

    A checkpoint of random weights is written (1.3 GB for BERT-Large) and read
    in a process of its own each time. The plain read is the floor: the file in
    order, into one buffer, with its checksum.

    Try:
      packhorse bench load
      packhorse bench load --config base --repeats 3 --json
    """
    from packhorse.reports import plots
    from packhorse.reports import tables as report
    from packhorse_bench import loading

    keep.check()
    with progress("opening") as advance:
        comparison = loading.compare(config, repeats, folder, advance)
    size = f"{comparison.bytes:,} bytes in {comparison.tensors} tensors"
    facts = {"workload": f"BERT-{config}, {size}", "rounds": repeats, **report.machine()}
    show(
        "Opening a checkpoint",
        facts,
        loading.table(comparison),
        report.problems(comparison.rows),
        keep,
    )
    if keep.plot:
        rows = [row for row in comparison.rows if row.problem is None]
        speeds = [row.gigabytes_per_second for row in rows]
        names = [row.engine for row in rows]
        plots.draw_speeds(keep.plot, names, speeds, facts["workload"], "gigabytes per second", 1)
    emit(
        {**facts, "bytes": comparison.bytes, "rows": [asdict(row) for row in comparison.rows]},
        keep.json,
    )


def split_names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _depth(text: str) -> int | None:
    if not text.isdecimal():
        raise InputError(f"--depths: {text!r} is not a number of sequences")
    return int(text) or None


def show(
    title: str, facts: dict[str, Any], shown: "Table", problems: Sequence[str], keep: Keep
) -> None:
    """On the screen and, if wanted, as a note."""
    from packhorse.reports import tables as report

    table(f"{title}, {facts['workload']}", shown.columns, shown.rows)
    for problem in problems:
        note(problem)
    for path in filter(None, (keep.plot, keep.note)):
        note(f"written: {path}")
    if keep.note:
        command = shlex.join(["packhorse", *sys.argv[1:]])
        lines = {name: str(value) for name, value in facts.items()}
        report.write_note(keep.note, f"{title}, {facts['date']}", command, lines, shown, problems)
