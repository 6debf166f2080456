"""Freezing without TensorFlow: the graph that TensorFlow's own freezing makes, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.checkpoint.tensorflow import freezing, frozen
from packhorse.checkpoint.tensorflow.freezing import FreezeSummary, freeze
from packhorse.errors import CheckpointError, InputError, PackhorseError

VARIABLES = ("VariableV2", "VarHandleOp")


def parse(tf: ModuleType, path: Path) -> Any:
    return tf.compat.v1.GraphDef.FromString(path.read_bytes())


def shape_of(graph: Any) -> dict[str, tuple[str, list[str]]]:
    """Nodes by name: what they do, and to what. TensorFlow drops the order of reads, we keep it."""
    return {
        node.name: (node.op, [name for name in node.input if not name.startswith("^")])
        for node in graph.node
    }


@pytest.mark.parametrize(
    ("settings", "outputs"),
    [
        ({}, None),
        ({}, ["pooled_output"]),
        ({"resource": True}, None),
        ({"dtype": "float16", "heads": ("squad",)}, None),
        ({"partitions": 3}, ["sequence_output"]),
        ({"partitions": 2, "resource": True, "slots": "lamb", "step": 3}, None),
    ],
)
def test_as_tensorflow_freezes(
    settings: dict[str, Any],
    outputs: list[str] | None,
    tf: ModuleType,
    tf_bert: ModuleType,
    tmp_path: Path,
) -> None:
    built = tf_bert.build(tf, {"num_hidden_layers": 1}, **settings)
    prefix = tf_bert.save(tf, built, tmp_path / "model.ckpt")
    names = outputs or list(built.outputs)
    reference = tf_bert.freeze(tf, built, tmp_path / "theirs.pb", names)
    target = tmp_path / "ours.pb"
    completed = freeze(
        tmp_path / "model.ckpt.meta", prefix, [f"{name}:0" for name in names], target
    )
    want, result = parse(tf, reference), parse(tf, target)
    assert shape_of(result) == shape_of(want) and result.versions == want.versions
    before = len(built.graph.get_operations())
    stored = {op.name for op in built.graph.get_operations() if op.type in VARIABLES}
    remaining = len(stored & {node.name for node in want.node if node.op == "Const"})
    assert completed == FreezeSummary(
        completed.nodes_before, len(result.node), remaining, target.stat().st_size
    )
    assert completed.nodes_before >= before and sorted(tmp_path.glob("*.pb")) == [target, reference]
    batch = tf_bert.batch(built.config)
    pairs = [tf_bert.run_frozen(tf, path, names, batch) for path in (reference, target)]
    for first, second, name in zip(*pairs, names, strict=True):
        assert first.tobytes() == second.tobytes(), name
    values = [frozen.read(path).tensors for path in (reference, target)]
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


def test_another_checkpoint_gives_other_outputs(
    tf: ModuleType, tf_bert: ModuleType, tmp_path: Path
) -> None:
    """The control of the test above: outputs do depend on the values that are folded in."""
    first, second = (tf_bert.build(tf, {"num_hidden_layers": 1}, seed=seed) for seed in (0, 1))
    prefixes = [tf_bert.save(tf, b, tmp_path / str(n) / "m") for n, b in enumerate((first, second))]
    freeze(tmp_path / "0" / "m.meta", prefixes[1], ["pooled_output"], tmp_path / "mixed.pb")
    batch = tf_bert.batch(first.config)
    [result] = tf_bert.run_frozen(tf, tmp_path / "mixed.pb", ["pooled_output"], batch)
    assert np.array_equal(result, tf_bert.run(tf, second, *batch)["pooled_output"])
    assert not np.allclose(result, tf_bert.run(tf, first, *batch)["pooled_output"])


class Case:
    """A small graph, saved; frozen here and by TensorFlow."""

    def __init__(self, tf: ModuleType, folder: Path, make: Callable[[], Any], **saver: Any) -> None:
        self.tf, self.v1, self.folder = tf, tf.compat.v1, folder
        self.graph = tf.Graph()
        with self.graph.as_default():
            built = make()
            self.session = self.v1.Session(graph=self.graph)
            self.session.run(self.v1.global_variables_initializer())
            named = {key: built[key] for key in saver.get("names", ())}
            self.output = (built["output"] if isinstance(built, dict) else built).op.name
            self.v1.train.Saver(named or None).save(self.session, str(folder / "m"))

    def freeze(self, **settings: Any) -> Path:
        path = self.folder / "ours.pb"
        freeze(self.folder / "m.meta", self.folder / "m", [self.output], path, **settings)
        return path

    def run(self, definition: Any) -> np.ndarray:
        with self.tf.Graph().as_default() as graph, self.v1.Session(graph=graph) as session:
            self.tf.import_graph_def(definition, name="")
            return session.run(f"{self.output}:0")

    def same(self) -> bool:
        reference = self.v1.graph_util.convert_variables_to_constants(
            self.session, self.graph.as_graph_def(), [self.output]
        )
        loaded = parse(self.tf, self.freeze())
        # TensorFlow also keeps what a node was only to be near.
        assert shape_of(loaded).items() <= shape_of(reference).items()
        return np.array_equal(self.run(reference), self.run(loaded))


@pytest.fixture
def case(tf: ModuleType, tmp_path: Path) -> Callable[..., Case]:
    return lambda make, **saver: Case(tf, tmp_path, make, **saver)


@pytest.fixture
def variable(tf: ModuleType) -> Callable[..., Any]:
    def make(name: str, value: Any, resource: bool = False) -> Any:
        return tf.compat.v1.get_variable(
            name, initializer=np.asarray(value, "f4"), use_resource=resource
        )

    return make


@pytest.fixture
def old_control_flow(tf: ModuleType) -> Iterator[None]:
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


@pytest.mark.parametrize("resource", [False, True])
def test_renamed_in_the_checkpoint(resource: bool, case: Any, variable: Any) -> None:
    def make() -> dict[str, Any]:
        v = variable("v", [1, 2, 3], resource)
        return {"x/y": v, "output": v * 2.0}

    assert case(make, names=["x/y"]).same()


@pytest.mark.parametrize("resource", [False, True])
def test_loops_and_branches_of_tensorflow_1(
    resource: bool, case: Any, variable: Any, tf: ModuleType, old_control_flow: None
) -> None:
    def make() -> Any:
        v, w = variable("v", [[2.0, 1.0]], resource), variable("w", [[3.0]], resource)
        branch = tf.compat.v1.cond(tf.reduce_sum(v) > 1.0, lambda: v + w, lambda: v - w)
        return tf.compat.v1.while_loop(lambda x: tf.reduce_sum(x) < 99.0, lambda x: x * w, [branch])

    first = case(make)
    assert {"Switch", "Enter"} <= {node.op for node in parse(tf, first.freeze()).node}
    assert first.same()


def test_functions_come_along(case: Any, variable: Any, tf: ModuleType) -> None:
    """A training graph takes its input from a pipeline, which is a function."""

    def make() -> Any:
        data = tf.data.Dataset.range(5).map(lambda x: tf.cast(x, tf.float32) * 0.5).skip(3)
        return variable("v", [1, 2]) * tf.compat.v1.data.make_one_shot_iterator(data).get_next()

    first = case(make)
    assert parse(tf, first.freeze()).library.function
    assert first.same()


def test_functions_that_nothing_calls_do_not(case: Any, variable: Any, tf: ModuleType) -> None:
    def make() -> Any:
        tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
        return variable("v", [1, 2]) + 1.0

    first = case(make)
    assert first.graph.as_graph_def().library.function
    assert not parse(tf, first.freeze()).library.function


def test_gathering_from_a_resource(case: Any, variable: Any, tf: ModuleType) -> None:
    def make() -> Any:
        v = variable("v", np.arange(12).reshape(4, 3), resource=True)
        rows = tf.gather(v, tf.constant([3, 0], tf.int64))
        return rows + tf.gather_nd(v, [[1], [2]])

    assert case(make).same()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_step_is_a_variable_too(dtype: str, case: Any, variable: Any, tf: ModuleType) -> None:
    def make() -> Any:
        step = tf.compat.v1.get_variable("global_step", initializer=np.array(7, dtype))
        return variable("v", [1, 2]) * tf.cast(step, tf.float32)

    first = case(make)
    assert first.same()
    [step] = [node for node in parse(tf, first.freeze()).node if node.name == "global_step"]
    value = tf.make_ndarray(step.attr["value"].tensor)
    assert (value.dtype, value) == (np.dtype(dtype), 7)


@pytest.mark.parametrize("kind", ["m", "v", "power"])
def test_so_is_the_state_of_an_optimizer(
    kind: str, case: Any, variable: Any, tf: ModuleType
) -> None:
    def make() -> Any:
        v = variable("v", [1, 2])
        adam = tf.compat.v1.train.AdamOptimizer(beta1=0.75)
        adam.minimize(tf.reduce_sum(v * v))
        with tf.compat.v1.variable_scope("", reuse=True):
            state = adam._get_beta_accumulators()[0] if kind == "power" else adam.get_slot(v, kind)
        return state + v

    first = case(make)
    assert first.same()
    assert np.array_equal(
        first.run(parse(tf, first.freeze())), np.add([1, 2], 0.75 * (kind == "power"))
    )


@pytest.mark.parametrize("name", ["", "m.index", "m.data-00000-of-00001", "checkpoint"])
def test_every_way_to_name_the_checkpoint(name: str, case: Any, variable: Any) -> None:
    """The graph beside it is found as well."""
    first = case(lambda: variable("v", [1, 2]) + 1.0)
    expected = first.freeze().read_bytes()
    target = first.folder / "new.pb"
    freeze(None, first.folder / name, [first.output], target)
    assert target.read_bytes() == expected


def test_devices_and_neighbors(case: Any, variable: Any, tf: ModuleType) -> None:
    def make() -> Any:
        with tf.device("/cpu:0"):
            v = variable("v", [1, 2])
            gone = tf.constant(1.0, name="gone")
            with tf.compat.v1.colocate_with(v), tf.compat.v1.colocate_with(gone):
                return v + 1.0

    first = case(make)
    plain, cleared = (parse(tf, first.freeze(clear_devices=clear)) for clear in (False, True))
    assert any(node.device for node in plain.node)
    assert not any(node.device for node in cleared.node)
    assert not any("_class" in node.attr for node in plain.node)
    assert np.array_equal(first.run(plain), [2, 3]) and np.array_equal(first.run(cleared), [2, 3])


def test_what_cannot_be_frozen(tmp_path: Path, tf: ModuleType, variable: Any) -> None:
    v1 = tf.compat.v1

    def branch() -> Any:
        v = variable("v", [1.0], resource=True)
        return v1.cond(tf.reduce_sum(v) > 0.0, lambda: v + 1.0, lambda: v - 1.0)

    def assigned() -> Any:
        v = variable("v", [1.0])
        with tf.control_dependencies([v.assign_add([1.0])]):
            return v.read_value() + 1.0

    def handle() -> Any:
        v = variable("v", [1.0], resource=True)
        with tf.control_dependencies([v.assign_add([1.0])]):
            return v.read_value() + 1.0

    for number, (make, message) in enumerate(
        [
            (branch, r"'cond' \(If\) takes the variable 'v' itself"),
            (assigned, r"'AssignAdd' \(AssignAdd\) changes or tests the variable 'v'"),
            (
                handle,
                r"'AssignAddVariableOp' \(AssignAddVariableOp\) takes the variable 'v' itself",
            ),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        first = Case(tf, folder, make)
        with pytest.raises(CheckpointError, match=message):
            first.freeze()
        assert not (folder / "ours.pb").exists()


@pytest.fixture
def saved(tf: ModuleType, tf_bert: ModuleType, tmp_path: Path) -> Path:
    """The prefix of a small BERT."""
    built = tf_bert.build(tf, {"num_hidden_layers": 1}, heads=("nsp",))
    tf_bert.freeze(tf, built, tmp_path / "theirs" / "frozen.pb")
    return tf_bert.save(tf, built, tmp_path / "model.ckpt")


def test_mistakes_are_named(saved: Path, tf: ModuleType, tf_bert: ModuleType) -> None:
    meta, target = saved.with_name("model.ckpt.meta"), saved.with_name("new.pb")
    second = tf_bert.build(tf, {"num_hidden_layers": 1, "hidden_size": 16}, heads=())
    small = tf_bert.save(tf, second, saved.parent / "small" / "m")
    only = Case(tf, saved.parent / "theirs", lambda: tf.compat.v1.get_variable("v", [1]) + 1.0)
    mistakes: list[tuple[type[Exception], tuple[Any, ...], str]] = [
        (InputError, (meta, saved, ["nsp_logit"], target), "no node 'nsp_logit'.*nsp_logits"),
        (InputError, (meta, saved, ["kernel:0"], target), "did you mean bert/.*/kernel"),
        (InputError, (meta, saved, ["€"], target), "none has a name like it"),
        (InputError, (meta, saved, [" "], target), "name the nodes"),
        (InputError, (meta, saved, ["nsp_logits"], meta), "is one of the files that are read"),
        (
            CheckpointError,
            (meta, only.folder / "m", ["nsp_logits"], target),
            "does not have bert/embeddings/word_embeddings, .* and 2[0-9] more",
        ),
        (
            CheckpointError,
            (meta, small, ["sequence_output"], target),
            r"word_embeddings' is \[80, 16\] of torch.float32 in the checkpoint.* \[80, 32\]",
        ),
        (
            CheckpointError,
            (saved.with_name("none.meta"), saved, ["nsp_logits"], target),
            f"no graph.*export_meta_graph.*packhorse run --model {saved}",
        ),
        (
            CheckpointError,
            (saved.parent / "theirs" / "frozen.pb", saved, ["nsp_logits"], target),
            "frozen.pb: this is a GraphDef; pass the checkpoint's .meta",
        ),
        (
            CheckpointError,
            (saved.with_name("vocab.txt"), saved, ["nsp_logits"], target),
            "vocab.txt: this is no graph of a checkpoint",
        ),
        (CheckpointError, (meta, saved.with_name("no"), ["nsp_logits"], target), r"no\.index"),
        (
            InputError,
            (meta, saved, ["nsp_logits"], saved.parent / "none" / "new.pb"),
            "new.pb cannot be written",
        ),
    ]
    before = sorted(saved.parent.rglob("*"))
    for kind, arguments, message in mistakes:
        with pytest.raises(kind, match=message):
            freeze(*arguments)
    assert sorted(saved.parent.rglob("*")) == before


def test_nothing_is_left_behind(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = saved.with_name("new.pb")
    target.write_bytes(b"old")
    before = sorted(saved.parent.iterdir())
    reported = []

    def stop(completed: int, total: int) -> None:
        reported.append(completed / total)
        if completed > total / 2:
            raise KeyboardInterrupt

    arguments = (saved.with_name("model.ckpt.meta"), saved, ["nsp_logits"], target)
    with pytest.raises(KeyboardInterrupt):
        freeze(*arguments, progress=stop)
    assert 0.5 < reported[-1] < 0.9 and reported == sorted(reported)
    monkeypatch.setattr(freezing, "SIZE_LIMIT", 50_000)
    with pytest.raises(CheckpointError, match=r"would have \d+ bytes, and protobuf allows 50000"):
        freeze(*arguments)
    assert target.read_bytes() == b"old" and sorted(saved.parent.iterdir()) == before


def test_damaged_graphs(saved: Path, tf: ModuleType) -> None:
    """A .meta is a stranger's file as well: refused, or frozen."""
    good = saved.with_name("model.ckpt.meta").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for number in range(60):
        content = bytearray(good)
        if number < 20:
            del content[int(rng.integers(len(good))) :]
        else:
            for at in rng.integers(0, len(good), 2):
                content[at] ^= 1 << int(rng.integers(8))
        saved.with_name("bad.meta").write_bytes(content)
        try:
            freeze(saved.with_name("bad.meta"), saved, ["nsp_logits"], saved.with_name("bad.pb"))
            parse(tf, saved.with_name("bad.pb"))
        except PackhorseError:
            refused += 1
    assert 20 < refused < 60


@pytest.mark.parametrize("part", [0.001, 0.2, 0.9, 0.9999])
def test_a_truncated_graph_is_reported_by_a_byte(part: float, saved: Path) -> None:
    good = saved.with_name("model.ckpt.meta").read_bytes()
    bad = saved.with_name("bad.meta")
    bad.write_bytes(good[: int(len(good) * part)])
    with pytest.raises(CheckpointError, match=r"bad\.meta: .*byte [0-9]+"):
        freeze(bad, saved, ["nsp_logits"], saved.with_name("bad.pb"))
