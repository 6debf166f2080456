"""Names of 0.1 still lead to what they named, with a warning that says what to write instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse import exports
from packhorse.checkpoint import LoadReport
from packhorse.runtime import Encoder, PackRunner

# What 0.1 exported, and what its README, docs and examples imported from inner modules.
NAMES_OF_0_1 = {
    "packhorse": "Encoder PackRunner Packed PackhorseError Tokenizer __version__ load plan",
    "packhorse.checkpoint": "Checkpoint CheckpointError Contents Report load read tokenizer write",
    "packhorse.checkpoint.hub": "resolve",
    "packhorse.data.packed": "loader shards",
    "packhorse.data.packed.loader": "Loader",
    "packhorse.data.packed.shards": "open",
    "packhorse.hf": "PackedCollator packed register",
    "packhorse.optim": "LAMB SCHEDULES Scaled constant linear load_slots packing_rule "
    "parameter_groups polynomial",
    "packhorse.packing": "Assignment OnlinePacker Packed Plan assign histogram_of plan",
    "packhorse.packing.histogram": "Plan histogram_of",
}


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in NAMES_OF_0_1.items() for name in names.split()],
)
@pytest.mark.filterwarnings("ignore:.* is now called:DeprecationWarning")
def test_a_name_of_0_1_is_there(module: str, name: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from {module} import {name}", names)
    assert names[name] is not None


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [(module, old, new) for module, names in exports.RENAMED.items() for old, new in names.items()],
)
def test_a_renamed_name_warns_at_the_users_line(module: str, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is now called {new}") as records:
        value = getattr(import_module(module), old)
    assert value is getattr(import_module(module), new)
    assert [record.filename for record in records] == [__file__]


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in ("packhorse", *exports.RENAMED):
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
            _ = import_module(module).nothing


@pytest.fixture(scope="module")
def encoder(tiny: Callable[[str], Path]) -> Encoder:
    return packhorse.load(tiny("embed"))


def test_renamed_attributes_warn(encoder: Encoder) -> None:
    with pytest.warns(DeprecationWarning, match=r"Encoder\.why is now called reason"):
        assert encoder.why == encoder.reason
    with pytest.warns(DeprecationWarning, match="now called mismatches"):
        assert LoadReport(unknown=("x",)).misfits() == LoadReport(unknown=("x",)).mismatches()
    with pytest.warns(DeprecationWarning, match="now called bad_values"):
        assert LoadReport().blemishes(None) == []
    with (
        PackRunner(encoder) as runner,
        pytest.warns(DeprecationWarning, match="now called reserve"),
    ):
        runner.promise([])


def test_normalise_is_now_normalize(encoder: Encoder) -> None:
    raw = encoder.embed(["the cat"], normalize=False)
    with pytest.warns(DeprecationWarning, match="normalise= is now called normalize=") as records:
        old = encoder.embed(["the cat"], normalise=False)
    assert [record.filename for record in records] == [__file__]
    assert np.array_equal(old, raw) and not np.allclose(np.linalg.norm(raw), 1)
    with PackRunner(encoder) as runner:
        with pytest.warns(DeprecationWarning, match="normalise=") as records:
            future = runner.submit("the cat", normalise=False)
        np.testing.assert_allclose(future.result(), raw[0], rtol=0, atol=1e-5)
    assert [record.filename for record in records] == [__file__]


def test_importing_rooms_loads_no_torch() -> None:
    rooms = ("attention", "checkpoint", "data", "hf", "optim", "packing", "runtime", "tokens")
    code = "".join(f"import packhorse.{room}; dir(packhorse.{room})\n" for room in rooms)
    code += "import sys; print(*{'torch', 'numpy', 'transformers'} & sys.modules.keys())"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == ""


def test_a_room_limits_the_processor_before_torch_is_loaded() -> None:
    code = (
        "import os\nfrom packhorse.errors import InputError\n"
        "try:\n    from packhorse.packing import plan\n"
        "except InputError as error:\n    print(error)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PACKHORSE_CPU": "abacus", "PYTHONPATH": str(Path(packhorse.__file__).parents[1])},
    )
    assert "PACKHORSE_CPU is 'abacus'" in completed.stdout
