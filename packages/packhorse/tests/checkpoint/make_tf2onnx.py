"""Make `exports/tf2onnx/bert.onnx` again: `python tests/checkpoint/make_tf2onnx.py`.

It needs TensorFlow and tf2onnx (1.17.0 wrote the committed file, beside TensorFlow 2.21.0), which
exports the frozen graph of the BERT of tensorflow_bert.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import tensorflow as tf
import tensorflow_bert
import tf2onnx

TARGET = Path(__file__).parent / "exports" / "tf2onnx" / "bert.onnx"


def main() -> None:
    built = tensorflow_bert.build(tf)
    with tempfile.TemporaryDirectory() as folder:
        path = tensorflow_bert.freeze(tf, built, Path(folder) / "frozen.pb")
        graph = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    model, _ = tf2onnx.convert.from_graph_def(
        graph,
        input_names=[f"{name}:0" for name in tensorflow_bert.INPUTS],
        output_names=[f"{name}:0" for name in built.outputs],
        opset=17,
    )
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(model.SerializeToString())


if __name__ == "__main__":
    main()
