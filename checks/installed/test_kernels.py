"""`make wheel`: the installed wheel has the fast CPU kernel, whatever the machine lacks."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from ..machines.lanes import LANES
from .conftest import Environment

pytestmark = [
    pytest.mark.wheel,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(platform.system() != "Linux", reason="takes folders away as Linux does"),
]
# A warning would be an error: packhorse warns where the kernel is lost.
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import packhorse
from packhorse.cli.doctor import examine
model = packhorse.load(sys.argv[1], device="cpu", dtype="fp32")
print(json.dumps({"kernel": model.kernel, "size": len(model.embed(["A mule.", "Two horses."])),
                  "where": packhorse.__file__, "compiled": examine()["compiled"]}))
"""
MACHINES = {name: (name,) for name in ("no-compiler", "cache", "home")}
MACHINES["all at once"] = ("no-compiler", "cache", "home")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernel_runs_from_the_wheel(
    machine: str, environment: Environment, minilm: Path, tmp_path: Path
) -> None:
    environment.require("pip install --no-deps packhorse", tmp_path)
    variables: dict[str, str] = dict(environment.variables)
    for name in MACHINES[machine]:
        folder = tmp_path / name
        folder.mkdir()
        changed = LANES[name].enter(folder).variables
        if "PATH" in changed:  # programs of the environment come first
            changed = changed | {"PATH": f"{environment.folder}/bin:{changed['PATH']}"}
        if machine == "all at once" and name == "home":  # a cache folder is named, and is not there
            changed = {"HOME": changed["HOME"]}
        kept = {key: value for key, value in variables.items() if key not in changed}
        variables = kept | {key: value for key, value in changed.items() if value is not None}
    (tmp_path / "program.py").write_text(PROGRAM)
    limited = replace(environment, variables=variables)
    lines = limited.require(f"python {tmp_path}/program.py {minilm}", tmp_path).splitlines()
    report = json.loads(lines[-1])
    assert Path(report["where"]).is_relative_to(environment.folder)
    assert (report["kernel"], report["size"]) == ("native", 2)
    origins = {row["code"]: row["from"] for row in report["compiled"]}
    lost = [row for row in report["compiled"] if row["from"] == "absent"]
    assert set(origins.values()) <= {"wheel", "absent"}, origins
    assert all("runs none of its variants" in row["why"] for row in lost)
    assert origins["attention fp32"] == origins["tokenizer"] == "wheel"
