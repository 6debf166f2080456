"""`--check` reads a script and tells what would become of each line."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from packhorse_port import check
from packhorse_port.check import Finding, examine
from packhorse_port.names import EXTRAS, NAMES
from packhorse_port.syntax import NameOrigins

SCRIPTS = Path(__file__).parent / "scripts"
LIBRARY = Path(__file__).resolve().parents[2] / "packhorse" / "pyproject.toml"


def findings(text: str, folder: Path = SCRIPTS) -> list[Finding]:
    return list(examine(text.encode(), folder / "script.py").findings)


def summary(text: str) -> list[tuple[int, str, str]]:
    """Without imports, which depend on what is installed."""
    return [(f.line, f.kind, f.name) for f in findings(text) if f.name not in ("poptorch", "torch")]


def test_the_courses_script_runs() -> None:
    path = SCRIPTS / "section_four.py"
    report = examine(path.read_bytes(), path)
    by_name = {(item.line, item.name): item for item in report.findings}
    lines = path.read_text().splitlines()
    line_of = {text: number for number, text in enumerate(lines, 1)}
    assert by_name[line_of["import poptorch"], "poptorch"].kind == "emulated"
    assert by_name[line_of["opts = poptorch.Options()"], "Options"].kind == "emulated"
    detach = by_name[
        line_of["poptorch_model.detachFromDevice()"], "PoplarExecutor.detachFromDevice"
    ]
    assert detach.source == "poptorch_model.detachFromDevice()"
    assert report.document()["plain_lines"] == report.plain > 30
    assert {item.kind for item in report.findings} <= {"as is", "emulated", "fails"}
    assert all(
        item.meaning.startswith("not installed") for item in report.findings if item.kind == "fails"
    )


CHAINED = """\
import poptorch as pt
from poptorch import DataLoader as Loader, Options
from poptorch.optim import AdamW

opts = pt.Options().deviceIterations(4)
opts.Training.gradientAccumulation(8).setAutomaticLossScaling(True)
opts.Precision.enableStochasticRounding(True)
(
    opts
    .autoRoundNumIPUs()
    .outputMode(pt.OutputMode.All)
)
def train(options: pt.Options, model):
    options.replicationFactor(2)
    model.copyWeightsToHost()
    return Loader(options, [], mode=pt.DataLoaderMode.Async)
print(opts.device_iterations, opts.Training.gradient_accumulation)
strategy = pt.ShardedExecution("b")
strategy.stage("b").ipu(0)
"""


def test_names_are_followed_through_chains_and_aliases() -> None:
    assert summary(CHAINED) == [
        (2, "emulated", "DataLoader"),
        (2, "emulated", "Options"),
        (3, "emulated", "optim.AdamW"),
        (3, "emulated", "poptorch.optim"),
        (5, "emulated", "Options"),
        (5, "emulated", "Options.deviceIterations"),
        (6, "emulated", "Options.Training.gradientAccumulation"),
        (6, "ignored", "Options.Training.setAutomaticLossScaling"),
        (7, "ignored", "Options.Precision.enableStochasticRounding"),
        (10, "ignored", "Options.autoRoundNumIPUs"),
        (11, "emulated", "Options.outputMode"),
        (11, "emulated", "OutputMode.All"),
        (13, "emulated", "Options"),
        (14, "emulated", "Options.replicationFactor"),
        (15, "emulated", "PoplarExecutor.copyWeightsToHost"),
        (16, "emulated", "DataLoader"),
        (16, "emulated", "DataLoaderMode.Async"),
        (17, "emulated", "Options.Training.gradient_accumulation"),
        (17, "emulated", "Options.device_iterations"),
        (18, "ignored", "ShardedExecution"),
        (19, "ignored", "Strategy.ipu"),
        (19, "ignored", "Strategy.stage"),
    ]


@pytest.mark.parametrize(
    ("line", "name", "part"),
    [
        ("poptorch.trainingModle(1)", "trainingModle", "the nearest is trainingModel"),
        ("poptorch.Options().deviceIteration(1)", "Options.deviceIteration", "deviceIterations"),
        ("poptorch.optim.Sgd(1)", "optim.Sgd", "the nearest is optim.SGD"),
        ("poptorch.OutputMode.Al", "OutputMode.Al", "Final, EveryN, All"),
        ("poptorch.custom_op([], '', '', 1)", "custom_op", "write the operation in PyTorch"),
        ("poptorch.Options().Popart.set('a', 1)", "Options.Popart", "Options._Popart"),
        ("import popxl", "popxl", "write the model in PyTorch"),
        ("import popart; popart.Builder()", "popart.Builder", "write the model in PyTorch"),
        ("from . import part", ".", "import it by its name"),
        (
            "import no_such_module_here.part",
            "no_such_module_here.part",
            "install the package that has",
        ),
    ],
)
def test_what_will_fail_says_what_to_do(line: str, name: str, part: str) -> None:
    fails = [item for item in findings(f"import poptorch\n{line}\n") if item.kind == "fails"]
    assert [(item.line, item.name) for item in fails] == [(2, name)]
    assert part in fails[0].meaning and fails[0].source == line


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("print(poptorch.__version__)", "__version__"),
        ("print(poptorch.__version__.split('.'))", "__version__.split"),
        ("from poptorch import __version__", "__version__"),
    ],
)
def test_the_version_is_there(lines: str, name: str) -> None:
    assert summary(f"import poptorch\n{lines}\n") == [(2, "emulated", name)]


def test_a_variable_with_two_meanings_is_not_accused() -> None:
    """`model` is the user's and PopTorch's in turn: what it lacks may be the user's own."""
    text = "import poptorch\nmodel = f()\nmodel.forwardPass()\n"
    text += "model = poptorch.inferenceModel(model)\n"
    assert summary(text) == [(4, "emulated", "inferenceModel")]
    sure = "import poptorch\nopts = poptorch.Options()\nopts.forwardPass()\n"
    assert (3, "fails", "Options.forwardPass") in summary(sure)


