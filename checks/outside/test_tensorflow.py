"""Public scripts for TensorFlow on IPUs, unchanged, run from where they are.

PACKHORSE_IPU_EXAMPLES names a clone of graphcore/examples, PACKHORSE_IPU_TENSORFLOW one of
graphcore/tensorflow (its documentation's programs). Each script of `tensorflow/scripts.toml` is run
by `tensorflow/run_script.py` on small random data, with the import hooks of `packhorse port`. A
script that is listed with an error must end with it. When all have run, the table in
`docs/port-tensorflow.md` is written anew.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from packhorse_port import script
from packhorse_port.check import CheckReport, examine

HERE = Path(__file__).parent / "tensorflow"
TABLE = Path(__file__).parents[2] / "docs" / "port-tensorflow.md"
MARKER = "<!-- written by checks/outside/test_tensorflow.py -->\n"
VARIABLES = {
    "examples": "PACKHORSE_IPU_EXAMPLES",
    "tensorflow": "PACKHORSE_IPU_TENSORFLOW",
}


class PublicScript(NamedTuple):
    """A script of a repository, and what it ends with if it does not run."""

    repository: str
    path: str
    arguments: tuple[str, ...]
    error: str
    reason: str


class Outcome(NamedTuple):
    """What `--check` said of a script, and how it ended."""

    report: CheckReport
    runs: bool


def listed() -> list[PublicScript]:
    groups = tomllib.loads((HERE / "scripts.toml").read_text("utf-8"))["script"]
    return [
        PublicScript(
            group["repository"],
            f"{group['folder']}/{name}".lstrip("/"),
            tuple(group.get("arguments", ())),
            group.get("error", ""),
            group.get("reason", ""),
        )
        for group in groups
        for name in group["names"]
    ]


SCRIPTS = listed()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[PublicScript, Outcome]]:
    outcomes: dict[PublicScript, Outcome] = {}
    yield outcomes
    if outcomes.keys() == set(SCRIPTS):
        text = TABLE.read_text("utf-8").partition(MARKER)[0]
        TABLE.write_text(text + MARKER + document(outcomes), "utf-8")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A working folder for the scripts of each folder, so that one finds what another saved."""

    @functools.cache
    def folder(parent: Path) -> Path:
        return tmp_path_factory.mktemp(parent.name)

    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("public", SCRIPTS, ids=lambda public: Path(public.path).stem)
def test_a_public_script(
    public: PublicScript,
    outcomes: dict[PublicScript, Outcome],
    work: Callable[[Path], Path],
) -> None:
    variable = VARIABLES[public.repository]
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no folder: clone graphcore/{public.repository}")
    path = Path(os.environ[variable]).resolve() / public.path
    completed = run(path, public.arguments, work(path.parent))
    outcomes[public] = Outcome(examine(path.read_bytes(), path), completed.returncode == 0)
    if public.error:
        assert completed.returncode and public.error in completed.stderr
    else:
        assert completed.returncode == 0, completed.stderr[-3000:]


def run(path: Path, arguments: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """The script by a Python of its own, in a folder."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [script.STARTUP_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return subprocess.run(
        [sys.executable, str(HERE / "run_script.py"), str(path), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def document(outcomes: dict[PublicScript, Outcome]) -> str:
    """How many run, how many `--check` was right about, and a row for each script."""
    ran = sum(outcome.runs for outcome in outcomes.values())
    agree = sum(
        outcome.runs != bool(outcome.report.count("fails")) for outcome in outcomes.values()
    )
    lines = [
        f"{ran} of {len(outcomes)} scripts run; `--check` was right about {agree}.",
        "",
        "| script | `--check` | what happened |",
        "| --- | --- | --- |",
    ]
    for public, outcome in outcomes.items():
        report = outcome.report
        fails = {finding.name for finding in report.findings if finding.kind == "fails"}
        said = f"fails: {', '.join(sorted(fails))}" if fails else "runs"
        said += f" ({report.count('emulated')} emulated, {report.count('ignored')} ignored)"
        happened = "ran" if outcome.runs else f"did not run: {public.reason}"
        lines.append(f"| {public.repository}: {public.path} | {said} | {happened} |")
    return "\n".join(lines) + "\n"
