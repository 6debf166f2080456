"""`packhorse bench port`: a small CNN by PopTorch's interface against the plain PyTorch loop."""

from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from packhorse.cli.console import emit, progress
from packhorse_bench.commands import Keep, flag, show


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class PortFlags:
    """The flags of `port`, under the names of `porting.PortSetup`."""

    batch: Annotated[int, flag("--batch", help="Pictures per step.")] = 16
    iterations: Annotated[int, flag("--iterations", help="Device iterations: steps per call.")] = 50
    steps: Annotated[int, flag("--steps", help="Steps per round.")] = 200
    repeats: Annotated[int, flag("--repeats", help="Timed rounds, all ways in each.")] = 5
    device: Annotated[str | None, flag("--device", help="cpu, cuda …")] = None
    compiled: Annotated[bool, flag("--compiled", help="The port compiled as well.")] = False
    seed: Annotated[int, flag("--seed", help="Of weights, pictures and their order.")] = 0


def port(
    *,
    training: PortFlags = PortFlags(),  # noqa: B008
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Train the course's CNN through packhorse_port and by the plain PyTorch loop.

    SGD with momentum on pictures of Fashion-MNIST's size. The plain loop reads
    a batch, clears, goes forward and back, steps, and asks for the loss; the
    port does many such steps per call, as Python, traced, and with --compiled
    compiled (on CUDA, one graph). Speeds are medians of the rounds; "max
    diff" is of any weight to the plain loop's after one round.

    Try:
      packhorse bench port --note note.md
      packhorse bench port --device cuda --iterations 100 --steps 1000
    """
    from packhorse.device import choose_device
    from packhorse.reports import plots
    from packhorse.reports import tables as report
    from packhorse_bench import porting

    keep.check()
    setup = porting.PortSetup(**asdict(training))
    with progress("timing the ways") as advance:
        rows = porting.measure(setup, advance)
    facts = {
        "workload": f"small CNN, batch {setup.batch}, {setup.iterations} steps per call",
        "rounds": f"{setup.repeats} of {setup.steps} steps",
        **report.machine(choose_device(setup.device)),
    }
    show("Porting", facts, porting.table(rows), report.problems(rows), keep)
    if keep.plot:
        names = [row.way for row in rows]
        speeds = [row.images_per_second for row in rows]
        plots.draw_speeds(keep.plot, names, speeds, facts["workload"], "pictures per second", 0)
    emit({**facts, "rows": [asdict(row) for row in rows]}, keep.json)
