"""Load a TensorFlow checkpoint or frozen graph and compare with what TensorFlow itself reads.

    pytest tests/checkpoint/test_tensorflow.py --config-path bert_config.json \\
        --chkpt-path bert_model.ckpt --frozen-path frozen.pb --chkpt-task SQUAD

runs on your own files; what is not given is written by TensorFlow, here, from TF1 graph code. The
weights are compared one by one under names that this file spells out for itself, before and after
the run; outputs with those of transformers over the weights that TensorFlow read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import checkpoint
from packhorse.packing.batch import Packed

HEADS = {"PRETRAINING": ("mlm", "nsp"), "SQUAD": ("squad",)}
KINDS = {"PRETRAINING": "BertForPreTraining", "SQUAD": "BertForQuestionAnswering"}
OURS = {"PRETRAINING": ("mlm", "nsp"), "SQUAD": ("span",)}
LAYER = {
    "attention/self/query": "attention.self.query",
    "attention/self/key": "attention.self.key",
    "attention/self/value": "attention.self.value",
    "attention/output/dense": "attention.output.dense",
    "attention/output/LayerNorm": "attention.output.LayerNorm",
    "intermediate/dense": "intermediate.dense",
    "output/dense": "output.dense",
    "output/LayerNorm": "output.LayerNorm",
}


def complaint(config: str | None, prefix: str | None, frozen: str | None) -> str:
    """What is wrong with the paths of a user, before TensorFlow says it in many lines."""
    if (prefix or frozen) and not config:
        return "your own files need --config-path bert_config.json"
    if config and not (prefix or frozen):
        return "--config-path alone: pass the weights with --chkpt-path or --frozen-path"
    if config:
        try:
            known = json.loads(Path(config).read_text()).keys()
        except (OSError, ValueError, AttributeError) as error:
            return f"--config-path {config} is no configuration: {error}"
        if not known >= {"vocab_size", "num_hidden_layers", "max_position_embeddings"}:
            return f"--config-path {config} is no configuration of a BERT"
    if prefix and not Path(f"{prefix}.index").is_file():
        return f"--chkpt-path {prefix}: there is no {prefix}.index; pass the name without .index"
    if frozen and not Path(frozen).is_file():
        return f"--frozen-path {frozen}: there is no such file"
    return ""


@pytest.fixture(scope="session", autouse=True)  # so before TensorFlow is even loaded
def user_files(request: pytest.FixtureRequest) -> bool:
    """Are there files of the user? One line and the end if they are not what was asked for."""
    paths = [request.config.getoption(f"--{name}-path") for name in ("config", "chkpt", "frozen")]
    if message := complaint(*paths):
        pytest.exit(message, returncode=pytest.ExitCode.USAGE_ERROR)
    return any(paths)


@pytest.fixture(scope="module", params=KINDS)
def task(request: pytest.FixtureRequest, user_files: bool) -> str:
    option = request.config.getoption
    if user_files and request.param != option("--chkpt-task"):
        pytest.skip(f"your files are for {option('--chkpt-task')}")
    return request.param


@pytest.fixture(scope="module")
def written(task: str, user_files: bool, request, tf, tf_bert, tmp_path_factory) -> SimpleNamespace:
    """The user's files, or those that TensorFlow writes."""
    option = request.config.getoption
    if not user_files:
        folder = tmp_path_factory.mktemp("tensorflow")
        built = tf_bert.build(tf, heads=HEADS[task], slots="lamb", step=28252)
        prefix = tf_bert.save(tf, built, folder / "model.ckpt", step=28252)
        frozen = tf_bert.freeze(tf, built, folder / "frozen.pb")
        return SimpleNamespace(config=None, prefix=prefix, frozen=frozen, built=built)
    paths = [option(name) for name in ("--config-path", "--chkpt-path", "--frozen-path")]
    config, prefix, frozen = (Path(path) if path else None for path in paths)
    return SimpleNamespace(config=config, prefix=prefix, frozen=frozen, built=None)


@pytest.fixture(scope="module")
def config(written: SimpleNamespace) -> dict[str, Any]:
    path = written.config or written.prefix.parent / "bert_config.json"
    return json.loads(path.read_text())


def read_checkpoint(tf: Any, prefix: Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(prefix))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def read_frozen(tf: Any, path: Path) -> dict[str, np.ndarray]:
    graph = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    return {
        node.name: tf.make_ndarray(node.attr["value"].tensor)
        for node in graph.node
        if node.op == "Const" and node.attr["dtype"].type != tf.string.as_datatype_enum
    }


READERS = {"chkpt": ("prefix", read_checkpoint), "frozen": ("frozen", read_frozen)}


