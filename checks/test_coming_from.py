"""Every new line of docs/coming-from.md runs, in its order, over small stand-ins of what it names.

Lines run in this process, in a folder of their own for each system one may come from. Those that
need TensorFlow, a compiler or several processes are slow ones. What the document marks with † gets
settings that make it small (`SMALL`).
"""

from __future__ import annotations

import bz2
import glob
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import string
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
WORDS = [
    "the",
    "horse",
    "mule",
    "carries",
    "sacks",
    "to",
    "market",
    "good",
    "bad",
    "hello",
    "paris",
    "is",
    "capital",
    "of",
    "france",
]


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
        found = shlex.split(self.text.replace("division=closed", "division=open"))
        return [path for word in found for path in sorted(glob.glob(word)) or [word]] + self._more()

    def _more(self) -> list[str]:
        command = self.text.partition("packhorse ")[2]
        more = [more for part, more in SMALL.items() if command.startswith(part)]
        assert bool(more) == self.marked, f"{self.text}: a line that is made small is marked with †"
        workers = "--workers 1" if re.match("data (build|import)", command) else ""
        return shlex.split(f"{more[0] if more else ''} {workers}")


def read(document: str) -> list[Line]:
    """The lines of all tables, each with the system that its row or its heading names."""
    found, heading, system = [], "", ""
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
            found.append(Line(system, text, "†" in now))
    return found


LINES = read(DOCUMENT)
SYSTEMS = list(dict.fromkeys(line.system for line in LINES))


# Stand-ins for what the lines name


def write_model(folder: Path, *heads: str, positions: int = 512) -> Path:
    """A random model with these heads, as Hugging Face keeps them."""
    import torch

    from packhorse import attention, checkpoint
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.model.heads import Mlm, PooledLabels, Pooler, TokenLabels
    from packhorse.model.model import Model

    vocabulary = folder.parent / "vocabulary"
    vocabulary.mkdir(exist_ok=True)
    words = write_vocabulary(vocabulary / "vocab.txt")
    config = BertConfig(len(words), 32, 2, 2, 64, max_positions=positions)
    torch.manual_seed(0)
    bert = Bert(config, attention.kernel("reference"))
    pooler = Pooler(config)
    made = {
        "pooled": lambda: pooler,
        "mlm": lambda: Mlm(config, bert.embed.words, True),
        "nsp": lambda: PooledLabels(config, pooler, 2),
        "span": lambda: TokenLabels(config, 2),
        "classify": lambda: PooledLabels(config, pooler, 2),
        "score": lambda: PooledLabels(config, pooler, 1),
        "tokens": lambda: TokenLabels(config, 3),
    }
    labels = {"classify": ("0", "1"), "score": ("score",), "tokens": ("O", "B-PER", "I-PER")}
    model = Model(bert, {"classify" if head == "score" else head: made[head]() for head in heads})
    told = labels.get(heads[-1], ())
    whole = checkpoint.Checkpoint(
        config, model.eval(), vocabulary, folder.name, positions, labels=told
    )
    return checkpoint.write(folder, whole)


def write_vocabulary(path: Path) -> list[str]:
    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters]
    words += [f"##{letter}" for letter in letters]
    path.write_text("\n".join(words) + "\n")
    return words


def module(place: str) -> ModuleType:
    """A file of another folder of tests."""
    path = REPOSITORY / "tests" / place
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models under the names that the document uses."""
    home = tmp_path_factory.mktemp("models")
    (home / "csarron").mkdir()
    write_model(home / "bert-large-uncased", "pooled", "mlm", "nsp")
    write_model(home / "bert-base-uncased", "pooled", "mlm", "nsp")
    write_model(home / "csarron" / "bert-base-uncased-squad-v1", "span")
    write_model(home / "squad-model", "span")
    write_model(home / "ranker", "score")
    write_model(home / "sst2", "classify")
    write_model(home / "ner", "tokens")
    google = home / "uncased_L-12_H-768_A-12"
    assert main(["convert", str(home / "bert-base-uncased"), str(google), "--to", "tf1"]) == 0
    old = home / "tf-checkpoints" / "bs64k_32k_ckpt"
    old.mkdir(parents=True)
    for file in google.glob("bert_model.ckpt.*"):
        shutil.copy(file, old / file.name.replace("bert_model.ckpt", "model.ckpt-28252"))
        shutil.copy(file, home / file.name)
    for place in (home, old.parent):
        shutil.copy(google / "bert_config.json", place)
    return home


@pytest.fixture
def home(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lines of one system are run."""
    shutil.copytree(models, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "100")
    write_vocabulary(Path("vocab.txt"))
    write_texts()
    write_tasks()
    return Path.cwd()


