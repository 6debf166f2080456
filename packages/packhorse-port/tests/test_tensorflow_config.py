"""The settings of an IPU system and the table of names, which need no TensorFlow."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from packhorse.errors import InputError
from packhorse_port import notices
from packhorse_port.syntax import NameOrigins
from packhorse_port.tensorflow import config, names
from packhorse_port.tensorflow.config import DeviceConnectionType, IPUConfig, ipus


@pytest.fixture(autouse=True)
def _fresh():
    notices.reset()
    config.reset_ipu_configuration()
    yield
    notices.reset()
    config.reset_ipu_configuration()


def test_the_course_configures_so_many_ipus() -> None:
    assert ipus() == 1, "what was never configured is one"
    settings = IPUConfig()
    settings.device_connection.type = DeviceConnectionType.ON_DEMAND
    for arguments, number in ((1, 1), (4, 4), ([2, 2], 2), ((8,), 8)):
        settings.auto_select_ipus = arguments
        settings.configure_ipu_system()
        assert ipus() == number
    assert config.get_ipu_config() == [settings]
    chosen = IPUConfig()
    chosen.select_ipus = 0
    chosen.configure_ipu_system()
    assert ipus() == 1 and not notices.logged()


def test_settings_without_meaning_are_reported_once() -> None:
    settings = IPUConfig()
    settings.floating_point_behaviour.esr = True
    settings.floating_point_behaviour.esr = config.StochasticRoundingBehaviour.ON
    settings.convolutions.poplar_options = {"partialsType": "half"}
    settings.io_tiles.available_memory_proportion = 1
    settings.matmuls.poplar_options["availableMemoryProportion"] = "0.1"
    settings.allow_recompute = False
    assert [item.key for item in notices.logged()] == [
        "IPUConfig.floating_point_behaviour.esr",
        "IPUConfig.convolutions.poplar_options",
        "IPUConfig.io_tiles.available_memory_proportion",
    ], "a default says nothing"
    assert notices.logged()[0].line.startswith("test_tensorflow_config.py:")
    copy = IPUConfig()
    copy.from_dict(settings.to_dict())
    assert copy.to_dict() == settings.to_dict()
    assert IPUConfig().matmuls.poplar_options == {}, "no two configurations share a value"


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("auto_select_ipu", 1, "the nearest is auto_select_ipus"),
        ("device_connection.typ", 1, "IPUConfig has no device_connection.typ; the nearest is type"),
        ("device_connection.type", "ON_DEMAND", "DeviceConnectionType.ON_DEMAND"),
        ("convolutions", {}, "no value, but settings within it: poplar_options"),
        ("auto_select_ipus", True, "a number or a list of numbers"),
        ("allow_recompute", 1, "takes a bool, not 1"),
        ("optimizations.math.fast", "yes", "IPUConfig.optimizations.math.fast takes a bool"),
    ],
)
def test_a_wrong_setting_names_the_right_one(path: str, value: object, part: str) -> None:
    with pytest.raises(InputError) as raised:
        IPUConfig().from_dict({path: value})
    assert part in str(raised.value)
    assert str(raised.value).startswith("test_tensorflow_config.py:"), "the line to change"


def test_reading_what_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(IPUConfig(), "auto_select")
    with pytest.raises(AttributeError, match="the nearest is poplar_options"):
        _ = IPUConfig().slices.poplar_option


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"auto_select_ipus": 3}, "set it to 4"),
        ({"auto_select_ipus": 0}, "set it to 1"),
        ({"auto_select_ipus": [2, -1]}, "auto_select_ipus = -1"),
        ({"auto_select_ipus": 1, "select_ipus": [0, 1]}, "not both"),
        ({"device_connection.type": DeviceConnectionType.NEVER}, "DeviceConnectionType.ON_DEMAND"),
    ],
)
def test_a_system_that_cannot_be_is_refused(settings: dict[str, object], part: str) -> None:
    wrong = IPUConfig()
    wrong.from_dict(settings)
    with pytest.raises(InputError) as raised:
        wrong.configure_ipu_system()
    assert part in str(raised.value) and ipus() == 1


USED = """\
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu import loops, utils
cfg = ipu.config.IPUConfig()
cfg.convolutions.poplar_options.update(a=1)
cfg.auto_select_ipu = 2
cfg.device_connection.type = ipu.config.DeviceConnectionType.ONDEMAND
other.auto_select_ipus = 3
with keras.ipu.PipelineStage(0):
    loops.repeat(3, f)
tf.keras.ipu.ALSOptimizer(o)
model.set_outfeed_queue_options(buffer_depth=2)
ipu.utils.get_ipu_configs()
"""


def test_check_tells_of_every_use() -> None:
    tree = ast.parse(USED)
    actual = list(names.uses(tree, NameOrigins(tree)))
    assert sorted((item.line, item.entry.kind, item.name) for item in actual) == [
        (5, "emulated", "ipu.config.IPUConfig"),
        (6, "ignored", "IPUConfig.convolutions.poplar_options.update"),
        (7, "fails", "IPUConfig.auto_select_ipu"),
        (8, "emulated", "IPUConfig.device_connection.type"),
        (8, "fails", "ipu.config.DeviceConnectionType.ONDEMAND"),
        (10, "emulated", "keras.ipu.PipelineStage"),
        (11, "emulated", "ipu.loops.repeat"),
        (12, "emulated", "keras.ipu.ALSOptimizer"),
        (13, "ignored", "Model.set_outfeed_queue_options"),
        (14, "fails", "ipu.utils.get_ipu_configs"),
    ]
    meanings = {item.name: item.entry.meaning for item in actual}
    assert "IPUConfig.auto_select_ipus" in meanings["IPUConfig.auto_select_ipu"]
    assert "ON_DEMAND" in meanings["ipu.config.DeviceConnectionType.ONDEMAND"]
    assert "tf.while_loop" in meanings["ipu.loops.repeat"]


def test_tensorflow_is_not_imported_before_it_is_used() -> None:
    code = "import sys, packhorse_port.tensorflow.names\n"
    code += "print([n for n in ('tensorflow', 'keras', 'numpy', 'torch') if n in sys.modules])"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert completed.stdout == "[]\n", completed.stderr
