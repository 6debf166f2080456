"""`--patch` of a TensorFlow script writes what a person would write without an IPU."""

from __future__ import annotations

import ast
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import packhorse_port.tensorflow as room
from packhorse_port import notices
from packhorse_port.check import examine
from packhorse_port.patch import MARK
from packhorse_port.tensorflow.patch import translate, uses_ipu


def patched(text: str) -> str:
    completed = translate(dedent(text).encode())
    assert completed.untranslated == ()
    ast.parse(completed.text)
    return completed.text


WHOLE = '''\
    import tensorflow as tf
    from tensorflow import keras
    from tensorflow.keras import ipu as extensions, layers
    from tensorflow.python import ipu  # theirs
    from ipu_tensorflow_addons.keras.layers import Embedding, PopnnLSTM as Recurrent
    import popdist, numpy as np

    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 2
    cfg.device_connection.type = ipu.config.DeviceConnectionType.ON_DEMAND
    cfg.configure_ipu_system()
    ipu.utils.move_variable_initialization_to_cpu()
    ipu.utils.reset_ipu_seed(42)
    strategy = ipu.ipu_strategy.IPUStrategy()


    @tf.function(experimental_compile=True)
    def step(x, scale):
        """Text
        stays."""
        x = ipu.nn_ops.gelu(x)
        return ipu.math_ops.serialized_matmul(x, x, 4, "a_columns", transpose_b=True) * scale


    # The model
    with strategy.scope():
        inputs = keras.Input((8,))
        with extensions.PipelineStage(0):
            x = layers.Dense(
                16, name="""first
            layer"""
            )(inputs)

        with extensions.PipelineStage(1):
            # the last
            x = Recurrent(3, partials_dtype=tf.float16)(Embedding(9, 4)(x))
        model = keras.Model(inputs, x)
        model.set_infeed_queue_options(prefetch_depth=2)
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=4,
            gradient_accumulation_reduction_method="mean",
        )
        model.compile("sgd", "mse", steps_per_execution=8)
        if popdist.getInstanceIndex() == 0:
            print(strategy.run(step, args=[x, 2.0]))
'''
PLAIN = '''\
    import tensorflow as tf
    from tensorflow import keras
    from tensorflow.keras import layers
    from tensorflow.keras.layers import Embedding
    from tensorflow.keras.layers import LSTM as Recurrent
    import numpy as np

    tf.random.set_seed(42)


    @tf.function
    def step(x, scale):
        """Text
        stays."""
        x = tf.nn.gelu(x, approximate=True)
        return tf.matmul(x, x, transpose_b=True) * scale


    # The model
    inputs = keras.Input((8,))
    x = layers.Dense(
        16, name="""first
            layer"""
    )(inputs)

    # the last
    x = Recurrent(3)(Embedding(9, 4)(x))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse", steps_per_execution=8)
    model.optimizer.gradient_accumulation_steps = 4
    if 0 == 0:
        print(step(x, 2.0))
'''


def test_a_whole_script() -> None:
    assert patched(WHOLE) == dedent(PLAIN)


def test_a_script_of_tensorflow_alone_stays_as_it_is() -> None:
    text = "import tensorflow as tf\nwith  tf.device('cpu') : print( 1 )\n"
    assert translate(text.encode()).text == text and not uses_ipu(text.encode())
    assert uses_ipu(b"import tensorflow as tf\ntf.keras.ipu.PipelineStage(0)\n")
    assert not uses_ipu(b"not Python")


def test_what_has_no_counterpart_is_kept_and_marked() -> None:
    text = dedent("""\
        from tensorflow.python import ipu
        from tensorflow.python.ipu.ipu_strategy import IPUStrategy as Strategy
        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 4
        config.configure_ipu_system()
        strategy = Strategy()
        build(strategy)
        with strategy.scope():
            queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
            strategy.run(step, [queue])
        """)
    completed = translate(text.encode())
    replicas, queue = [reason for _, reason in completed.untranslated]
    assert replicas.startswith("4 replicas ran and added their gradients: multiply the batch size")
    assert queue.endswith("return the results of the tf.function; of a loop as a TensorArray")
    assert completed.text == dedent(f"""\
        import tensorflow as tf
        {MARK}{replicas}
        strategy = tf.distribute.get_strategy()
        build(strategy)
        with strategy.scope():
            {MARK}{queue}
            queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
            strategy.run(step, [queue])
        """)
    assert [line for line, _ in completed.untranslated] == [6, 9]


def test_blocks_that_are_left_empty() -> None:
    text = """\
        from tensorflow.python import ipu
        def configure(n):
            if n:
                config = ipu.config.IPUConfig()
                config.configure_ipu_system()
        with ipu.scopes.ipu_scope("/device:IPU:0"): print(1)
        """
    assert patched(text) == "def configure(n):\n    if n:\n        pass\nprint(1)\n"


