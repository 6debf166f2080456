"""`packhorse bench scaling`: what more cores bring, by threads and by streams."""

from dataclasses import asdict
from typing import Annotated, Literal

from packhorse.cli.console import emit, progress
from packhorse.errors import InputError
from packhorse_bench.commands import Cpu, Keep, LoadFlags, ModelFlags, flag, pretend, split_names
from packhorse_bench.commands import show as show_table


def scaling(
    *,
    subject: ModelFlags = ModelFlags(),  # noqa: B008
    cores: Annotated[
        str | None, flag("--cores", help="With commas; default powers of two, and all.")
    ] = None,
    dtype: Annotated[str, flag("--dtype", help="fp32, bf16.")] = "fp32",
    cpu: Cpu = None,
    order: Annotated[Literal["sorted", "arrival"], flag("--order", help="Of the list.")] = "sorted",
    count: Annotated[int, flag("--count", help="Sequences in the list.")] = 256,
    repeats: Annotated[int, flag("--repeats", help="Timed rounds, all engines in each.")] = 5,
    batch_size: Annotated[int, flag("--batch-size", "-bs", help="Of the peers.")] = 32,
    peers: Annotated[
        str | None, flag("--peers", help="Names with commas, or none; default the installed.")
    ] = None,
    load: LoadFlags = LoadFlags(),  # noqa: B008
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Sequences per second over cores: ours, and each peer in every division.

    A stream is a process on cores of its own with a share of the list. Ours as
    one process ("own") divides its batches between groups of cores by itself;
    "of linear" compares it with independent processes of one thread each. All
    engines encode the same random token ids and take turns.

    Try:
      packhorse bench scaling --plot scaling.svg --note note.md
      packhorse bench scaling --dtype bf16 --cores 1,16 --peers none
    """
    pretend(cpu)
    from packhorse.device import choose_device
    from packhorse.reports import tables as report
    from packhorse.reports.subject import name
    from packhorse_bench import scaling as bench

    keep.check()
    core_counts = split_names(cores or "")
    if not all(number.isdecimal() for number in core_counts):
        raise InputError(f"--cores {cores!r}: pass numbers with commas")
    request = bench.ScalingRequest(
        lengths=load.lengths(count),
        **asdict(subject),
        dtype=dtype,
        cores=tuple(map(int, core_counts)),
        peers=None if peers is None else tuple(n for n in split_names(peers) if n != "none"),
        batch_size=batch_size,
        order=order,
        repeats=repeats,
        seed=load.seed,
    )
    with progress("opening and timing the engines") as advance:
        rows = bench.measure(request, advance)
    facts = {
        "model": name(request),
        "workload": f"random token ids, {load.name}: {count} sequences, {order}, {dtype}",
        "rounds": f"medians of {repeats}",
        **report.machine(choose_device("cpu")),
    }
    show_table("Scaling", facts, bench.table(rows), report.problems(rows), keep)
    if keep.plot:
        bench.draw(keep.plot, rows, f"{facts['model']}, {dtype}")
    emit({**facts, "rows": [asdict(row) for row in rows]}, keep.json)