def write_texts() -> None:
    sentences = [f"The {a} carries {b} to the market." for a in WORDS[1:3] for b in WORDS[4:10]]
    documents = ["\n".join(sentences[i % 5 :] + sentences[: i % 3]) for i in range(24)]
    Path("texts").mkdir()
    Path("texts/part-00000-of-00001").write_text("\n\n".join(documents) + "\n")
    Path("sample_text.txt").write_text("\n\n".join(documents) + "\n")
    for name in ("texts.txt", "input.txt"):
        Path(name).write_text("\n".join(sentences[:5]) + "\n")
    pages = "".join(
        f"<page><title>A {i}</title><ns>0</ns><id>{i}</id><revision><id>1</id>"
        f"<text>{' '.join(each.splitlines())}</text></revision></page>"
        for i, each in enumerate(documents)
    )
    Path("enwiki.xml.bz2").write_bytes(bz2.compress(f"<mediawiki>{pages}</mediawiki>".encode()))
    hashes = [hashlib.md5(each.encode()).hexdigest() for each in documents]
    Path("eval.md5").write_text("\n".join(hashes[:6]) + "\n")


def write_tasks() -> None:
    rows = [f"the horse is {word}\t{i % 2}" for i, word in enumerate(WORDS * 2)]
    for name in ("train.tsv", "dev.tsv"):
        Path(name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    Path("mrpc").mkdir()
    head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    pairs = [f"{i % 2}\t1\t2\tthe horse\tthe {word}" for i, word in enumerate(WORDS)]
    for name in ("train.tsv", "dev.tsv"):
        Path("mrpc", name).write_text("\n".join([head, *pairs]) + "\n")
    context = "The good horse carries sacks to market."
    asked = [
        {
            "id": word,
            "question": "who carries",
            "answers": [{"text": word, "answer_start": context.index(word)}],
        }
        for word in ("horse", "sacks", "market")
    ]
    squad = {"version": "1.1", "data": [{"paragraphs": [{"context": context, "qas": asked}]}]}
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        Path(name).write_text(json.dumps(squad))


def prepare_mlperf() -> None:
    """TFRecords as their scripts left them, a preset of theirs, and the folder that it names."""
    import numpy as np

    files, rng = module("data/record_files.py"), np.random.default_rng(0)
    made = [files.draw(rng, 64, 20) for _ in range(12)]
    Path("tf_examples").mkdir()
    records = (files.example(files.unpacked(one, 64, 9)) for one in made)
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


POPTORCH = """
import poptorch
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels=None):
        x = self.layer(x)
        return (x, torch.nn.functional.cross_entropy(x, labels)) if self.training else x


options = poptorch.Options()
options.deviceIterations(2)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
loader = poptorch.DataLoader(options, data, batch_size=4, shuffle=True)
model = Model()
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
training = poptorch.trainingModel(model, options=options, optimizer=optimizer)
for x, labels in loader:
    output, loss = training(x, labels)
training.detachFromDevice()
"""
KERAS = """
import numpy as np
from tensorflow import keras
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(np.zeros((32, 4), "float32"), np.zeros(32, "int32"), batch_size=8)
"""


def prepare_course() -> None:
    for name in ("mnist_poptorch.py", "fashion-mnist-pytorch-ipu-todo.py"):
        Path(name).write_text(POPTORCH)
    for name in ("completed_demo_ipu.py", "mnist-ipu-todo.py"):
        Path(name).write_text(KERAS)


def prepare_tensorflow(tf: ModuleType) -> None:
    """A checkpoint with the graph that wrote it, whose last node is called add_1."""
    bert = module("checkpoint/tensorflow_bert.py")
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
    other = dict(zip(names, reversed(names), strict=True))
    meta = tf.compat.v1.MetaGraphDef.FromString(path.read_bytes())
    for node in meta.graph_def.node:
        node.name = other.get(node.name, node.name)
        node.input[:] = [other.get(name, name) for name in node.input]
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
        said = self.capfd.readouterr()
        assert code == 0, f"{line.text}\n{said.err}"

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
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.status == 200 and json.loads(answer.read())

    def _pytest(self, line: Line, words: list[str]) -> None:
        self._process(line, ["pytest", str(REPOSITORY / words[1]), *words[2:], "-q"])

    def _process(self, line: Line, words: list[str]) -> None:
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        assert done.returncode == 0, f"{line.text}\n{done.stdout}\n{done.stderr}"


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
        told = json.loads(started[-1].stdout.readline())
        return f"http://{told['host']}:{told['port']}"

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
    assert named - {"install"} <= {*COMMANDS, *PLUGINS}
    table = "## From the five\n| from | before | now | what changed |\n|---|---|---|---|\n"
    rows = (
        "| A | `a` | `packhorse run x` † | |\n| | `b` | `pip install c`, `d` | |\n| | `e` | - | |\n"
    )
    assert read(table + rows) == [
        Line("A", "packhorse run x", True),
        Line("A", "pip install c", False),
        Line("A", "d", False),
    ]


def test_a_line_that_fails_is_told(runner: Runner) -> None:
    """The control: the runner must be able to fail, on every kind of line."""
    for text in (
        "packhorse run -m nowhere x",
        "pip install 'packhorse[horse]'",
        "assert texts == 1",
    ):
        with pytest.raises(AssertionError):
            runner.run(Line("A", text, False))
