"""The table of PopTorch's names tells what the modules do, and tells of all of them."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import packhorse_port as poptorch
from packhorse.errors import PackhorseError
from packhorse_port import enums, optim, options
from packhorse_port.loader import DataLoader
from packhorse_port.names import (
    EMULATED,
    FAILS,
    IGNORED,
    NAMES,
    OF_MODULES,
    install_line,
    nearest,
)
from packhorse_port.options import Options
from packhorse_port.settings import Ignored

GROUPS = {
    "Options": Options,
    "Options.Training": options.Training,
    "Options.Precision": options.Precision,
    "Options.TensorLocations": options.TensorLocations,
    "Options.Distributed": options.Distributed,
    "Options.Jit": options.Jit,
    "Options._Popart": options.Popart,
}


def poptorch_names(kind: type) -> set[str]:
    """Methods and properties with PopTorch's way of writing: a capital inside, or a property."""
    return {
        name
        for name, value in vars(kind).items()
        if callable(value) and any(map(str.isupper, name)) and not name.startswith("_")
    }


def test_no_name_is_reported_twice() -> None:
    assert len(NAMES) == len(EMULATED) + len(IGNORED) + len(FAILS)


def test_every_public_name_is_reported() -> None:
    enumerations = {name for name in vars(enums) if inspect.isclass(getattr(enums, name))}
    untold = set(poptorch.__all__) - NAMES.keys() - enumerations
    assert not untold, "add them to packhorse_port.names"


@pytest.mark.parametrize("name", [name for name in (*EMULATED, *IGNORED) if "." not in name])
def test_what_is_told_is_there(name: str) -> None:
    assert getattr(poptorch, name) is not None


@pytest.mark.parametrize("name", [name for name in FAILS if "." not in name])
def test_what_fails_says_what_to_do(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(poptorch, name)
    assert FAILS[name] in str(caught.value)


@pytest.mark.parametrize("group", GROUPS)
def test_settings_are_reported_as_they_are(group: str) -> None:
    kind = GROUPS[group]
    methods = poptorch_names(kind) - {"fromDict"} - {item.rpartition(".")[2] for item in GROUPS}
    listed = {name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == group}
    assert methods <= listed, f"add {methods - listed} to packhorse_port.names"
    for name in listed:
        method = inspect.getattr_static(kind, name, None)
        assert method is not None, f"{group} has no {name}"
        if group != "Options._Popart":
            without = isinstance(getattr(method, "setting", None), Ignored)
            assert (f"{group}.{name}" in IGNORED) == without


def test_methods_of_models_loaders_and_optimizers_are_reported() -> None:
    for head, kind in (("PoplarExecutor", poptorch.PoplarExecutor), ("DataLoader", DataLoader)):
        listed = {name.partition(".")[2] for name in NAMES if name.startswith(f"{head}.")}
        assert poptorch_names(kind) <= listed, (
            f"add {poptorch_names(kind) - listed} to packhorse_port.names"
        )
        assert all(hasattr(kind, name) for name in listed)
    listed = {name.partition(".")[2] for name in NAMES if name.startswith("optim.")}
    assert all(hasattr(optim, name) for name in listed)


def test_nearest_and_extras() -> None:
    assert nearest("Options.deviceIteration") == "; the nearest is Options.deviceIterations"
    assert nearest("xyzzy") == ""
    assert install_line("sklearn.metrics") == "pip install 'packhorse[tutorials]'"
    assert install_line("PIL.Image") == "pip install pillow"
    assert "pip" not in install_line("some.thing")  # anyone may own that name on PyPI


def test_what_a_module_has_is_known() -> None:
    names = {name for name in dir(torch.nn.Module) if not name.startswith("_")}
    modules = {
        name: getattr(getattr(torch.nn.Module, name), "__module__", "torch") for name in names
    }
    public = {name for name in names if modules[name].startswith("torch")}  # not what others add
    assert public <= OF_MODULES, f"add {public - OF_MODULES} to packhorse_port.names"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("from packhorse_port import eager", "delete the line"),
        ("poptorch.custom_op([], 'Cube', 'com.acme', 1, [])", "Write it in PyTorch"),
        ("from packhorse_port import trainingModle", "the nearest is trainingModel"),
        ("poptorch.optim.Adagrad", "write torch.optim.Adagrad"),
        ("poptorch.optim.Adem", "the nearest is Adam"),
        ("poptorch.Options().outputMode(poptorch.OutputMode.EveryN)", "n is missing"),
        ("poptorch.Options().Distributed.configureProcessId(3, 2)", "ids run from 0 to 1"),
        ("poptorch.DataLoader([1, 2])", "write poptorch.DataLoader(opts, dataset"),
        ("poptorch.DataLoader(poptorch.Options(), [1], batch_size=2)", "Lower one of the factors"),
        ("poptorch.Options().loadFromFile('nowhere')", "cannot read nowhere"),
    ],
)
def test_a_mistake_is_reported_with_its_line(line: str, part: str) -> None:
    code = compile(f"\n\n{line}\n", "script.py", "exec")
    with pytest.raises(
        (AttributeError, ImportError, PackhorseError), match=re.escape(part)
    ) as reason:
        exec(code, {"poptorch": poptorch, "__name__": "__main__"})
    assert str(reason.value).startswith("script.py:3: ")


def test_a_name_that_is_not_there_is_an_attribute_that_is_not_there() -> None:
    assert not hasattr(poptorch, "eager") and not hasattr(poptorch.optim, "Adagrad")