SCRIPT = """\
    import numpy as np
    import tensorflow as tf
    from tensorflow import keras
    from tensorflow.python import ipu

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    y = x[:, :1]
    keras.utils.set_random_seed(1)
    with ipu.ipu_strategy.IPUStrategy().scope():
        inputs = keras.Input((8,))
        with keras.ipu.PipelineStage(0):
            hidden = keras.layers.Dense(16, activation=ipu.nn_ops.gelu)(inputs)
        with keras.ipu.PipelineStage(1):
            outputs = keras.layers.Dense(1)(hidden)
        model = keras.Model(inputs, outputs)
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=4,
            gradient_accumulation_reduction_method="mean",
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=8)
        losses = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
    """


def test_old_and_new_train_the_same(tf: ModuleType) -> None:
    room.install()
    notices.reset()
    new = patched(SCRIPT)
    assert "activation=lambda x: tf.nn.gelu(x, approximate=True)" in new
    assert "ipu" not in new and "get_strategy" in new
    results: list[dict[str, Any]] = []
    for text in (dedent(SCRIPT), new):
        results.append({})
        exec(compile(text, "script.py", "exec"), results[-1])
    old, plain = results
    assert plain["losses"] == pytest.approx(old["losses"], abs=1e-6)
    for a, b in zip(old["model"].get_weights(), plain["model"].get_weights(), strict=True):
        assert np.abs(a - b).max() < 1e-6
    notices.reset()


def test_check_knows_the_names(tmp_path: Any) -> None:
    text = dedent("""\
        import popdist.tensorflow
        from tensorflow.python import ipu
        from ipu_tensorflow_addons.keras.layers import Dropout
        cfg = ipu.utils.IPUConfig()
        cfg.allow_recompute = True
        ipu.utils.move_variable_initialization_to_cpu()
        queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue(ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST)
        ipu.cross_replica_ops.cross_replica_sum(1)
        ipu.embedded_runtime.embedded_runtime_start("a", [], "b")
        ipu.nn_ops.gelo(1)
        cfg.device_connection.type = ipu.config.DeviceConnectionType.PRE_COMPILE
        if waits:
            cfg.device_connection.type = ipu.config.DeviceConnectionType.NEVER
        from keras.optimizer_v2 import optimizer_v2
        """)
    found = {
        (finding.line, finding.kind, finding.name)
        for finding in examine(text.encode(), tmp_path / "a.py").findings
    }
    assert {
        (1, "emulated", "popdist.tensorflow"),
        (3, "emulated", "ipu_tensorflow_addons.keras.layers.Dropout"),
        (5, "ignored", "IPUConfig.allow_recompute"),
        (6, "ignored", "ipu.utils.move_variable_initialization_to_cpu"),
        (7, "emulated", "ipu.ipu_outfeed_queue.IPUOutfeedQueue"),
        (7, "emulated", "ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST"),
        (8, "emulated", "ipu.cross_replica_ops.cross_replica_sum"),
        (9, "fails", "ipu.embedded_runtime.embedded_runtime_start"),
        (10, "fails", "ipu.nn_ops.gelo"),
        (11, "fails", "IPUConfig.device_connection.type"),
        (13, "emulated", "IPUConfig.device_connection.type"),
        (14, "fails", "keras.optimizer_v2"),
    } <= found


HEAD = """\
import tensorflow as tf
from tensorflow.python import ipu
strategy = ipu.ipu_strategy.IPUStrategy()
"""
IMPORT = "import tensorflow as tf\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y = 2 * ipu.cross_replica_ops.cross_replica_mean(a + b)", "y = 2 * (a + b)"),
        ("y = ipu.cross_replica_ops.cross_replica_mean(a + b)", "y = a + b"),
        ("y = ipu.cross_replica_ops.cross_replica_mean(\n  a +\n  b\n)", "y = (a +\n  b)"),
        ("y = ipu.outlined_function(lambda x: x)(3)", "y = (lambda x: x)(3)"),
        ("y = strategy.run(lambda x: -x, args=[3])", "y = (lambda x: -x)(3)"),
        ("y = strategy.run(f)", "y = f()"),
        (
            "y = strategy.run(f, [strategy.run(g, args=(x,)), ipu.nn_ops.swish(z)], {'a': 1})",
            "y = f(g(x), tf.nn.silu(z), **{'a': 1})",
        ),
        (
            "act = ipu.nn_ops.gelu if g else None",
            "act = (lambda x: tf.nn.gelu(x, approximate=True)) if g else None",
        ),
    ],
)
def test_expressions_keep_their_meaning(line: str, expected: str) -> None:
    assert patched(f"{HEAD}{line}\n") == f"{IMPORT}{expected}\n"


def test_scopes_are_dissolved_in_a_script_indented_by_tabs() -> None:
    text = f"{HEAD}with strategy.scope():\n\tif x:\n\t\ty = 2\n"
    assert patched(text) == f"{IMPORT}if x:\n\ty = 2\n"


def test_a_strategy_stays_where_its_scope_does() -> None:
    text = "with strategy.scope(), tf.device('cpu'):\n    x = 1\n"
    expected = f"{IMPORT}strategy = tf.distribute.get_strategy()\n{text}"
    assert patched(HEAD + text) == expected