@pytest.fixture(scope="module", params=["chkpt", "frozen"])
def case(request, tf, transformers, written, config, task) -> SimpleNamespace:
    """Our model, transformers' over the values that TensorFlow read, and these values."""
    location, reader = READERS[request.param]
    path = getattr(written, location)
    if path is None:
        pytest.skip(f"no --{request.param}-path was given")
    try:
        values = reader(tf, path)
        spelled(config, task, values)
    except Exception as error:
        if written.built is not None:
            raise
        reason = (
            f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        )
        message = f"TensorFlow finds no BERT for {task} (--chkpt-task) of this configuration in it"
        pytest.exit(
            f"--{request.param}-path {path}: {message}: {reason}", pytest.ExitCode.USAGE_ERROR
        )
    loaded = checkpoint.load(path, config=written.config, vocab=None)
    return SimpleNamespace(
        ours=loaded,
        theirs=reference_model(transformers, config, task, values),
        values=values,
        path=path,
    )


def reference_model(
    transformers: Any, config: dict[str, Any], task: str, values: dict[str, np.ndarray]
):
    """transformers' model, filled name by name."""
    known = {k: v for k, v in config.items() if k not in ("directionality",) and "pooler_" not in k}
    model = getattr(transformers, KINDS[task])(transformers.BertConfig(**known)).eval()
    state = {k: torch.from_numpy(np.array(v)) for k, v in spelled(config, task, values).items()}
    if task == "PRETRAINING":
        state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
        state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    missing = model.load_state_dict(state, strict=False)
    remaining = [name for name in missing.missing_keys if "position_ids" not in name]
    assert not missing.unexpected_keys and not remaining, missing
    return model


