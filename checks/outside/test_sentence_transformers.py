"""sentence-transformers' own public tests with our classes, and with its own classes accelerated.

PACKHORSE_SENTENCE_TRANSFORMERS_TESTS names the folder `tests` of a clone of
huggingface/sentence-transformers, of the release that is installed or near it. Tiny models under
the names that the tests use come from a hub on this machine. Each file is run three times by a
pytest of its own: with the library as it is, with `packhorse.SentenceTransformer` and the like in
place of its classes, and with each of its models accelerated as it is made. What passes with the
library must pass with accelerated models; with our classes, what fails must be listed in
`sentence_transformers_tests/differences.toml` with its reason, and what is listed must fail. When
all files have run, `docs/sentence-transformers-tests.md` is written anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent / "sentence_transformers_tests"
TABLE = Path(__file__).parents[2] / "docs" / "sentence-transformers-tests.md"
VARIABLE = "PACKHORSE_SENTENCE_TRANSFORMERS_TESTS"
SLOW = "PACKHORSE_SENTENCE_TRANSFORMERS_SLOW"  # set: pools of processes too
FILES = (
    "sentence_transformer/test_model.py",
    "sentence_transformer/test_compute_embeddings.py",
    "cross_encoder/test_model.py",
    "sparse_encoder/test_model.py",
)
# Pools of processes, which take half an hour; the library's own run leaves them out as well.
SLOW_FILES = (
    "sentence_transformer/test_multi_process.py",
    "cross_encoder/test_multi_process.py",
    "sparse_encoder/test_multi_process.py",
)
CLASSES = ("theirs", "ours", "accelerated")
KINDS = {
    "training": "begins a training",
    "modules": "composes the library's modules",
    "inside": "reads the library's inside",
    "wording": "checks the words of a message",
    "open": "not provided",
}
LIBRARY = f"sentence-transformers {version('sentence-transformers')}"
UNCOUNTED = ("training",)


@dataclass
class Result:
    """What became of the tests of one file."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Difference:
    """Tests of a file that fail with our classes, and why."""

    file: str
    kind: str
    reason: str
    tests: tuple[str, ...]

    def covers(self, test: str) -> bool:
        return test.partition("[")[0] in self.tests


def differences(file: str) -> list[Difference]:
    listed = tomllib.loads((HERE / "differences.toml").read_text("utf-8"))["difference"]
    rows = [Difference(tests=tuple(row.pop("tests")), **row) for row in listed]
    return [row for row in rows if row.file == file]


@pytest.fixture(scope="module")
def folder() -> Path:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} names no folder: clone huggingface/sentence-transformers")
    return Path(path).resolve()


@pytest.fixture(scope="module")
def hub(
    folder: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The environment of a pytest whose hub is here."""
    sys.path.insert(0, str(HERE))
    from local_hub import LocalHub

    root = tmp_path_factory.mktemp("hub")
    # In a process of its own, which leaves nothing of the library behind in this one.
    command = [sys.executable, str(HERE / "local_models.py"), str(root), str(minilm)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    server = LocalHub(root)
    yield os.environ | {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(folder.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    server.close()
    shutil.rmtree(root)
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Result]]]:
    results: dict[str, dict[str, Result]] = {}
    yield results
    if results.keys() >= set(FILES):
        TABLE.write_text(document(results), "utf-8")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES + SLOW_FILES)
def test_what_fails_is_listed_with_its_reason(
    name: str,
    folder: Path,
    hub: dict[str, str],
    results: dict[str, dict[str, Result]],
    tmp_path: Path,
) -> None:
    if name in SLOW_FILES and not os.environ.get(SLOW):
        pytest.skip(f"{SLOW} is not set")
    found = {classes: run(folder / name, classes, hub, tmp_path) for classes in CLASSES}
    results[name] = found
    expected = found["theirs"].passed
    assert expected
    assert not expected - found["accelerated"].passed, "these passed before they were accelerated"
    failed = expected - found["ours"].passed
    listed = differences(name)
    unlisted = {test for test in failed if not any(row.covers(test) for row in listed)}
    assert not unlisted, sorted(unlisted)
    failed_functions = {test.partition("[")[0] for test in failed}
    unused = [test for row in listed for test in row.tests if test not in failed_functions]
    assert not unused, f"these pass, or are no more: {unused}"


def run(file: Path, classes: str, environment: dict[str, str], folder: Path) -> Result:
    """One file, by a pytest of its own."""
    report = folder / f"{classes}.xml"
    plugins = ["-p", "our_classes", "-p", "no:cacheprovider"]
    options = ["-c", os.devnull, "-W", "ignore", "-q", "--rootdir", str(file.parents[1])]
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, f"--junitxml={report}", str(file)],
        cwd=folder,
        env=environment | {"PACKHORSE_SBERT_CLASSES": classes},
        capture_output=True,
        text=True,
    )
    assert report.exists(), completed.stdout + completed.stderr
    result = Result()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        chosen = result.failed if kinds & {"failure", "error"} else result.passed
        chosen = result.skipped if "skipped" in kinds else chosen
        chosen.add(case.get("name", ""))
    return result


def document(results: dict[str, dict[str, Result]]) -> str:
    """The table, and under it every reason."""
    titles = ["file", "tests", "with our classes", "rate", *KINDS.values(), "accelerated"]
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1)]
    totals = [0] * (len(KINDS) + 3)
    for name, found in results.items():
        row = counts(name, found)
        lines.append(line(name, row))
        totals = [total + count for total, count in zip(totals, row, strict=True)]
    lines.append(line("all", totals))
    text = f"""# sentence-transformers' own tests

What of its public tests (github.com/huggingface/sentence-transformers, `tests/`) holds for
`packhorse.SentenceTransformer`, `packhorse.CrossEncoder` and `packhorse.SparseEncoder`, and for its
own classes after `packhorse.accelerate`. Written by `make test-outside` with
`{VARIABLE}` set to that folder, beside {LIBRARY}; the
tests are run from where they are, none is copied, over tiny models of
our own under the names that they use. Only tests that pass with the library itself there are
counted: the others need a GPU or real weights. Those that begin a training, with a head of random
weights, are not part of the rate. The reasons are in
`checks/outside/sentence_transformers_tests/differences.toml`, by test.

"""
    text += "\n".join(lines) + "\n"
    for kind, title in KINDS.items():
        text += f"\n## {title[0].upper()}{title[1:]}\n\n"
        for name, found in results.items():
            failed = found["theirs"].passed - found["ours"].passed
            for row in differences(name):
                count = sum(row.covers(test) for test in failed)
                if row.kind == kind and count:
                    text += f"- {name}, {count}: {row.reason}\n"
    return text


def counts(name: str, found: dict[str, Result]) -> list[int]:
    """Tests, those that pass with our classes, that fail by kind, that pass accelerated."""
    expected = found["theirs"].passed
    failed = expected - found["ours"].passed
    listed = differences(name)
    by_kind = [
        sum(any(row.kind == kind and row.covers(test) for row in listed) for test in failed)
        for kind in KINDS
    ]
    return [
        len(expected),
        len(expected & found["ours"].passed),
        *by_kind,
        len(expected & found["accelerated"].passed),
    ]


def line(name: str, row: list[int]) -> str:
    tests, passed, *by_kind, accelerated = row
    uncounted = sum(n for kind, n in zip(KINDS, by_kind, strict=True) if kind in UNCOUNTED)
    rate = f"{passed / (tests - uncounted):.1%}"
    return "| " + " | ".join(map(str, [name, tests, passed, rate, *by_kind, accelerated])) + " |"
