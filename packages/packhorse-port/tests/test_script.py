"""A script under `packhorse port` is a script under `python`, with poptorch to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PORT = ("-m", "packhorse", "port")


def python(*words: object, cwd: Path, stdin: str = "", **environment: str):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | environment,
    )


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


TELL = """
import sys, warnings
print(sys.argv, __name__, __file__, __spec__, __package__, sys.path, sys.flags.optimize)
print(sorted(globals()), sys.modules["__main__"].__dict__ is globals())
print(sys.stdin.read(), sys.warnoptions, sys.excepthook is sys.__excepthook__)
print("to stderr", file=sys.stderr)
"""
SAME = {
    "what it is told": TELL,
    "a number": "raise SystemExit(7)",
    "a word": "import sys; sys.exit('no')",
    "an error": "def f():\n    raise ValueError('no')\n\nf()\n",
    "no Python": "print('a'\n",
    "a relative import": "from . import other\n",
    "a hook": "import sys\nsys.excepthook = lambda k, e, t: print(t.tb_next, t.tb_lineno)\n1 / 0\n",
    "an interruption": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
    "a kill": "import os\nos.kill(os.getpid(), 9)\n",
    "atexit": "import atexit, os\natexit.register(print, 'end')\nprint('first')\n",
    "a sibling": "import sibling\nprint(sibling.__file__)\n",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_it_is_as_under_python(text: str, tmp_path: Path) -> None:
    write(tmp_path / "in", "x = 1\n", "sibling.py")
    script = write(tmp_path / "in", text).relative_to(tmp_path)
    words = (script, "--json", "-x", "--", "--quiet", "a b")
    expected = python(*words, cwd=tmp_path, stdin="input")
    packhorse_result = python(*PORT, *words, cwd=tmp_path, stdin="input")
    assert packhorse_result.returncode == expected.returncode
    assert (packhorse_result.stdout, packhorse_result.stderr) == (expected.stdout, expected.stderr)


@pytest.mark.parametrize("word", ["none.py", "-", "package", ""])
def test_other_scripts_are_as_under_python(word: str, tmp_path: Path) -> None:
    """None there, standard input, a folder with a `__main__`, and no name at all."""
    write(tmp_path / "package", "print(__file__, __name__)", "__main__.py")
    arguments = "import sys; print(sys.argv, __name__)"
    expected = python(word, "a", cwd=tmp_path, stdin=arguments)
    packhorse_result = python(*PORT, word, "a", cwd=tmp_path, stdin=arguments)
    assert packhorse_result.returncode == expected.returncode
    assert (packhorse_result.stdout, packhorse_result.stderr) == (expected.stdout, expected.stderr)


def test_pythons_own_options_reach_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nprint(sys.flags.optimize, sys.warnoptions)")
    flags = ("-O", "-W", "error", "-u")
    expected = python(*flags, script, cwd=tmp_path)
    for packhorse_result in (
        python(*flags, *PORT, script, cwd=tmp_path),
        python(*flags, "-m", "packhorse_port", script, cwd=tmp_path),
    ):
        assert (packhorse_result.returncode, packhorse_result.stdout, packhorse_result.stderr) == (
            0,
            expected.stdout,
            "",
        )
    refused = python("-I", *PORT, script, cwd=tmp_path)
    assert refused.returncode == 2 and "without them" in refused.stderr


MODULES = """
import poptorch
import poptorch.enums
from poptorch import enums
from poptorch.enums import OutputMode
import packhorse_port
print(poptorch is packhorse_port, poptorch.enums is enums, packhorse_port.enums is enums)
print(OutputMode.All.name, poptorch.__name__)
try:
    import poptorch.nothing
except ModuleNotFoundError as error:
    print(error)
"""


def test_poptorch_is_one_module_under_two_names(tmp_path: Path) -> None:
    completed = python(*PORT, write(tmp_path, MODULES), cwd=tmp_path)
    assert completed.stdout.splitlines() == [
        "True True True",
        "All packhorse_port",
        "No module named 'poptorch.nothing'",
    ]
    assert completed.stderr == "packhorse port: poptorch was packhorse_port\n"
    without = python(tmp_path / "script.py", cwd=tmp_path)
    assert "No module named 'poptorch'" in without.stderr, "else the test proves nothing"


WORKERS = """
import multiprocessing, subprocess, sys
import poptorch.enums

def work(number):
    return number + 1, poptorch.enums.OutputMode.All.name

if __name__ == "__main__":
    for how in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(how, pool.map(work, [1]))
    subprocess.run([sys.executable, "-c", "import poptorch; print('another')"], check=True)