def spelled(
    config: dict[str, Any], task: str, values: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """TensorFlow's values under transformers' names, kernels transposed."""
    home, result = "bert.embeddings", {}
    for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        result[f"{home}.{table}.weight"] = values[f"bert/embeddings/{table}"]
    modules = {"bert/embeddings/LayerNorm": f"{home}.LayerNorm"}
    for n in range(config["num_hidden_layers"]):
        for name, module in LAYER.items():
            modules[f"bert/encoder/layer_{n}/{name}"] = f"bert.encoder.layer.{n}.{module}"
    if task == "PRETRAINING":
        modules |= {
            "bert/pooler/dense": "bert.pooler.dense",
            "cls/predictions/transform/dense": "cls.predictions.transform.dense",
            "cls/predictions/transform/LayerNorm": "cls.predictions.transform.LayerNorm",
        }
        result["cls.predictions.bias"] = values["cls/predictions/output_bias"]
    for name, module in modules.items():
        if name.endswith("LayerNorm"):
            weight, bias = values[f"{name}/gamma"], values[f"{name}/beta"]
        else:
            weight, bias = values[f"{name}/kernel"].T, values[f"{name}/bias"]
        result |= {f"{module}.weight": weight, f"{module}.bias": bias}
    last = {
        "PRETRAINING": ("seq_relationship", "cls.seq_relationship"),
        "SQUAD": ("squad", "qa_outputs"),
    }
    name, module = last[task]
    result[f"{module}.weight"] = values[f"cls/{name}/output_weights"]
    result[f"{module}.bias"] = values[f"cls/{name}/output_bias"]
    return result


def assert_same_weights(case: SimpleNamespace, config: dict[str, Any], task: str) -> None:
    bert, expected = case.ours.model.bert, spelled(config, task, case.values)
    state = case.ours.model.state_dict()
    for n in range(config["num_hidden_layers"]):
        home = f"bert.encoder.layer.{n}.attention.self"
        for kind in ("weight", "bias"):
            parts = [expected[f"{home}.{part}.{kind}"] for part in ("query", "key", "value")]
            fused = getattr(bert.layers[n].attention.qkv, kind)
            assert np.array_equal(fused.detach().numpy(), np.concatenate(parts))
    assert np.array_equal(
        state["bert.embed.words.weight"].numpy(), expected["bert.embeddings.word_embeddings.weight"]
    )
    # A pooler may be there that the task has no use for.
    entries = [*expected.values(), *(value.T for value in case.values.values())]
    held = {hash(np.ascontiguousarray(value).tobytes()) for value in entries}
    for name, tensor in state.items():  # each of ours is one of theirs, or three joined
        if "qkv" not in name:
            assert hash(tensor.contiguous().numpy().tobytes()) in held, name


def test_load(case: SimpleNamespace, config: dict[str, Any], task: str) -> None:
    """The weights before and after a run, and the run itself."""
    assert_same_weights(case, config, task)
    rng, longest = np.random.default_rng(0), min(config["max_position_embeddings"], 64)
    sequences = [
        SimpleNamespace(ids=rng.integers(0, config["vocab_size"], n), types=rng.integers(0, 2, n))
        for n in (longest, 3, longest // 2)
    ]
    heads = ("hidden", *OURS[task])
    packed = Packed.build(sequences)
    with torch.no_grad():
        hidden, *result = case.ours.model(packed, *heads)
        for n, sequence in enumerate(sequences):
            ids, types = (torch.tensor(x)[None] for x in (sequence.ids, sequence.types))
            out = case.theirs(input_ids=ids, token_type_ids=types, output_hidden_states=True)
            begin, end = packed.cu_seqlens[n : n + 2].tolist()
            close(hidden[begin:end], out.hidden_states[-1][0])
            if task == "SQUAD":
                close(result[0][begin:end, 0], out.start_logits[0])
                close(result[0][begin:end, 1], out.end_logits[0])
            else:
                close(result[0][begin:end], out.prediction_logits[0])
                close(result[1][n], out.seq_relationship_logits[0])
    assert_same_weights(case, config, task)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_outputs_are_those_of_the_graph(case, written, tf, tf_bert, task) -> None:
    """The graph that TensorFlow runs and the packed model agree on every head."""
    if written.built is None:
        pytest.skip("your own graph's inputs and outputs are not known")
    ids, mask, segments = tf_bert.batch(written.built.config)
    expected = tf_bert.run(tf, written.built, ids, mask, segments)
    lengths = mask.sum(1)
    sequences = [
        SimpleNamespace(ids=i[:n], types=s[:n])
        for i, s, n in zip(ids, segments, lengths, strict=True)
    ]
    packed = Packed.build(sequences)
    with torch.no_grad():
        hidden, *result = case.ours.model(packed, "hidden", *OURS[task])
    real = mask.astype(bool)
    close(hidden, torch.from_numpy(expected["sequence_output"][real]))
    if task == "SQUAD":
        close(result[0], torch.from_numpy(expected["squad_logits"][real]))
    else:
        close(result[0], torch.from_numpy(expected["mlm_logits"][real]))
        close(result[1], torch.from_numpy(expected["nsp_logits"]))


def test_a_weight_that_is_off_by_one_bit_is_seen(case, config, task) -> None:
    """The control: what compares weights must fail on a model that is not the file's."""
    kernel = case.ours.model.bert.layers[0].down.weight
    with torch.no_grad():
        kernel.view(torch.int32)[0, 0] ^= 1
        with pytest.raises(AssertionError):
            assert_same_weights(case, config, task)
        kernel.view(torch.int32)[0, 0] ^= 1
    assert_same_weights(case, config, task)


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "no configuration": ({"chkpt": "m"}, "need --config-path"),
    "no weights": ({"config": "c.json"}, "pass the weights"),
    "a configuration that is not there": ({"config": "x", "chkpt": "m"}, "--config-path x is no"),
    "one of nothing": ({"config": "empty.json", "chkpt": "m"}, "no configuration of a BERT"),
    "one that is a list": ({"config": "list.json", "chkpt": "m"}, "is no configuration: "),
    "a prefix of nothing": ({"config": "c.json", "chkpt": "x"}, "there is no x.index"),
    "an index": ({"config": "c.json", "chkpt": "m.index"}, "without .index"),
    "a graph that is not there": ({"config": "c.json", "frozen": "x"}, "there is no such file"),
    "a damaged checkpoint": ({"config": "c.json", "chkpt": "m"}, "finds no BERT for PRETRAINING"),
    "a damaged graph": ({"config": "c.json", "frozen": "m.index"}, "finds no BERT"),
    "an empty graph": ({"config": "c.json", "frozen": "none"}, "has no 'bert/embeddings/"),
}
RUN = ("a prefix of nothing", "a damaged checkpoint", "a damaged graph", "an empty graph")


@pytest.fixture
def files_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 9, "num_hidden_layers": 1, "max_position_embeddings": 8}
    (tmp_path / "c.json").write_text(json.dumps(sizes))
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "m.index").write_bytes(b"junk " * 20)
    (tmp_path / "none").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_paths_are_reported_at_once(case: str, files_of_a_user: None) -> None:
    options, expected = WRONG[case]
    message = complaint(*(options.get(name) for name in ("config", "chkpt", "frozen")))
    assert bool(message) == (case not in RUN[1:]) and "\n" not in message
    assert expected in message or not message
    assert not complaint("c.json", "m", "m.index")  # there, whatever they hold


@pytest.mark.parametrize(
    "case",
    # One is enough for every day: each starts pytest and TensorFlow.
    [case if case == RUN[1] else pytest.param(case, marks=pytest.mark.slow) for case in RUN],
)
def test_wrong_paths_are_one_line(case: str, files_of_a_user: None) -> None:
    options, expected = WRONG[case]
    flags = [word for name, path in options.items() for word in (f"--{name}-path", path)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"{__file__}::test_load", f"--rootdir={Path(__file__).parents[4]}"]
    completed = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240)
    assert completed.returncode == pytest.ExitCode.USAGE_ERROR, completed.stdout
    assert expected in completed.stdout.splitlines()[-1] and "Traceback" not in completed.stdout


def test_the_vocabulary_is_cropped_on_request_only(case, written, config) -> None:
    fewer = config["vocab_size"] // 3
    with pytest.warns(UserWarning, match=f"{config['vocab_size']}.*{fewer}"):
        cropped = checkpoint.load(case.path, config=written.config, vocab_size=fewer)
    words = cropped.model.state_dict()["bert.embed.words.weight"]
    assert np.array_equal(words.numpy(), case.values["bert/embeddings/word_embeddings"][:fewer])
