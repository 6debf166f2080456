"""BERT in TensorFlow 1 graph code, under the variable names of Google's release.

Real TensorFlow saves, freezes and runs what is built here; the readers are held to its files and
the models to its outputs. Values are drawn by numpy, so that a test knows them without TensorFlow,
and large enough that a transposed kernel or a lost bias is seen at once.

    built = build(tf, heads=("mlm", "nsp"))          # a graph, and a session that holds the weights
    save(tf, built, folder / "bert_model.ckpt")      # .index .data .meta, bert_config.json, vocab
    freeze(tf, built, folder / "frozen.pb")
    run(tf, built, ids, mask, segments)["pooled_output"]     # arrays by output name
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

Config = dict[str, Any]

CONFIG: Config = {
    "vocab_size": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "hidden_act": "gelu",  # the exact one; gelu_new: by tanh; relu
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
EPSILON = 1e-12  # of Google's LayerNorm, whatever the configuration says
INPUTS = ("input_ids", "input_mask", "segment_ids")
OUTPUTS = {  # head → output; the first two are always there
    "hidden": "sequence_output",
    "pooled": "pooled_output",
    "mlm": "mlm_logits",
    "nsp": "nsp_logits",
    "squad": "squad_logits",
    "classifier": "classifier_logits",
}
SLOTS = {"adam": ("/adam_m", "/adam_v"), "lamb": ("/LAMB", "/LAMB_1")}


@dataclass(frozen=True, eq=False)
class Built:
    """A graph with its weights in a session."""

    config: Config
    graph: Any
    session: Any
    inputs: dict[str, Any]  # placeholders, by name
    outputs: dict[str, Any]  # tensors, by the name that is also their node's
    weights: dict[str, np.ndarray]  # by variable name: what the model is made of
    others: dict[str, np.ndarray] = field(default_factory=dict)  # slots and global_step


def build(
    tf: ModuleType,
    config: Mapping[str, Any] | None = None,
    heads: Sequence[str] = ("mlm", "nsp"),
    *,
    values: Mapping[str, np.ndarray] | None = None,  # instead of random ones
    slots: str | None = None,  # "adam": X/adam_m, X/adam_v; "lamb": X/LAMB, X/LAMB_1
    step: int | None = None,  # of a variable global_step
    resource: bool = False,  # VarHandleOp instead of VariableV2
    partitions: int = 1,  # of the word embeddings
    labels: int = 3,  # of the classifier
    dtype: str = "float32",
    seed: int = 0,
) -> Built:
    """A BERT with these heads (mlm, nsp, squad, classifier); the pooler is always there."""
    full = CONFIG | dict(config or {})
    with tf.Graph().as_default() as graph:
        maker = _Maker(tf, full, np.random.default_rng(seed), dict(values or {}), resource, dtype)
        inputs = {name: tf.compat.v1.placeholder(tf.int32, [None, None], name) for name in INPUTS}
        shape = (full["vocab_size"], full["hidden_size"])
        words = maker.variable("bert/embeddings/word_embeddings", *shape, partitions=partitions)
        hidden = _encoder(maker, words, *inputs.values())
        result = _heads(maker, hidden, words, heads, labels)
        outputs = {name: tf.identity(value, name) for name, value in result.items()}
        others = _slots(maker, slots, step)
        session = tf.compat.v1.Session(graph=graph)
        _initialize(tf, session, maker.weights | others)
    return Built(full, graph, session, inputs, outputs, maker.weights, others)


def run(
    tf: ModuleType, built: Built, ids: np.ndarray, mask: np.ndarray, segments: np.ndarray
) -> dict[str, np.ndarray]:
    """Every output for a padded batch [B, S]."""
    feeds = zip(built.inputs.values(), (ids, mask, segments), strict=True)
    return built.session.run(built.outputs, dict(feeds))


def run_frozen(
    tf: ModuleType, path: Path, names: Sequence[str], inputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The outputs of a frozen graph for ids, mask and segments."""
    definition = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        tf.import_graph_def(definition, name="")
        feeds = {f"{name}:0": value for name, value in zip(INPUTS, inputs, strict=True)}
        return session.run([f"{name}:0" for name in names], feeds)


