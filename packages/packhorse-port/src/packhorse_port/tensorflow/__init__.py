"""TensorFlow's modules for the IPU, on a CPU or GPU: `from tensorflow.python import ipu`.

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model.fit(x, y, batch_size=64)

`install()` puts the modules into `sys.modules` and adds the IPU's methods to Keras's models. The
import finder of `packhorse port` calls it when a script imports one of them, and only then
TensorFlow is needed. The modules are built from the table in `names`, so that a name of the SDK
that is missing here says at its line what to write instead. Keras's classes are changed in place,
once, because scripts reach them by many names; models that were not created under `IPUStrategy`
keep Keras's behavior.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from packhorse.errors import InputError, MissingExtra
from packhorse_port import popdist
from packhorse_port.names import nearest
from packhorse_port.notices import line_prefix
from packhorse_port.tensorflow.names import FAILS, NAMES, shorter_name

HOMES = {
    "ipu": "tensorflow.python.ipu",
    "keras.ipu": "tensorflow.keras.ipu",
    "ipu_tensorflow_addons": "ipu_tensorflow_addons",
    "popdist": "popdist",
}
KERAS = ("keras", "tensorflow.keras", "keras._tf_keras.keras")
XLA_FLAGS = "TF_XLA_FLAGS"
LAST_PYTHON = (3, 13)  # that the extra `tensorflow` installs it for


def install() -> None:
    """Provide the modules and extend Keras; a second call changes nothing."""
    if HOMES["ipu"] in sys.modules:
        return
    try:
        import tensorflow.python as python
    except ImportError as error:
        if sys.version_info[:2] > LAST_PYTHON:
            last = ".".join(map(str, LAST_PYTHON))
            raise InputError(
                "TensorFlow is not installed, and packhorse[tensorflow] has it up to Python "
                f"{last} only; this is Python {platform.python_version()}. "
                f"Run the script with Python {last}"
            ) from error
        raise MissingExtra("tensorflow-cpu", "tensorflow") from error
    _set_xla_cache()
    # `tf.keras`, `import tensorflow.keras` and `import keras` are three modules of one Keras.
    packages = [import_module(name) for name in KERAS]
    _extend_keras(packages)
    _extend_tensorflow()
    sys.modules |= modules()
    sys.modules["keras.ipu"] = sys.modules[HOMES["keras.ipu"]]
    python.__dict__["ipu"] = sys.modules[HOMES["ipu"]]
    for package in packages:
        package.__dict__["ipu"] = sys.modules[HOMES["keras.ipu"]]


def _extend_keras(packages: list[ModuleType]) -> None:
    from packhorse_port.tensorflow import extensions, keras_compat, training

    model = packages[0].Model
    for method in extensions.METHODS:
        setattr(model, method.__name__, method)
    for wrap in (
        training.fit,
        training.evaluate,
        training.predict,
        training.make_train_function,
    ):
        setattr(model, wrap.__name__, wrap(getattr(model, wrap.__name__)))
    keras_compat.install(packages)
    keras_compat.install_local_datasets(packages)
    keras_compat.install_old_modules()


def _extend_tensorflow() -> None:
    import tensorflow as tf
    from tensorflow.python.autograph.core import config as autograph
    from tensorflow.python.eager import def_function

    from packhorse_port.tensorflow.strategy import without_xla

    function = without_xla(tf.function)
    for module in (tf, tf.compat.v2, def_function):
        module.__dict__["function"] = function
    if not hasattr(tf, "estimator"):
        from packhorse_port.tensorflow.estimator import EstimatorSpec, ModeKeys

        estimator = ModuleType("tensorflow.estimator", "What is left of tf.estimator")
        estimator.__dict__.update(EstimatorSpec=EstimatorSpec, ModeKeys=ModeKeys)
        # `import tensorflow.compat.v1` may be a module that wraps this one.
        for module in (tf, tf.compat.v1, import_module("tensorflow.compat.v1")):
            module.estimator = estimator  # pyright: ignore[reportAttributeAccessIssue]
    # AutoGraph translates the script's functions, and would translate ours.
    own = autograph.DoNotConvert("packhorse_port")
    autograph.CONVERSION_RULES = (own, *autograph.CONVERSION_RULES)


def modules() -> dict[str, ModuleType]:
    """Every module of the table, with its contents, by its full name."""
    provided = {name.rpartition(".")[0] for name in NAMES} & NAMES.keys()
    provided.discard("popdist.poptorch")  # which needs torch
    missing_modules = {
        name for name in FAILS if name.rpartition(".")[0] in (*HOMES, "ipu.ops") and name.islower()
    }
    created = {name: _module(name) for name in provided | missing_modules}
    created["popdist"] = popdist  # PopTorch's too
    for name in list(created):  # the same module under both of its names
        if (short := shorter_name(name)) in created:
            created[short] = created[name]
    absent = {name: MissingName(name) for name in FAILS if name.rpartition(".")[0] in created}
    for name, value in {**absent, **_values(), **created}.items():
        parent, _, last = name.rpartition(".")
        if parent in created:
            setattr(created[parent], last, value)
    return {_full_name(name): module for name, module in created.items()}


def _values() -> dict[str, Any]:
    """The objects of the emulated names."""
    from packhorse_port.tensorflow import (
        addons,
        config,
        distributed,
        estimator,
        extensions,
        loops,
        operations,
        optimizers,
        pipelining,
        queues,
        scopes,
        strategy,
    )

    values: dict[str, Any] = {
        f"ipu.{module}.{name}": getattr(config, name)
        for module in ("config", "utils")
        for name in vars(config)
        if f"ipu.{module}.{name}" in NAMES
    }
    sources = (distributed, estimator, loops, operations, optimizers, pipelining, queues, scopes)
    for source in sources:
        for module, provided in source.PROVIDES.items():
            values |= {f"{module}.{value.__name__}": value for value in provided}
    values["ipu.utils.get_num_of_ipus_in_device"] = lambda device="", session=None: config.ipus()
    values["ipu.outlined_function"] = operations.outlined_function
    for name in ("IPUStrategy", "IPUStrategyV1"):
        values[f"ipu.ipu_strategy.{name}"] = strategy.IPUStrategy
    values["keras.ipu.PipelineStage"] = extensions.PipelineStage
    for kind in ("Functional", "Sequential", "Model"):
        name = f"keras.ipu.{kind}LayerPipelineStageAssignment"
        values[name] = extensions.LayerPipelineStageAssignment
    for name, layer in addons.LAYERS.items():
        values[f"ipu_tensorflow_addons.keras.layers.{name}"] = layer
    return values


def _full_name(short: str) -> str:
    home = next(home for home in HOMES if short == home or short.startswith(f"{home}."))
    return HOMES[home] + short.removeprefix(home)


def _module(short: str) -> ModuleType:
    module = ModuleType(_full_name(short), f"{short}, by packhorse_port")
    module.__path__ = []  # a package, so that modules within it can be imported

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if short in FAILS:
            return MissingName(f"{short}.{name}")
        raise AttributeError(missing(f"{short}.{name}"))

    module.__getattr__ = __getattr__  # pyright: ignore[reportAttributeAccessIssue]
    return module


class MissingName:
    """A name of the SDK that is not provided: it can be imported, and raises when it is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(missing(self.name))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(missing(f"{self.name}.{name}"))


