"""What commands say on a machine that lacks something: one line that a person can act on.

In `make test` this is the machine as it is; in `make test-machines` each lane.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.reports import random_model

pytestmark = pytest.mark.machine
LANE = os.environ.get("PACKHORSE_TEST_LANE", "")
PROGRAM = """
import sys
from packhorse.cli import main
model = sys.argv[1]
codes = [main(["run", "w1 w2", "--model", model, "--dtype", dtype, "--json"]) for dtype in
         ("fp32", "bf16")]
codes.append(main(["doctor", "--json"]))
sys.exit(max(codes))
"""
# What a lane's one warning must say, in the words of what to do.
LOST = {
    "no-compiler": "no C compiler found; install gcc or clang",
    "cache": "set PACKHORSE_CACHE to a folder of your own",
    "home": "set PACKHORSE_CACHE to a folder of your own",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write("tiny", tmp_path_factory.mktemp("messages") / "model")


def test_a_lost_kernel_is_reported_once_and_json_stays_json(model: Path) -> None:
    """Three commands in one process: the warning comes once, on stderr, and names the remedy."""
    lane = LANE or "no-compiler"
    changed = {} if LANE else {"PATH": str(Path(sys.executable).parent), "CC": ""}
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    fp32, bf16, doctor = map(json.loads, completed.stdout.splitlines())
    warned = [line for line in completed.stderr.splitlines() if "warning" in line.lower()]
    native = next(row for row in doctor["kernels"] if row["kernel"] == "native")
    assert fp32["kernel"] == bf16["kernel"] == ("native" if native["runs"] else "bucketed")
    if lane in LOST:
        assert len(warned) == 1, completed.stderr
        assert warned[0].startswith("warning: running slower than this machine can")
        assert LOST[lane] in warned[0]
        assert not native["runs"] and native["why"] in warned[0]
    else:
        assert warned == []
