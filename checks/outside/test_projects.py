"""Public projects for PopTorch, unchanged, from a copy of their folder, on small random data.

PACKHORSE_IPU_EXAMPLES names a clone of graphcore/examples. Each project of `projects/projects.toml`
is run as a user runs it, `packhorse port SCRIPT`, and must print what it prints when it trains, or
end with the error that it is listed with. When all have run, `docs/port-projects.md` is written.
Packages that a project needs may lie on PYTHONPATH; without one of them its test is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packhorse_port.check import examine_project, together
from packhorse_port.names import CUSTOM_OPS
from packhorse_port.project import Project

HERE = Path(__file__).parent / "projects"
TABLE = Path(__file__).parents[2] / "docs" / "port-projects.md"
VARIABLE = "PACKHORSE_IPU_EXAMPLES"
HEAD = f"""# Public projects

Projects of graphcore/examples for PopTorch, run unchanged by `packhorse port` on small random data.
Written by `make test-outside ARGS=checks/outside/test_projects.py` with `{VARIABLE}`
set to a clone; what each is called with is in `checks/outside/projects/projects.toml`. Those for
TensorFlow are in [Scripts for TensorFlow on IPUs](port-tensorflow.md).

"""


class PublicProject(NamedTuple):
    """A script of a repository, how it is called, and what it prints."""

    name: str
    folder: str
    script: str
    says: str = ""
    times: int = 1
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    error: str = ""
    reason: str = ""


class Outcome(NamedTuple):
    """How many lines run unchanged by `--check`, and what the run printed."""

    lines: int
    share: float
    printed: list[str]


def listed() -> list[PublicProject]:
    rows: list[dict[str, Any]] = tomllib.loads((HERE / "projects.toml").read_text("utf-8"))[
        "project"
    ]
    tuples = ("arguments", "packages", "data")
    for row in rows:
        row.update({key: tuple(row[key]) for key in tuples if key in row})
    return [PublicProject(**row) for row in rows]


PROJECTS = listed()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[PublicProject, Outcome]]:
    outcomes: dict[PublicProject, Outcome] = {}
    yield outcomes
    if outcomes.keys() == set(PROJECTS):
        TABLE.write_text(document(outcomes), "utf-8")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("public", PROJECTS, ids=lambda public: public.name.replace(" ", "-"))
def test_a_public_project(
    public: PublicProject,
    outcomes: dict[PublicProject, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no folder: clone graphcore/examples")
    for package in public.packages:
        if not importlib.util.find_spec(package):
            pytest.skip(f"pip install {package}")
    work = tmp_path / "work"
    shutil.copytree(Path(os.environ[VARIABLE]) / public.folder, work)
    make_data(public, work, tmp_path / "home")
    monkeypatch.setenv(CUSTOM_OPS, str(HERE / "stand_ins.py"))
    report = together(examine_project(Project.of(work / public.script)).values())
    completed = run(public, work, tmp_path / "home")
    printed = completed.stdout + completed.stderr
    outcomes[public] = Outcome(report.lines, report.share, [])
    if public.error:
        assert completed.returncode and public.error in printed, printed[-4000:]
        return
    assert completed.returncode == 0, printed[-4000:]
    printed_values = [match[1] for match in re.finditer(public.says, printed) if match[1].strip()]
    assert len(printed_values) >= public.times, printed[-4000:]
    outcomes[public].printed.extend(printed_values)


def make_data(public: PublicProject, work: Path, home: Path) -> None:
    """The data that a project asks for, by a Python of its own: some of it is made by torch."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import data; from pathlib import Path; "
    code += f"home = Path({str(home)!r}); work = Path({str(work)!r}); data.images(home); "
    code += "; ".join(
        f"data.{name}({'work' if name == 'squad' else 'home'})" for name in public.data
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def run(public: PublicProject, work: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """The project, as from a shell in its folder."""
    environment = os.environ | {
        "HOME": str(home),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "USE_TF": "0",  # transformers of that time would import it, and it clashes with tfrecord
        "MPLBACKEND": "Agg",
        "WANDB_MODE": "disabled",
    }
    return subprocess.run(
        [sys.executable, "-m", "packhorse", "port", public.script, *public.arguments],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
    )


def document(outcomes: dict[PublicProject, Outcome]) -> str:
    """A row for each project: what `--check` said, and the last of what it printed."""
    lines = [
        "| project | script | lines that run as they are | it printed |",
        "| --- | --- | ---: | --- |",
    ]
    for public, outcome in outcomes.items():
        share = f"{int(1000 * outcome.share) / 10:g} % of {outcome.lines:,}"
        result = f"did not run: {public.reason}"
        if outcome.printed:
            result = outcome.printed[-1].strip().replace("|", "/")[:60]
        if outcome.printed and public.times > 1 and public.says.endswith(r"([\d.]+)"):
            result = "losses " + ", ".join(outcome.printed[:4])
        lines.append(f"| {public.name} | {public.folder}/{public.script} | {share} | {result} |")
    return HEAD + "\n".join(lines) + "\n"