def missing(name: str) -> str:
    """The message for a missing name: what to write instead, or the nearest name."""
    prefixes = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
    hint = next((f": {FAILS[prefix]}" for prefix in prefixes if prefix in FAILS), "")
    module = name.rpartition(".")[0]
    hint = hint or nearest(name, [known for known in NAMES if known.startswith(f"{module}.")])
    return f"{line_prefix()}{name} is not provided here{hint}"


def _set_xla_cache() -> None:
    """Cache XLA's code in the folder of `TF_POPLAR_FLAGS`, if no other user can write to it."""
    poplar_flags = os.environ.get("TF_POPLAR_FLAGS", "")
    xla_flags = os.environ.get(XLA_FLAGS, "")
    if "executable_cache_path" not in poplar_flags or "persistent_cache_directory" in xla_flags:
        return
    from packhorse.cache import private_folder
    from packhorse_port.options import cache_from_environment

    folder = cache_from_environment({"TF_POPLAR_FLAGS": poplar_flags})
    before = os.environ.get("PACKHORSE_CACHE")
    os.environ["PACKHORSE_CACHE"] = folder or ""
    try:
        private = private_folder("xla")
    finally:
        del os.environ["PACKHORSE_CACHE"]
        os.environ |= {"PACKHORSE_CACHE": before} if before is not None else {}
    os.environ[XLA_FLAGS] = (
        f"{xla_flags} --tf_xla_persistent_cache_directory={private}"
        " --tf_xla_persistent_cache_device_types=CPU,GPU,XLA_CPU_JIT,XLA_GPU_JIT"
    ).strip()
