"""TensorFlow's modules for the IPU, on the CPU or GPU at hand: `from tensorflow.python import ipu`.

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model.fit(x, y, batch_size=64)

`install()` puts the modules under their names in `sys.modules` and teaches Keras's models what an
IPU's can. It is called by the import finder of `packhorse port` when a script asks for one of them,
not before: only then TensorFlow is needed. The modules are made of the table in `names`, so that a
name of the SDK that is not here says at its line what to write instead. Keras's classes are changed
in place, once, because scripts make models of them by many names; models that were not made under
`IPUStrategy` keep Keras's behaviour.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from packhorse.errors import InputError, MissingExtra
from packhorse_port.names import nearest
from packhorse_port.notices import caller
from packhorse_port.tensorflow.names import FAILS, NAMES

HOMES = {"ipu": "tensorflow.python.ipu", "keras.ipu": "tensorflow.keras.ipu"}
KERAS = ("keras", "tensorflow.keras", "keras._tf_keras.keras")
FLAGS = "TF_XLA_FLAGS"


def install() -> None:
    """Provide the modules and extend Keras; a second call changes nothing."""
    if HOMES["ipu"] in sys.modules:
        return
    try:
        import tensorflow.python as python
    except ImportError as error:
        raise MissingExtra("tensorflow-cpu", "tensorflow") from error
    _cache()
    # `tf.keras`, `import tensorflow.keras` and `import keras` are three modules over one Keras.
    packages = [import_module(name) for name in KERAS]
    _extend(packages)
    sys.modules |= modules()
    sys.modules["keras.ipu"] = sys.modules[HOMES["keras.ipu"]]
    python.__dict__["ipu"] = sys.modules[HOMES["ipu"]]
    for package in packages:
        package.__dict__["ipu"] = sys.modules[HOMES["keras.ipu"]]


def _extend(packages: list[ModuleType]) -> None:
    from packhorse_port.tensorflow import datasets, options, spelling, training

    model = packages[0].Model
    for method in options.METHODS:
        setattr(model, method.__name__, method)
    for exchange in (
        training.fit,
        training.evaluate,
        training.predict,
        training.make_train_function,
    ):
        setattr(model, exchange.__name__, exchange(getattr(model, exchange.__name__)))
    spelling.install(packages)
    datasets.install(packages)


def modules() -> dict[str, ModuleType]:
    """Every module of the table by its full name, with what it has in it."""
    rooms = {name.rpartition(".")[0] for name in NAMES} & NAMES.keys()
    whole = {name for name in FAILS if name.rpartition(".")[0] in HOMES and name.islower()}
    made = {name: _module(name) for name in rooms | whole}
    absent = {name: Absent(name) for name in FAILS if name.rpartition(".")[0] in made}
    for name, value in {**absent, **_values(), **made}.items():
        room, _, last = name.rpartition(".")
        if room in made:
            setattr(made[room], last, value)
    return {module.__name__: module for module in made.values()}


def _values() -> dict[str, Any]:
    """What stands behind the names that are emulated."""
    from packhorse_port.tensorflow import config, options, stages, strategy

    values: dict[str, Any] = {
        f"ipu.{room}.{name}": getattr(config, name)
        for room in ("config", "utils")
        for name in vars(config)
        if f"ipu.{room}.{name}" in NAMES
    }
    values["ipu.utils.get_num_of_ipus_in_device"] = lambda device="", session=None: config.ipus()
    for name in ("IPUStrategy", "IPUStrategyV1"):
        values[f"ipu.ipu_strategy.{name}"] = strategy.IPUStrategy
    for room in ("ipu.ops.pipelining_ops", "ipu.pipelining_ops"):
        for value in (options.PipelineSchedule, options.RecomputationMode):
            values[f"{room}.{value.__name__}"] = value
    method = options.GradientAccumulationReductionMethod
    values[f"ipu.gradient_accumulation.{method.__name__}"] = method
    values["keras.ipu.PipelineStage"] = stages.PipelineStage
    for kind in ("Functional", "Sequential", "Model"):
        name = f"keras.ipu.{kind}LayerPipelineStageAssignment"
        values[name] = stages.LayerPipelineStageAssignment
    return values


def _module(short: str) -> ModuleType:
    home = next(home for home in HOMES if short == home or short.startswith(f"{home}."))
    module = ModuleType(HOMES[home] + short.removeprefix(home), f"{short}, by packhorse_port")
    module.__path__ = []  # a package, so that modules within it can be imported

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if short in FAILS:
            return Absent(f"{short}.{name}")
        raise AttributeError(missing(f"{short}.{name}"))

    module.__getattr__ = __getattr__  # pyright: ignore[reportAttributeAccessIssue]
    return module


class Absent:
    """A name of the SDK's that is not here: it can be imported, and says so where it is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(missing(self.name))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(missing(f"{self.name}.{name}"))


def missing(name: str) -> str:
    """What to say of a name that is not here: what to write instead, or the nearest there is."""
    rooms = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
    hint = next((f": {FAILS[room]}" for room in rooms if room in FAILS), "")
    room = name.rpartition(".")[0]
    hint = hint or nearest(name, [known for known in NAMES if known.startswith(f"{room}.")])
    line = caller()
    return f"{f'{line}: ' if line else ''}{name} is not provided here{hint}"


def _cache() -> None:
    """Have XLA keep what it compiles where `TF_POPLAR_FLAGS` says, if others cannot write there."""
    asked, given = os.environ.get("TF_POPLAR_FLAGS", ""), os.environ.get(FLAGS, "")
    if "executable_cache_path" not in asked or "persistent_cache_directory" in given:
        return
    from packhorse.cache import private_folder
    from packhorse_port.options import cache_from_environment

    folder = cache_from_environment({"TF_POPLAR_FLAGS": asked})
    before = os.environ.get("PACKHORSE_CACHE")
    os.environ["PACKHORSE_CACHE"] = folder or ""
    try:
        kept = private_folder("xla")
    finally:
        del os.environ["PACKHORSE_CACHE"]
        os.environ |= {"PACKHORSE_CACHE": before} if before is not None else {}
    os.environ[FLAGS] = (
        f"{given} --tf_xla_persistent_cache_directory={kept}"
        " --tf_xla_persistent_cache_device_types=CPU,GPU,XLA_CPU_JIT,XLA_GPU_JIT"
    ).strip()
