"""`--check` and `--patch` of whole projects: which files belong to one, and one report of all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse_port.check import examine, examine_project, together
from packhorse_port.project import Project, missing_in_installed

FILES = {
    "train.py": "import poptorch\nfrom models.net import Net\nimport helpers\n"
    "executor = poptorch.inferenceModel(Net())\nexecutor.countWeights()\n",
    "helpers.py": "import poptorch\nfrom torch import nn\nopts = poptorch.Options()\n",
    "models/__init__.py": "",
    "models/net.py": "from . import layers\nclass Net:\n    def countWeights(self): pass\n",
    "models/layers.py": "import poptorch\npoptorch.Options().deviceIteration(2)\n",
    "unused.py": "import popxl\n",
    "config.yml": "a: 1\n",
    ".git/hook.py": "import popxl\n",
    "requirements.txt": "# pinned\nsome_lab.tools==1.0\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    return tmp_path / "mine"


def names(project: Project) -> list[str]:
    folder = project.path if project.path.is_dir() else project.path.parent
    return [str(file.relative_to(folder)) for file in project.files]


def test_a_script_is_followed_into_its_own_modules(project: Path) -> None:
    found = names(Project.of(project / "train.py"))
    assert found[0] == "train.py"
    assert set(found) == {
        "train.py", "helpers.py", "models/__init__.py", "models/net.py", "models/layers.py",
    }  # fmt: skip
    whole = names(Project.of(project))
    assert whole == sorted(name for name in FILES if name.endswith(".py") and ".git" not in name)


def test_modules_above_are_found_where_the_script_changes_its_path(project: Path) -> None:
    (project / "tests").mkdir()
    script = project / "tests" / "test_net.py"
    script.write_text("import helpers\n")
    assert names(Project.of(script)) == ["test_net.py"]
    script.write_text("import sys\nsys.path.append('..')\nimport helpers\n")
    assert Project.of(script).files == [script, project.resolve() / "helpers.py"]


def test_one_report_tells_what_fails_where(cli, project: Path) -> None:
    result = cli("port", "--check", project / "train.py", "--json")
    assert result.code == 1
    fails = [item for item in result.document["findings"] if item["kind"] == "fails"]
    assert [(Path(item["file"]).name, item["line"]) for item in fails] == [("layers.py", 2)]
    lines = sum(len(text.splitlines()) for name, text in FILES.items() if "unused" not in name)
    lines -= len(FILES["config.yml"].splitlines()) + 2 + 1  # requirements and the hook
    assert result.document["lines"] == lines
    assert result.document["share"] == pytest.approx(1 - 1 / lines, abs=1e-4)
    assert f"of {lines} lines" in result.err and "1 thing will fail" in result.err
    shown = cli("port", "--check", project / "train.py")
    assert "models/layers.py:2" in shown.out and "helpers.py" in shown.out
    whole = cli("port", "--check", project, "--json").document
    assert {Path(item["file"]).name for item in whole["findings"] if item["kind"] == "fails"} == {
        "layers.py",
        "unused.py",
    }
    assert len(whole["files"]) == 6


def test_methods_of_an_executor_are_known(tmp_path: Path) -> None:
    text = "import poptorch\nm = poptorch.trainingModel(net)\nm.{}()\n"
    kinds = {}
    for method in ("named_parameters", "copyWeightToHost", "getIpuTime", "generate"):
        report = examine(text.format(method).encode(), tmp_path / "a.py")
        (finding,) = (item for item in report.findings if item.line == 3)
        kinds[method] = finding
    assert kinds["named_parameters"].meaning == "the module's own"
    assert "nearest is PoplarExecutor.copyWeightsToHost" in kinds["copyWeightToHost"].meaning
    assert kinds["copyWeightToHost"].kind == kinds["getIpuTime"].kind == "fails"
    assert kinds["generate"].kind == "emulated" and "if it has it" in kinds["generate"].meaning


def test_a_missing_package_is_named_by_the_projects_own_requirements(project: Path) -> None:
    script = project / "extra.py"
    script.write_text("import some_lab.tools\nimport some_lab_tools\nimport no_one_knows\n")
    findings = together(examine_project(Project.of(script)).values()).findings
    meanings = {finding.name: finding.meaning for finding in findings}
    assert meanings["some_lab_tools"] == "not installed: it is in requirements.txt"
    assert all("pip" not in meaning for meaning in meanings.values())


def test_names_that_the_installed_package_lacks(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "old_package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("from .part import thing\n")
    (package / "part.py").write_text("thing = 1\n")
    (package / "open.py").write_text("from math import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    lacks = [
        missing_in_installed("old_package_of_mine", ["thing", "part"]),
        missing_in_installed("old_package_of_mine", ["gone"]),
        missing_in_installed("old_package_of_mine.lost", ["thing"]),
        missing_in_installed("old_package_of_mine.part", ["gone"]),
        missing_in_installed("old_package_of_mine.open", ["sqrt"]),
        missing_in_installed("json", ["loads"]),
        missing_in_installed("torch.nn", ["Linear", "functional"]),
        missing_in_installed("__main__", ["x"]),
    ]
    assert lacks == ["", "gone", "old_package_of_mine.lost", "gone", "", "", "", ""]


def test_a_folder_is_patched_into_a_copy(cli, project: Path, tmp_path: Path) -> None:
    (project / "models" / "layers.py").write_text("import poptorch\nx = poptorch.Options()\n")
    out = tmp_path / "plain"
    result = cli("port", "--patch", out, project, "--json")
    assert result.code == 0 and result.document["left"] == []
    assert (out / "config.yml").read_text() == "a: 1\n" and not (out / ".git").exists()
    assert "poptorch" not in "".join(path.read_text() for path in out.rglob("*.py"))
    assert (out / "models" / "net.py").read_text() == FILES["models/net.py"]
    for words, part in (
        ([out, project], "is there already"),
        ([project / "inside", project], "lies inside"),
    ):
        refused = cli("port", "--patch", *words)
        assert refused.code == 2 and part in refused.err
    alone = cli("port", "--patch", tmp_path / "train.py", project / "train.py")
    assert "helpers.py" in alone.err and "--patch the folder" in alone.err


def test_links_and_what_is_no_file_do_not_hinder(cli, project: Path, tmp_path: Path) -> None:
    (project / "again").symlink_to(".")
    (project / "gone").symlink_to("nowhere")
    (project / "folder.py").mkdir()
    out = tmp_path / "plain"
    assert cli("port", "--patch", out, project).code == 0
    assert (out / "again").readlink() == Path(".") and (out / "gone").is_symlink()
    os.mkfifo(project / "pipe.py")
    reports = cli("port", "--json", "--check", project).document
    assert not [file for file in reports["files"] if "pipe" in file or "folder" in file]
    refused = cli("port", "--patch", tmp_path / "other", project)
    assert refused.code == 2 and "pipe.py` is a named pipe" in refused.err
    assert not [path for path in tmp_path.iterdir() if "other" in path.name]


def test_a_folder_without_scripts_is_refused(cli, tmp_path: Path) -> None:
    refused = cli("port", "--check", tmp_path)
    assert refused.code == 2 and "has no Python files" in refused.err


COMPANIONS = """\
import poptorch, popdist, horovod.torch as hvd, popart, torch
from examples_utils import load_lib
load_lib("ops/residual.cpp")
hvd.init()
assert hvd.size() == 1 and hvd.allreduce(torch.tensor([2.0, 4.0])).tolist() == [2, 4]
assert hvd.broadcast(torch.ones(1), root_rank=0) == 1 and hvd.allgather(torch.ones(2)).shape == (2,)
hvd.broadcast_parameters(torch.nn.Linear(2, 2).state_dict(), root_rank=0)
poptorch.Options()._Popart.set("a", int(popart.SubgraphCopyingStrategy.JustInTime))
print(popdist.execute_on_instances({0}, max, 1, 2), popdist.execute_on_instances({1}, max, 1, 2))
try:
    popart.Builder()
except AttributeError as error:
    print(error)
"""


def test_modules_beside_poptorch_are_there(tmp_path: Path) -> None:
    script = tmp_path / "beside.py"
    script.write_text(COMPANIONS)
    completed = subprocess.run(
        [sys.executable, "-m", "packhorse", "port", str(script)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines() == [
        "2 None",
        "beside.py:11: popart.Builder is not provided here: graphs of PopART cannot run here;"
        " write the model in PyTorch",
    ]
    assert "residual.cpp is C++ for an IPU" in completed.stderr
    report = examine(script.read_bytes(), script)
    assert [item.name for item in report.findings if item.kind == "fails"] == ["popart.Builder"]
