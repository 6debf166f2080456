"""The files that other services read: workflows run targets that exist, versions agree."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import packhorse

REPOSITORY = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
sys.path.insert(0, str(REPOSITORY / "checks" / "machines"))
from lanes import LANES  # noqa: E402

sys.path.pop(0)


def steps(workflow: Path) -> list[str]:
    """All shell commands of a workflow."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_exist(workflow: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    called = [word for line in steps(workflow) for word in re.findall(r"make ([\w-]+)", line)]
    assert set(called) <= set(targets)


def test_every_lane_of_a_machine_is_run() -> None:
    ci = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    assert ci["jobs"]["machines"]["strategy"]["matrix"]["lane"] == list(LANES)


def test_every_python_is_tested() -> None:
    ci = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    tested = ci["jobs"]["test"]["strategy"]["matrix"]["python"]
    for file in (REPOSITORY / "packages").glob("*/pyproject.toml"):
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        prefix = "Programming Language :: Python :: "
        named = [word.removeprefix(prefix) for word in project["classifiers"] if prefix in word]
        assert named == tested
        beyond = f"3.{int(tested[-1].partition('.')[2]) + 1}"
        assert project["requires-python"] == f">={tested[0]},<{beyond}"
    bounds = re.findall(r"\(3, (\d+)\)", (REPOSITORY / "Makefile").read_text())
    assert bounds == [word.partition(".")[2] for word in (tested[0], tested[-1])]


def test_the_release_reads_the_version_where_it_is() -> None:
    (release,) = (path for path in WORKFLOWS if path.stem == "release")
    place = re.search(r"packages/\S+__init__\.py", release.read_text())
    assert place is not None
    text = (REPOSITORY / place[0]).read_text()
    assert f'__version__ = "{packhorse.__version__}"' in text


def test_the_citation_has_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert str(citation["version"]) == packhorse.__version__


def test_pre_commit_uses_the_ruff_of_the_constraints() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    (revision,) = (hook["rev"] for hook in hooks if "ruff" in hook["repo"])
    assert f"ruff=={revision.removeprefix('v')}\n" in (REPOSITORY / "constraints.txt").read_text()
