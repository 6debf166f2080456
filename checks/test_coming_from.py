"""Every new line of docs/coming-from.md runs, in its order, over small stand-ins of what it names.

Lines run in this process, in a folder of their own for each system one may come from. Those that
need TensorFlow, a compiler or several processes are slow ones. What the document marks with † gets
settings that make it small (`SMALL`).
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from packhorse.cli import COMMANDS, PLUGINS, main

from . import stand_ins

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = (REPOSITORY / "docs" / "coming-from.md").read_text("utf-8")
SUBMISSION = (
    "--layers 2 --hidden-size 32 --heads 2 --runs 1 --batch 8 --max-sequences 32 "
    "--eval-every-sequences 16 --next-sentence --measure nsp_accuracy --target 0.001"
)
# What a marked line begins with, and what is added to it.
SMALL = {
    "data build enwiki": "--eval-count 6 --max-length 64",
    "submit --pod=16": f"{SUBMISSION} --out results16",
    "submit --pod=64": f"{SUBMISSION} --out results64",
    "train --config=./configs/mk2": "--steps 2",
    "bench modes": "--rows 2 --capacity 32 --requests 12 --repeats 1 --peers none",
    "monitor --watch": "",
    "train --config sst2": "",
    "train --config mrpc": "",
    "train --config squad": "--max-length 48 --stride 8",
    "train --config mini": "--max-sequences 16",
    "serve --model": "",
    "serve": "--print-config",
}
# Parts of lines that take long: a compiler, TensorFlow, several processes.
SLOW = ("--use_graphs", "pytest ", "frozen.pb", "--nproc", "--pod=64", "serve --model", "curl ")
SLOW += ("port completed", "port mnist", "port fashion")


@dataclass(frozen=True)
class Line:
    """One line of the column *now*."""

    system: str
    text: str
    marked: bool  # †

    @property
    def slow(self) -> bool:
        return any(part in self.text for part in SLOW)

    @property
    def words(self) -> list[str]:
        """As a shell would divide it, with what makes it small."""
        # What is small breaks the rules of the closed division, which are checked first.
        words = shlex.split(self.text.replace("division=closed", "division=open"))
        return [path for word in words for path in sorted(glob.glob(word)) or [word]] + self._more()

    def _more(self) -> list[str]:
        command = self.text.partition("packhorse ")[2]
        more = [more for part, more in SMALL.items() if command.startswith(part)]
        assert bool(more) == self.marked, f"{self.text}: a line that is made small is marked with †"
        workers = "--workers 1" if re.match("data (build|import)", command) else ""
        return shlex.split(f"{more[0] if more else ''} {workers}")


def read(document: str) -> list[Line]:
    """The lines of all tables, each with the system that its row or its heading names."""
    lines, heading, system = [], "", ""
    for row in document.splitlines():
        if row.startswith("## "):
            heading = system = row.removeprefix("## From ").strip()
        if not row.startswith("|") or re.match(r"\|[-|]+$", row) or "| now |" in row:
            continue
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if heading.startswith("the five"):
            system = cells.pop(0) or system
        _, now, _ = cells
        for text in re.findall(r"`([^`]+)`", now):
            lines.append(Line(system, text, "†" in now))
    return lines


LINES = read(DOCUMENT)
SYSTEMS = list(dict.fromkeys(line.system for line in LINES))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models under the names that the document uses."""
    home = tmp_path_factory.mktemp("models")
    stand_ins.write_models(home)
    return home