def test_options_are_followed_out_of_functions_and_scalings_are_reported() -> None:
    text = "import poptorch\ndef f(n):\n    opts = poptorch.Options()\n    return opts\n"
    text += "opts = f(3)\nopts._Popart.set('a', 1)\nopts.foo()\n"
    text += "o = poptorch.optim.SGD(p, lr=1, loss_scaling=8)\n"
    assert summary(text)[1:] == [
        (6, "ignored", "Options._Popart.set"),
        (7, "fails", "Options.foo"),
        (8, "ignored", "loss_scaling"),
        (8, "emulated", "optim.SGD"),
    ]


def test_an_import_that_may_fail_is_no_failure() -> None:
    text = "try:\n    import no_such_module_here\nexcept ImportError:\n    pass\n"
    (finding,) = findings(text)
    assert (finding.kind, finding.line) == ("as is", 2) and "expects" in finding.meaning
    (finding,) = findings(text.replace("ImportError", "KeyError"))
    assert finding.kind == "fails"


def test_files_beside_the_script_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (finding,) = findings("import mine\n", tmp_path)
    assert (finding.kind, finding.meaning) == ("as is", "a file of yours")


def test_missing_modules_are_reported_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    text = (
        "import tqdm\nfrom sklearn.metrics import accuracy_score\nimport os\nimport torchvision\n"
    )
    text += "from tensorflow.python import ipu\nfrom torchvision import models, datasets\n"
    kinds = {item.name: (item.kind, item.meaning) for item in findings(text)}
    assert kinds["tqdm"] == ("fails", "not installed: pip install 'packhorse[tutorials]'")
    assert "[tutorials]" in kinds["sklearn.metrics"][1]
    assert kinds["os"][0] == "as is" and kinds["torchvision"][0] == "emulated"
    assert "[tensorflow]" in kinds["tensorflow.python.ipu"][1]
    assert kinds["torchvision.models"][0] == "fails"
    assert kinds["torchvision.datasets"][0] == "emulated"


def test_an_installed_torchvision_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: object())
    kinds = [item.kind for item in findings("import torchvision\ntorchvision.models.resnet18()\n")]
    assert kinds == ["as is"]


@pytest.mark.parametrize("text", ["print 'old'\n", "x = (\n", "a\x00b"])
def test_what_is_no_python_fails_at_its_line(text: str) -> None:
    report = examine(text.encode(), Path("script.py"))
    assert [item.kind for item in report.findings] == ["fails"]
    assert not report.document()["runs"]


def test_an_encoding_of_its_own_is_read() -> None:
    text = "# -*- coding: latin-1 -*-\nimport poptorch  # é\n".encode("latin-1")
    (finding,) = examine(text, Path("script.py")).findings
    assert finding.source == "import poptorch  # é"


def test_checking_needs_no_torch() -> None:
    script = SCRIPTS / "section_four.py"
    code = "import sys; from packhorse.cli import main; main(['port', '--check', sys.argv[1]])\n"
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", code, script], capture_output=True, text=True, timeout=60
    )
    assert completed.stdout.splitlines()[-1] == "False False"


def test_the_extras_bring_their_modules() -> None:
    project = tomllib.loads(LIBRARY.read_text())["project"]
    packages = {
        "sklearn": "scikit-learn",
        "tensorflow": "tensorflow-cpu",
        "keras": "tensorflow-cpu",
    }
    for module, extra in EXTRAS.items():
        lines = project["optional-dependencies"][extra]
        names = {re.split(r"[\[<>=]", line)[0] for line in lines}
        assert packages.get(module, module) in names, f"{extra} does not bring {module}"


def test_every_name_that_is_set_is_found() -> None:
    """Each method of the table, called on options or a model, is told under its own name."""
    for name in NAMES:
        head, _, rest = name.partition(".")
        if head not in ("Options", "PoplarExecutor", "DataLoader") or not rest:
            continue
        maker = "trainingModel" if head == "PoplarExecutor" else head
        tree = ast.parse(f"import poptorch\nx = poptorch.{maker}()\nx.{rest}")
        last = tree.body[-1]
        assert isinstance(last, ast.Expr) and NameOrigins(tree).name(last.value) == name