def save(
    tf: ModuleType, built: Built, prefix: Path, *, step: int | None = None, sharded: bool = False
) -> Path:
    """Write checkpoint, graph, bert_config.json and vocab.txt; the checkpoint's prefix."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with built.graph.as_default():
        saver = tf.compat.v1.train.Saver(sharded=sharded)
        written = saver.save(built.session, str(prefix), global_step=step)
    (prefix.parent / "bert_config.json").write_text(json.dumps(built.config, indent=2))
    (prefix.parent / "vocab.txt").write_text("\n".join(vocabulary(built.config)) + "\n")
    return Path(written)


def freeze(tf: ModuleType, built: Built, path: Path, outputs: Sequence[str] | None = None) -> Path:
    """Write the graph that these outputs (default all) need, variables folded in by TensorFlow."""
    definition = tf.compat.v1.graph_util.convert_variables_to_constants(
        built.session, built.graph.as_graph_def(), list(outputs or built.outputs)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(definition.SerializeToString())
    return path


def vocabulary(config: Mapping[str, Any]) -> list[str]:
    """As many words as the configuration says, those of a real vocabulary first."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    words += [f"[unused{n}]" for n in range(config["vocab_size"] - len(words))]
    return words[: config["vocab_size"]]


def batch(
    config: Mapping[str, Any], lengths: Sequence[int] = (5, 24, 1, 9), seed: int = 7
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random ids, mask and segments of these lengths, padded to the longest."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int32)
    ids = rng.integers(0, config["vocab_size"], shape, np.int32) * mask
    segments = (np.arange(shape[1]) >= np.array(lengths)[:, None] / 2).astype(np.int32) * mask
    return ids, mask, segments


@dataclass(eq=False)
class _Maker:
    """Makes variables in the current graph, and remembers their values."""

    tf: ModuleType
    config: Config
    rng: np.random.Generator
    initial: dict[str, np.ndarray]
    resource: bool
    dtype: str
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def variable(self, name: str, *shape: int, around: float = 0.0, partitions: int = 1) -> Any:
        value = self.rng.normal(around, 0.2, shape).astype(self.dtype)
        self.weights[name] = np.asarray(self.initial.get(name, value), self.dtype).reshape(shape)
        v1 = self.tf.compat.v1
        return v1.get_variable(
            name,
            shape,
            self.dtype,
            v1.zeros_initializer(),
            partitioner=v1.fixed_size_partitioner(partitions) if partitions > 1 else None,
            use_resource=self.resource,
        )

    def dense(self, x: Any, name: str, wide: int) -> Any:
        kernel = self.variable(f"{name}/kernel", int(x.shape[-1]), wide)
        bias = self.variable(f"{name}/bias", wide)
        product = self.tf.tensordot(x, kernel, 1) if x.shape.rank > 2 else x @ kernel
        return self.tf.nn.bias_add(product, bias, name=f"{name}/BiasAdd")

    def norm(self, x: Any, name: str) -> Any:
        mean, variance = self.tf.nn.moments(x, [-1], keepdims=True)
        beta = self.variable(f"{name}/beta", int(x.shape[-1]))
        gamma = self.variable(f"{name}/gamma", int(x.shape[-1]), around=1.0)
        return self.tf.nn.batch_normalization(x, mean, variance, beta, gamma, EPSILON)

    def activate(self, x: Any) -> Any:
        if self.config["hidden_act"] == "gelu":
            return x * 0.5 * (1 + self.tf.math.erf(x / math.sqrt(2)))
        if self.config["hidden_act"] == "gelu_new":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
            return x * 0.5 * (1 + self.tf.tanh(inner))
        return self.tf.nn.relu(x)


def _encoder(maker: _Maker, words: Any, ids: Any, mask: Any, segments: Any) -> Any:
    tf, config = maker.tf, maker.config
    width, home = config["hidden_size"], "bert/embeddings"
    types = maker.variable(f"{home}/token_type_embeddings", config["type_vocab_size"], width)
    positions = maker.variable(
        f"{home}/position_embeddings", config["max_position_embeddings"], width
    )
    x = tf.compat.v1.nn.embedding_lookup(words, ids, partition_strategy="div")
    x += tf.tensordot(tf.one_hot(segments, config["type_vocab_size"], dtype=maker.dtype), types, 1)
    x += tf.slice(positions, [0, 0], [tf.shape(ids)[1], -1])
    x = maker.norm(x, f"{home}/LayerNorm")
    unseen = (1 - tf.cast(mask, maker.dtype))[:, None, None, :] * -10000.0
    for layer in range(config["num_hidden_layers"]):
        x = _layer(maker, x, unseen, f"bert/encoder/layer_{layer}")
    return x


def _layer(maker: _Maker, x: Any, unseen: Any, name: str) -> Any:
    heads, width = maker.config["num_attention_heads"], maker.config["hidden_size"]
    attended = _attend(maker, x, unseen, f"{name}/attention/self", heads, width // heads)
    attended = maker.dense(attended, f"{name}/attention/output/dense", width)
    x = maker.norm(attended + x, f"{name}/attention/output/LayerNorm")
    up = maker.dense(x, f"{name}/intermediate/dense", maker.config["intermediate_size"])
    down = maker.dense(maker.activate(up), f"{name}/output/dense", width)
    return maker.norm(down + x, f"{name}/output/LayerNorm")


def _attend(maker: _Maker, x: Any, unseen: Any, name: str, heads: int, width: int) -> Any:
    tf, shape = maker.tf, maker.tf.shape(x)

    def divided(part: str) -> Any:
        built = maker.dense(x, f"{name}/{part}", heads * width)
        return tf.transpose(tf.reshape(built, [shape[0], shape[1], heads, width]), [0, 2, 1, 3])

    query, key, value = map(divided, ("query", "key", "value"))
    scores = tf.matmul(query, key, transpose_b=True) * (1 / math.sqrt(width))
    context = tf.matmul(tf.nn.softmax(scores + unseen), value)
    joined = tf.reshape(tf.transpose(context, [0, 2, 1, 3]), [shape[0], shape[1], heads * width])
    return tf.ensure_shape(joined, [None, None, heads * width])


def _heads(
    maker: _Maker, hidden: Any, words: Any, heads: Sequence[str], labels: int
) -> dict[str, Any]:
    tf, width = maker.tf, maker.config["hidden_size"]
    pooled = tf.tanh(maker.dense(hidden[:, 0], "bert/pooler/dense", width))
    result = {"hidden": hidden, "pooled": pooled}

    def scores(x: Any, name: str, count: int) -> Any:
        weights = maker.variable(f"{name}output_weights", count, width)
        bias = maker.variable(f"{name}output_bias", count)
        return tf.nn.bias_add(tf.tensordot(x, tf.transpose(weights), 1), bias)

    if "mlm" in heads:
        result["mlm"] = _mlm(maker, hidden, words)
    if "nsp" in heads:
        result["nsp"] = scores(pooled, "cls/seq_relationship/", 2)
    if "squad" in heads:
        result["squad"] = scores(hidden, "cls/squad/", 2)
    if "classifier" in heads:
        result["classifier"] = scores(pooled, "", labels)
    return {OUTPUTS[head]: value for head, value in result.items()}


def _mlm(maker: _Maker, hidden: Any, words: Any) -> Any:
    tf, home = maker.tf, "cls/predictions"
    x = maker.dense(hidden, f"{home}/transform/dense", maker.config["hidden_size"])
    x = maker.norm(maker.activate(x), f"{home}/transform/LayerNorm")
    bias = maker.variable(f"{home}/output_bias", maker.config["vocab_size"])
    return tf.nn.bias_add(tf.tensordot(x, tf.transpose(tf.convert_to_tensor(words)), 1), bias)


def _slots(maker: _Maker, kind: str | None, step: int | None) -> dict[str, np.ndarray]:
    """Variables beside the weights, as an optimizer would have left them."""
    built: dict[str, np.ndarray] = {}
    for weight, value in maker.weights.items():
        for suffix in SLOTS[kind] if kind else ():
            built[weight + suffix] = maker.rng.random(value.shape).astype(maker.dtype)
    if step is not None:
        built["global_step"] = np.asarray(step, np.int64)
    v1 = maker.tf.compat.v1
    for name, value in built.items():
        v1.get_variable(
            name,
            value.shape,
            value.dtype,
            v1.zeros_initializer(),
            trainable=False,
            use_resource=maker.resource,
        )
    return built


def _initialize(tf: ModuleType, session: Any, values: Mapping[str, np.ndarray]) -> None:
    """Each variable from its value, fed in place of the initializer's zeros."""
    variables = tf.compat.v1.global_variables()
    feeds = {}
    for variable in variables:
        name, part = variable.op.name, variable._get_save_slice_info()
        value = values[part.full_name if part else name]
        if part:
            corner = zip(part.var_offset, part.var_shape, strict=True)
            value = value[tuple(slice(start, start + count) for start, count in corner)]
        feeds[variable.initializer.inputs[1]] = value
    session.run([variable.initializer for variable in variables], feeds)