@pytest.fixture
def home(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lines of one system are run."""
    shutil.copytree(models, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "100")
    stand_ins.write_texts(Path.cwd())
    stand_ins.write_tasks(Path.cwd())
    return Path.cwd()


def prepare_mlperf() -> None:
    """TFRecords as their scripts left them, a preset of theirs, and the folder that it names."""
    import numpy as np

    files, rng = stand_ins.load_test_module("data/record_files.py"), np.random.default_rng(0)
    rows = [files.draw(rng, 64, 20) for _ in range(12)]
    Path("tf_examples").mkdir()
    records = (files.example(files.unpacked(row, 64, 9)) for row in rows)
    files.write(Path("tf_examples/part-00000"), records)
    preset = {
        "num_layers": 2,
        "hidden_size": 32,
        "attention_heads": 2,
        "tf_checkpoint": "tf-checkpoints/bs64k_32k_ckpt/model.ckpt-28252",
        "input_files": ["data/prepared/train"],
        "batch_size": 2,
        "optimizer": "LAMB",
        "layers_per_ipu": [2],
    }
    Path("configs/mk2").mkdir(parents=True)
    Path("configs/mk2/pod16-closed.json").write_text(json.dumps(preset))


def prepare_names(names: dict[str, Any]) -> None:
    """What lines of Python find there already."""
    import packhorse

    names |= {
        "packhorse": packhorse,
        "name": "sentence-transformers/all-MiniLM-L6-v2",
        "texts": ["the good horse", "a mule"],
        "query": "who carries",
        "documents": ["the horse", "the market"],
        "question": "who carries sacks",
        "context": "The good horse carries sacks to market.",
    }


def prepare_course() -> None:
    for name in ("mnist_poptorch.py", "fashion-mnist-pytorch-ipu-todo.py"):
        Path(name).write_text(stand_ins.POPTORCH)
    for name in ("completed_demo_ipu.py", "mnist-ipu-todo.py"):
        Path(name).write_text(stand_ins.KERAS)


def prepare_tensorflow(tf: ModuleType) -> None:
    """A checkpoint with the graph that wrote it, whose last node is called add_1."""
    bert = stand_ins.load_test_module("checkpoint/tensorflow_bert.py")
    built = bert.build(tf, json.loads(Path("bert_config.json").read_text()))
    with built.graph.as_default():
        logits = [built.outputs[name] for name in ("mlm_logits", "nsp_logits")]
        last = tf.add(*map(tf.reduce_sum, logits)).op.name
    bert.save(tf, built, Path("graph/model.ckpt"), step=0)
    for file in Path("graph").glob("model.ckpt-0.*"):
        shutil.copy(file, file.name)
    swap_nodes(tf, Path("model.ckpt-0.meta"), last, "add_1")


def swap_nodes(tf: ModuleType, path: Path, *names: str) -> None:
    """Two nodes of a graph get each other's name."""
    swapped = dict(zip(names, reversed(names), strict=True))
    meta = tf.compat.v1.MetaGraphDef.FromString(path.read_bytes())
    for node in meta.graph_def.node:
        node.name = swapped.get(node.name, node.name)
        node.input[:] = [swapped.get(name, name) for name in node.input]
    path.write_bytes(meta.SerializeToString())


# Running them


def interrupt(seconds: float) -> None:
    """As Ctrl-C does."""
    raise KeyboardInterrupt


@dataclass
class Runner:
    """Runs a line of any kind; complains with the line and with what it said."""

    names: dict[str, Any]
    capfd: pytest.CaptureFixture[str]
    server: Callable[[list[str]], str]
    url: str = ""

    def run(self, line: Line) -> None:
        words = line.words
        while words and re.fullmatch(r"[A-Z_]+=\w+", words[0]):
            os.environ.__setitem__(*words.pop(0).split("=", 1))
        kind = {"pip": self._pip, "watch": self._watch, "curl": self._curl, "pytest": self._pytest}
        if words[0] == "packhorse":
            self._command(line, words[1:])
        elif words[0] in kind:
            kind[words[0]](line, words)
        else:
            exec(line.text, self.names)

    def _command(self, line: Line, words: list[str]) -> None:
        if words[0] == "serve" and "--print-config" not in words:
            self.url = self.server(words)
            return
        if words[0] == "port" and not words[1].startswith("--"):
            return self._process(line, ["packhorse", *words])  # it becomes the script
        self.capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            if "--watch" in words:
                patch.setattr(time, "sleep", interrupt)
            code = main(words)
        captured = self.capfd.readouterr()
        assert code == 0, f"{line.text}\n{captured.err}"

    def _watch(self, line: Line, words: list[str]) -> None:
        assert words[:3] == ["watch", "-n", "2"]
        self._command(line, words[4:])

    def _pip(self, line: Line, words: list[str]) -> None:
        named = re.fullmatch(r"packhorse(?:\[([\w,]+)\])?", words[2])
        assert words[:2] == ["pip", "install"] and named, line.text
        project = tomllib.loads(
            (REPOSITORY / "packages" / "packhorse" / "pyproject.toml").read_text("utf-8")
        )["project"]
        extras = set((named[1] or "").split(",")) - {""}
        assert extras <= set(project["optional-dependencies"]), line.text

    def _curl(self, line: Line, words: list[str]) -> None:
        _, address, *flags = words
        body = flags[flags.index("-d") + 1].encode() if "-d" in flags else None
        url = address.replace("127.0.0.1:8080", self.url)
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200 and json.loads(answer.read())

    def _pytest(self, line: Line, words: list[str]) -> None:
        self._process(line, ["pytest", str(REPOSITORY / words[1]), *words[2:], "-q"])

    def _process(self, line: Line, words: list[str]) -> None:
        completed = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        assert completed.returncode == 0, f"{line.text}\n{completed.stdout}\n{completed.stderr}"


@pytest.fixture
def server() -> Iterator[Callable[[list[str]], str]]:
    """Starts `packhorse serve` on a port of its choice; its address."""
    started: list[subprocess.Popen[str]] = []

    def start(words: list[str]) -> str:
        pytest.importorskip("uvicorn", reason="the extra serve is not installed")
        words = ["0" if word == "8080" else word for word in words]
        command = [sys.executable, "-m", "packhorse", *words, "--json"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout
        document = json.loads(started[-1].stdout.readline())
        return f"http://{document['host']}:{document['port']}"

    yield start
    for process in started:
        process.terminate()
        assert process.wait(30) == 0
        if process.stdout:
            process.stdout.close()


@pytest.fixture
def runner(
    home: Path,
    server: Callable[[list[str]], str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    threads: Callable[[int], None],
) -> Runner:
    threads(1)
    monkeypatch.setenv("PACKHORSE_API_KEY", "")  # put back what a line sets
    names: dict[str, Any] = {}
    prepare_names(names)
    return Runner(names, capfd, server)


PREPARE = {
    "Graphcore's MLPerf BERT": prepare_mlperf,
    "IPU-Training's course": prepare_course,
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_lines_run(system: str, runner: Runner) -> None:
    PREPARE.get(system, lambda: None)()
    lines = [line for line in LINES if line.system == system and not line.slow]
    assert lines, "every system has a line that is quick"
    for line in lines:
        runner.run(line)


@pytest.mark.slow
@pytest.mark.timeout(600)  # TensorFlow twice, and its tests
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize(
    "system", [s for s in SYSTEMS if any(x.slow for x in LINES if x.system == s)]
)
def test_all_lines_run(
    system: str, runner: Runner, request: pytest.FixtureRequest, minilm: Path
) -> None:
    """In their order, the slow ones among them."""
    PREPARE.get(system, lambda: None)()
    if system == "Graphcore's TensorFlow loader":
        prepare_tensorflow(request.getfixturevalue("tf"))
    for line in (line for line in LINES if line.system == system):
        runner.run(line)


def test_the_document_is_read_whole() -> None:
    """Five systems and five libraries, each with lines; every command that is named exists."""
    assert len(SYSTEMS) == 10 and len(LINES) > 70
    named = {
        line.text.partition("packhorse ")[2].split()[0]
        for line in LINES
        if "packhorse " in line.text
    }
    assert named - {"install", "import"} <= {*COMMANDS, *PLUGINS}
    table = "## From the five\n| from | before | now | what changed |\n|---|---|---|---|\n"
    rows = (
        "| A | `a` | `packhorse run x` † | |\n| | `b` | `pip install c`, `d` | |\n| | `e` | - | |\n"
    )
    assert read(table + rows) == [
        Line("A", "packhorse run x", True),
        Line("A", "pip install c", False),
        Line("A", "d", False),
    ]


def test_a_line_that_fails_is_reported(runner: Runner) -> None:
    """The control: the runner must be able to fail, on every kind of line."""
    for text in (
        "packhorse run -m nowhere x",
        "pip install 'packhorse[horse]'",
        "assert texts == 1",
    ):
        with pytest.raises(AssertionError):
            runner.run(Line("A", text, False))
