"""PopTorch's own public tests against the port, run from where they are.

PACKHORSE_POPTORCH_TESTS names the folder `tests` of a clone of graphcore/poptorch. Each of its
files is run by a pytest of its own under the import hooks of `packhorse port`, with the few
stand-ins of `poptorch/standins.py`. A test that fails must be listed in
`poptorch/differences.toml` with its reason, and one that is listed must fail. When all files have
run, `docs/port-conformance.md` is written anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

from packhorse_port import script
from packhorse_port.names import CUSTOM_OPS

HERE = Path(__file__).parent / "poptorch"
TABLE = Path(__file__).parents[2] / "docs" / "port-conformance.md"
VARIABLE = "PACKHORSE_POPTORCH_TESTS"
FOLDER = Path(os.environ.get(VARIABLE, os.devnull)).resolve()
FILES = sorted(path.stem.removesuffix("_test") for path in FOLDER.glob("*_test.py"))
# What fails can hold here, or not; only what can is counted in the share that passes.
POSSIBLE = {
    "open": "not provided",
    "refused": "PopTorch refuses, works here",
    "torch": "torch has changed",
}
IMPOSSIBLE = {
    "ipu": "needs an IPU",
    "private": "reads PopTorch's inside",
    "package": "needs a package or model that is not installed",
}
KINDS = POSSIBLE | IMPOSSIBLE
NEEDED = {"torch_nn": "expecttest"}  # by torch's own tests of its layers, which this file runs
# Their refusal leaves broken queues of torch's workers behind, on which later tests would fail.
NOT_RUN = {"dataloader": "test_custom_batch_sampler and device_iteration:5"}
HEAD = f"""# PopTorch's own tests

What of PopTorch's public tests (github.com/graphcore/poptorch, `tests/`) holds for
`packhorse port`. Written by `make test-outside ARGS=checks/outside/test_poptorch.py` with
`{VARIABLE}` set to that folder; the tests are run from where they are, none is
copied. The reasons are in `checks/outside/poptorch/differences.toml`, by test.

"""


@dataclass
class Result:
    """What became of the tests of one file."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Difference:
    """Tests of a file that fail, and why."""

    file: str
    kind: str
    reason: str
    tests: tuple[str, ...]

    def covers(self, test: str) -> bool:
        return any(_matches(pattern, test) for pattern in self.tests)


def _matches(pattern: str, test: str) -> bool:
    """A pattern is a test's id, its function's name, or the beginning of an id with a star."""
    if pattern.endswith("*"):
        return test.startswith(pattern[:-1])
    return pattern in (test, test.partition("[")[0])


def differences() -> list[Difference]:
    listed = tomllib.loads((HERE / "differences.toml").read_text("utf-8"))["difference"]
    return [Difference(tests=tuple(row.pop("tests")), **row) for row in listed]


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Result]]:
    results: dict[str, Result] = {}
    yield results
    if results.keys() == set(FILES):
        TABLE.write_text(document(results), "utf-8")


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FILES, reason=f"{VARIABLE} names no folder: clone graphcore/poptorch")
@pytest.mark.parametrize("name", FILES)
def test_what_fails_is_listed_with_its_reason(
    name: str, results: dict[str, Result], tmp_path: Path
) -> None:
    if needed := NEEDED.get(name):
        pytest.importorskip(needed, reason=f"pip install {needed}")
    result = results[name] = run(FOLDER / f"{name}_test.py", tmp_path)
    listed = [difference for difference in differences() if difference.file == name]
    known = {
        test for test in result.failed if any(difference.covers(test) for difference in listed)
    }
    assert result.passed or result.skipped or known
    assert result.failed <= known, sorted(result.failed - known)
    unused = [
        pattern
        for difference in listed
        for pattern in difference.tests
        if not any(_matches(pattern, test) for test in result.failed)
    ]
    assert not unused, f"these pass, or are no more: {unused}"


def run(file: Path, folder: Path) -> Result:
    """One file, by a pytest of its own."""
    report = folder / "report.xml"
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(
            [script.STARTUP_FOLDER, str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # as torch 2.0 loads
        CUSTOM_OPS: str(HERE / "custom_operations.py"),
        "PYTEST_ADDOPTS": f"-p standins -p no:cacheprovider -c {os.devnull}",  # some start another
    }
    environment.pop(script.RUN_VARIABLE, None)
    words = ["--rootdir", str(file.parent), f"--junitxml={report}", "-q", str(file)]
    if expression := NOT_RUN.get(file.stem.removesuffix("_test")):
        words += ["-k", f"not ({expression})"]
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert report.exists(), completed.stdout + completed.stderr
    return read(report)


def read(report: Path) -> Result:
    """The results in pytest's report."""
    result = Result()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        chosen = result.failed if kinds & {"failure", "error"} else result.passed
        chosen = result.skipped if "skipped" in kinds else chosen
        owner = case.get("classname", "").rpartition(".")[2]
        prefix = f"{owner}::" if owner.startswith("Test") else ""
        chosen.add(prefix + case.get("name", ""))
    return result


def document(results: dict[str, Result]) -> str:
    """The table, and under it every reason."""
    listed = differences()
    rows: list[list[object]] = []
    for name, result in sorted(results.items()):
        counts = [count(name, kind, result, listed) for kind in KINDS]
        unlisted = len(result.failed) - sum(counts)
        rows.append([f"{name}_test.py", len(result.passed), unlisted, *counts, len(result.skipped)])
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    passed, possible = totals[0], sum(totals[: 2 + len(POSSIBLE)])
    head = ["file", "passed", "failed", *KINDS.values(), "skipped by PopTorch (hardware)"]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows, ["all", *totals])]
    lines.insert(1, "| --- |" + " ---: |" * (len(head) - 1))
    text = HEAD + (
        f"Of {possible:,} tests that need no IPU, nothing of PopTorch's inside and no package that"
        f" is missing, {passed:,} pass: {passed / possible:.1%}.\n\n"
    )
    text += "\n".join(lines) + "\n"
    for name, expression in NOT_RUN.items():
        text += (
            f"\nNot run: `{expression}` of {name}_test.py, batches of several sizes in one call,"
            " which a collate_fn pads; they are refused here.\n"
        )
    for kind, title in KINDS.items():
        text += f"\n## {title[0].upper()}{title[1:]}\n\n"
        for difference in sorted(listed, key=lambda difference: difference.file):
            if difference.kind == kind and difference.file in results:
                failed = sum(difference.covers(test) for test in results[difference.file].failed)
                text += f"- {difference.file}_test.py, {failed}: {difference.reason}\n"
    return text


def count(name: str, kind: str, result: Result, listed: list[Difference]) -> int:
    chosen = [
        difference for difference in listed if difference.file == name and difference.kind == kind
    ]
    return sum(any(difference.covers(test) for difference in chosen) for test in result.failed)