"""


def test_processes_that_the_script_starts_import_poptorch(tmp_path: Path) -> None:
    completed = python(*PORT, write(tmp_path, WORKERS), cwd=tmp_path)
    caught = [f"{method} [(2, 'All')]" for method in ("fork", "spawn", "forkserver")]
    assert sorted(completed.stdout.splitlines()) == sorted([*caught, "another"])
    assert completed.stderr.count("packhorse port:") == 1, (
        "the summary is the script's own process's"
    )


def test_a_poptorch_beside_the_script_goes_first(tmp_path: Path) -> None:
    write(tmp_path, "name = 'mine'\n", "poptorch.py")
    completed = python(
        *PORT, write(tmp_path, "import poptorch; print(poptorch.name)"), cwd=tmp_path
    )
    assert (completed.stdout, completed.stderr) == ("mine\n", "")


def test_an_earlier_sitecustomize_still_runs(tmp_path: Path) -> None:
    write(tmp_path / "site", "print('customized')", "sitecustomize.py")
    script = write(tmp_path, "import sitecustomize; print(sitecustomize.__file__)")
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    packhorse_result = python(
        "-m", "packhorse_port", script, cwd=tmp_path, **environment
    ).stdout.splitlines()
    expected = python(script, cwd=tmp_path, **environment).stdout.splitlines()
    assert packhorse_result == ["customized", *expected], (
        "once for the command, once for the script"
    )


NOTICES = """
import poptorch
from packhorse_port.notices import log_once
log_once("stochastic", "enableStochasticRounding has no effect: numbers are rounded")
print("out")
"""


def test_the_summary_recalls_what_was_said(tmp_path: Path) -> None:
    script = write(tmp_path, NOTICES)
    completed = python(*PORT, script, cwd=tmp_path)
    result, *summary = completed.stderr.splitlines()
    assert result == "script.py:4: enableStochasticRounding has no effect: numbers are rounded"
    assert summary == [
        "packhorse port: poptorch was packhorse_port",
        "packhorse port: different from an IPU, each logged above: stochastic (script.py:4)",
    ]
    quiet = python(*PORT, "--quiet", script, cwd=tmp_path)
    assert (quiet.stdout, quiet.stderr) == ("out\n", "")


def test_the_summary_as_json_leaves_stdout_alone(tmp_path: Path) -> None:
    completed = python(*PORT, "--json", write(tmp_path, NOTICES), cwd=tmp_path)
    assert completed.stdout == "out\n"
    actual = json.loads(completed.stderr.splitlines()[-1])
    assert actual["provided"] == {"poptorch": "packhorse_port"}
    assert [notice["key"] for notice in actual["notices"]] == ["stochastic"]


def test_a_missing_import_is_reported_with_its_extra(tmp_path: Path) -> None:
    # A stub that fails as a missing package does, for those who have scikit-learn.
    text = "raise ModuleNotFoundError(\"No module named 'sklearn'\", name='sklearn')"
    completed = python(*PORT, write(tmp_path, text), cwd=tmp_path)
    assert completed.returncode == 1 and "Traceback" in completed.stderr
    assert completed.stderr.splitlines()[-1].endswith("pip install 'packhorse[tutorials]'")


IMPORTS = """
import sys
import torchvision
print(torchvision.__version__, "torch" in sys.modules)
"""


@pytest.mark.parametrize("broken", [False, True])
def test_torchvision_is_ours_where_it_fails(broken: bool, tmp_path: Path) -> None:
    failing = "import torchvision.part\nraise RuntimeError('operator torchvision::nms')"
    working = "__version__ = 'real'"
    write(tmp_path / "torchvision", failing if broken else working, "__init__.py")
    write(tmp_path / "torchvision", "", "part.py")
    completed = python(*PORT, write(tmp_path, IMPORTS), cwd=tmp_path)
    assert completed.returncode == 0
    assert completed.stdout.strip() == ("0+packhorse False" if broken else "real False")
    assert ("operator torchvision::nms" in completed.stderr) == broken


IPU = """
from tensorflow.python import ipu
import tensorflow.python.ipu.config
print(ipu.kind, tensorflow.python.ipu.config.kind)
"""
INSTALL = """
import sys, types
def install():
    for name in ("tensorflow.python.ipu", "tensorflow.python.ipu.config"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].kind = name.rpartition(".")[2]
    sys.modules["tensorflow.python.ipu"].config = sys.modules["tensorflow.python.ipu.config"]
"""


def test_tensorflows_modules_come_from_their_room(tmp_path: Path) -> None:
    """The hook, with rooms of sticks: a TensorFlow of two files, an `install` of five lines."""
    (tmp_path / "tensorflow").mkdir()
    write(tmp_path / "tensorflow", "", "__init__.py")
    write(tmp_path / "tensorflow/python", "", "__init__.py")
    room = write(tmp_path, INSTALL, "room.py")
    stand_in = f"import sys; sys.path.insert(0, {str(room.parent)!r})\n"
    stand_in += "import packhorse_port, packhorse_port.script as script, room\n"
    stand_in += "script.TENSORFLOW = 'room'\n"
    completed = python(*PORT, write(tmp_path, stand_in + IPU), cwd=tmp_path)
    assert (completed.stdout, completed.returncode) == ("ipu config\n", 0), completed.stderr


BERT = """
import importlib.util
assert importlib.util.find_spec("torchvision") is None
import torch, torchvision  # ours
assert importlib.util.find_spec("torchvision") is None
from transformers import BertConfig, BertModel
import poptorch

sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = BertModel(BertConfig(vocab_size=10, **sizes)).eval()
ids = torch.tensor([[1, 2, 3]])
found = poptorch.inferenceModel(model)(ids).last_hidden_state
assert torch.equal(found, model(ids).last_hidden_state)
print(torchvision.datasets.MNIST.__name__, "and", type(model).__name__)
"""


@pytest.mark.skipif(bool(find_spec("torchvision")), reason="the installed torchvision is used")
@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_a_transformers_model_runs_beside_our_torchvision(tmp_path: Path) -> None:
    completed = python(*PORT, write(tmp_path, BERT), cwd=tmp_path)
    assert completed.stdout == "MNIST and BertModel\n", completed.stderr
