"""`packhorse freeze`: our spellings and those of TensorFlow's tool, and its one-line complaints."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bert() -> ModuleType:
    """The BERT in TensorFlow's graph code that the tests of checkpoints have."""
    path = Path(__file__).parents[1] / "checkpoint" / "tensorflow_bert.py"
    spec = importlib.util.spec_from_file_location("tensorflow_bert", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prefix(bert: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tf = pytest.importorskip("tensorflow", reason="tensorflow-cpu is not installed")
    built = bert.build(tf, {"num_hidden_layers": 1}, heads=("nsp",))
    folder = tmp_path_factory.mktemp("model")
    bert.freeze(tf, built, folder / "theirs.pb", ["nsp_logits"])
    return bert.save(tf, built, folder / "model.ckpt")


def test_a_graph_is_frozen(cli, prefix: Path, tmp_path: Path) -> None:
    from packhorse.checkpoint.tensorflow import frozen

    result = cli(
        *("freeze", "--input-meta-graph", f"{prefix}.meta", "--input-checkpoint", prefix),
        *("--output-node-names", "nsp_logits,pooled_output", "--clear-devices"),
        *("--output-graph", tmp_path / "frozen.pb", "--json"),
    )
    assert result.code == 0 and "variables as constants" in result.err
    reference = frozen.read(prefix.parent / "theirs.pb").tensors
    assert frozen.read(tmp_path / "frozen.pb").tensors.keys() == reference.keys()
    document = result.document
    assert document["outputs"] == ["nsp_logits", "pooled_output"]
    assert document["variables"] == len(reference) and document["nodes"] < document["nodes_before"]
    assert document["bytes"] == (tmp_path / "frozen.pb").stat().st_size


@pytest.mark.parametrize("name", ["", "model.ckpt.index"])
def test_a_folder_or_an_index_leads_to_the_graph(
    cli, prefix: Path, tmp_path: Path, name: str
) -> None:
    result = cli(
        *("freeze", "--input-checkpoint", prefix.parent / name),
        *("--output-node-names", "nsp_logits", "--output-graph", tmp_path / "frozen.pb"),
    )
    assert result.code == 0 and (tmp_path / "frozen.pb").stat().st_size > 10_000


@pytest.mark.parametrize("binary", [["--input_binary=True"], ["--input_binary", "true"], []])
def test_the_spellings_of_tensorflow(cli, prefix: Path, tmp_path: Path, binary: list[str]) -> None:
    result = cli(
        *("freeze", f"--input_meta_graph={prefix}.meta", f"--input_checkpoint={prefix}"),
        *("--output_node_names=nsp_logits:0", "--clear_devices"),
        *(f"--output_graph={tmp_path / 'frozen.pb'}", *binary),
    )
    assert result.code == 0 and result.out == ""
    assert (tmp_path / "frozen.pb").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"--output-node-names": "nsp_logit"}, "did you mean nsp_logits"),
        ({"--output-node-names": ","}, "name the nodes"),
        ({"--input-meta-graph": "none.meta"}, "there is no none.meta"),
        ({"--input-meta-graph": "{prefix}.index"}, "no graph of a checkpoint"),
        ({"--input-checkpoint": "none"}, "there is no none.meta"),
        ({"--output-graph": "{prefix}.meta"}, "is one of the files that are read"),
        ({"--output-graph": None}, "--output-graph"),
        ({"--input-graph": "x.pb"}, "--input-graph"),
    ],
)
def test_mistakes_are_one_line(
    cli, prefix: Path, tmp_path: Path, changes: dict[str, str | None], part: str
) -> None:
    flags = {
        "--input-checkpoint": str(prefix),
        "--output-node-names": "nsp_logits",
        "--output-graph": str(tmp_path / "frozen.pb"),
        **changes,
    }
    words = [str(word).format(prefix=prefix) for flag in flags.items() if flag[1] for word in flag]
    result = cli("freeze", *words)
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1
    assert not (tmp_path / "frozen.pb").exists()


def test_a_checkpoint_without_its_graph(cli, prefix: Path, tmp_path: Path) -> None:
    """As it was published: the weights are there, what to do is said."""
    for path in prefix.parent.glob("model.ckpt.[id]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bare = tmp_path / "model.ckpt"
    result = cli(
        *("freeze", "--input-checkpoint", bare, "--output-node-names", "nsp_logits"),
        *("--output-graph", tmp_path / "frozen.pb"),
    )
    assert result.code == 2 and "has weights but no graph" in result.err
    assert f"packhorse run --model {bare}" in result.err
