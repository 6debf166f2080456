"""The sentence-transformers layout: its own library gives the same vectors, both ways."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from packhorse import checkpoint
from packhorse.checkpoint import sentence
from packhorse.errors import CheckpointError
from packhorse.packing.batch import Packed
from packhorse.tokens import Tokenizer

TEXTS = ["a horse", "pack", "a b c d e f g h i j k l m n o p q r s t u v w x y z", "horse horse"]
POOLINGS = ["mean", "cls", "max", "mean_sqrt_len_tokens", ("cls", "mean"), ("mean", "max", "cls")]


@pytest.fixture
def st(transformers: ModuleType) -> Iterator[ModuleType]:
    """The library; what it and its dependencies warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("sentence_transformers")


@pytest.fixture
def layout(
    st: ModuleType, save: Callable[..., Any], tokenizer: Callable[..., None], tmp_path: Path
) -> Callable[..., tuple[Any, Path]]:
    """Build a tiny model with the library and save it: the model and its folder."""
    from sentence_transformers.sentence_transformer import modules

    def build(pooling: Any = "mean", dense: tuple[Any, ...] = (), normalize: bool = False):
        _, folder = save("BertModel")
        tokenizer(folder)
        width = 32 * (1 if isinstance(pooling, str) else len(pooling))
        parts: list[Any] = [modules.Transformer(str(folder), max_seq_length=16)]
        parts.append(modules.Pooling(width // max(1, width // 32), pooling_mode=pooling))
        for outputs, bias, activation in dense:
            parts.append(modules.Dense(width, outputs, bias, activation))
            width = outputs
        parts += [modules.Normalize()] * normalize
        prompts = {"query": "a horse ", "document": ""}
        model = st.SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
        model.save(str(tmp_path / "layout"))
        return model, tmp_path / "layout"

    return build


def vectors(folder: Path) -> torch.Tensor:
    loaded = checkpoint.load(folder)
    tokens = Tokenizer.load(loaded.vocabulary, loaded.max_length, loaded.config.vocab_size)
    with torch.inference_mode():
        (result,) = loaded.model(Packed.build(tokens.encode(TEXTS)), "embed")
    return result


def their_vectors(model: Any) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)


DENSE = ((8, True, torch.nn.Tanh()), (4, False, torch.nn.Identity()))


@pytest.mark.parametrize(
    ("pooling", "dense", "normalize"),
    [(pooling, (), False) for pooling in POOLINGS] + [(("max", "cls"), DENSE, True)],
)
def test_both_ways(
    pooling: Any,
    dense: Any,
    normalize: bool,
    layout: Callable[..., tuple[Any, Path]],
    st: ModuleType,
    tmp_path: Path,
) -> None:
    model, folder = layout(pooling, dense, normalize)
    want = their_vectors(model)
    assert_close(vectors(folder), want, atol=1e-5, rtol=0)
    loaded = checkpoint.load(folder)
    assert loaded.max_length == 16 and loaded.prompts["query"] == "a horse "
    checkpoint.write(tmp_path / "ours", loaded)
    again = st.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert_close(their_vectors(again), want, atol=1e-6, rtol=0)
    assert again.prompts == model.prompts and again.max_seq_length == 16
    assert_close(vectors(tmp_path / "ours"), want, atol=1e-5, rtol=0)


def test_a_cross_encoder_stays_one(
    st: ModuleType, save: Callable[..., Any], tokenizer: Callable[..., None], tmp_path: Path
) -> None:
    _, folder = save("BertForSequenceClassification", num_labels=1)
    tokenizer(folder)
    reference = st.CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
    reference.save_pretrained(str(tmp_path / "layout"))
    loaded = checkpoint.load(tmp_path / "layout")
    assert list(loaded.model.heads) == ["pooled", "classify"] and loaded.labels == ("LABEL_0",)
    checkpoint.write(tmp_path / "ours", loaded)
    again = st.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    pairs = [("a horse", "pack"), ("b", "c d e")]
    assert_close(again.predict(pairs), reference.predict(pairs), atol=1e-6, rtol=0)


@pytest.fixture
def old(save: Callable[..., Any], tokenizer: Callable[..., None]) -> Path:
    """A folder as release 2 wrote it, transformer in its own folder, written by hand."""
    _, transformer = save("BertModel", to="old/0_Transformer")
    tokenizer(transformer)
    folder = transformer.parent
    kinds = ("0_Transformer", "1_Pooling", "2_Dense", "3_Normalize")
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": n,
                    "name": str(n),
                    "path": path,
                    "type": f"sentence_transformers.models.{path[2:]}",
                }
                for n, path in enumerate(kinds)
            ]
        )
    )
    for name, content in {
        "0_Transformer/sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"in_features": 32, "out_features": 5, "bias": True},
        "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0"}},
    }.items():
        put(folder, name, content)
    dense = {"linear.weight": torch.randn(5, 32), "linear.bias": torch.randn(5)}
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    return folder


def put(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_the_old_layout(old: Path, st: ModuleType) -> None:
    want = their_vectors(st.SentenceTransformer(str(old), device="cpu"))
    assert_close(vectors(old), want, atol=1e-5, rtol=0)
    loaded = checkpoint.load(old)
    assert loaded.max_length == 12 and loaded.vocabulary == old / "0_Transformer"
    assert loaded.name == "old" and loaded.prompts == {} and loaded.default_prompt is None


def modules(*kinds: str) -> list[dict[str, str]]:
    paths = {"Transformer": "0_Transformer", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": paths.get(kind, "")}
        for kind in kinds
    ]


POOLING, DENSE_CONFIG = "1_Pooling/config.json", "2_Dense/config.json"
SIZES = {"in_features": 32, "out_features": 5}
REFUSED: dict[str, tuple[str, Any, str]] = {
    "no list": ("modules.json", {"type": "x"}, "module 'x' does not run here"),
    "a number": ("modules.json", [1], "does not run here"),
    "another module": ("modules.json", modules("Transformer", "CNN"), r"models\.CNN' does not run"),
    "another package": (
        "modules.json",
        [{"type": "evil.models.Transformer", "path": ""}],
        r"module 'evil\.models\.Transformer'",
    ),
    "another order": (
        "modules.json",
        modules("Transformer", "Dense", "Pooling"),
        "Transformer, Dense, Pooling do not run in this order",
    ),
    "no transformer": ("modules.json", modules("Pooling"), "do not run in this order"),
    "a module elsewhere": (
        "modules.json",
        [
            modules("Transformer")[0],
            {"type": "sentence_transformers.models.Pooling", "path": "../x"},
        ],
        r"'\.\./x' is not a plain file name",
    ),
    "another pooling": (POOLING, {"pooling_mode": ["cls", "attention"]}, "pooling 'attention'"),
    "pooling is no name": (POOLING, {"pooling_mode": 3}, "pooling 3"),
    "no pooling": (POOLING, {"pooling_mode": []}, "pooling_mode is empty"),
    "activation": (DENSE_CONFIG, SIZES | {"activation_function": "os.system"}, "'os.system'"),
    "activation is no class": (
        DENSE_CONFIG,
        SIZES | {"activation_function": "torch.nn.modules.activation.Threshold"},
        r"activation\.Threshold' does not run here; of torch's own there are CELU, ELU",
    ),
    "activation of others": (DENSE_CONFIG, SIZES | {"activation_function": "Tanh"}, "'Tanh' does"),
    "halves of an odd number": (
        DENSE_CONFIG,
        SIZES | {"activation_function": "torch.nn.modules.activation.GLU"},
        "GLU halves its 5 numbers",
    ),
    "no residual weights": (
        DENSE_CONFIG,
        SIZES | {"use_residual": True},
        r"1 missing \(2_Dense/residual\.weight \[5, 32\]\)",
    ),
    "another input": (DENSE_CONFIG, SIZES | {"module_input_name": "token_embeddings"}, "module_in"),
    "sizes": (DENSE_CONFIG, SIZES | {"in_features": "32"}, "in_features is '32', not a count"),
    "other sizes": (DENSE_CONFIG, SIZES | {"in_features": 16}, "takes 16 features and gets 32"),
    "other outputs": (
        DENSE_CONFIG,
        SIZES | {"out_features": 6},
        r"2_Dense/linear\.weight: \[5, 32\] for \[6, 32\]",
    ),
    "no bias": (DENSE_CONFIG, SIZES | {"bias": False}, r"1 unknown \(2_Dense/linear\.bias\)"),
    "prompts": ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts do not map"),
    "default prompt": (
        "config_sentence_transformers.json",
        {"prompts": {"a": "b"}, "default_prompt_name": "c"},
        "no default prompt 'c'",
    ),
    "normalized elsewhere": (
        "3_Normalize/config.json",
        {"module_input_name": "token_embeddings"},
        "module_input_name 'token_embeddings' does not run here; encode with sentence-transf",
    ),
    "queries that are widened": (
        "0_Transformer/sentence_bert_config.json",
        {"query_expansion": {"length": 8}},
        "query_expansion .* does not run here",
    ),
    "length": ("0_Transformer/sentence_bert_config.json", {"max_seq_length": "12"}, "length '12'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layouts_that_do_not_run(case: str, old: Path) -> None:
    name, content, message = REFUSED[case]
    put(old, name, content)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(old)


def test_modules_that_do_not_run_are_refused_by_name(st: ModuleType, old: Path) -> None:
    """All that the library has besides, under the names that it writes and wrote."""
    from sentence_transformers.sentence_transformer import modules as library

    kinds = {name: getattr(library, name) for name in library.__all__}
    known = (*sentence.KINDS, "Router")  # which leads to modules, for sparse models
    others = [kind for kind in kinds.values() if kind.__name__ not in known]
    assert {"CNN", "LSTM", "WordEmbeddings", "BoW", "StaticEmbedding"} <= {
        kind.__name__ for kind in others
    }
    for kind in others:
        for module in (kind.__module__, "sentence_transformers.models"):
            name = f"{module}.{kind.__name__}"
            listed = [{"type": name, "path": "0_Transformer"}, *modules("Pooling")]
            put(old, "modules.json", listed)
            with pytest.raises(CheckpointError, match="does not run here") as caught:
                checkpoint.load(old)
            assert repr(name) in str(caught.value)
            assert "encode with sentence-transformers itself" in str(caught.value)


def test_lower_case_is_the_tokenizers(old: Path, tokenizer: Callable[..., None]) -> None:
    put(old, "0_Transformer/sentence_bert_config.json", {"do_lower_case": True})
    checkpoint.load(old)
    tokenizer(old / "0_Transformer", do_lower_case=False)
    with pytest.raises(CheckpointError, match="the layout lowercases texts"):
        checkpoint.load(old)


def test_a_dense_layer_that_is_not_finite(old: Path) -> None:
    path = old / "2_Dense" / "model.safetensors"
    save_file({k: v.fill_(torch.inf) for k, v in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"2_Dense/linear\.weight: 160 values"):
        checkpoint.load(old)


ODD: list[Any] = [None, True, -1, 1e999, "x", "BertModel", [[]], {"x": [1]}]


def test_odd_values_anywhere(old: Path) -> None:
    """Whatever stands in a settings file: the model loads or a `CheckpointError` says why not."""
    outcomes = {True: 0, False: 0}
    for path in sorted(old.rglob("*.json")):
        original = path.read_text()
        if path.name == "modules.json":
            continue
        for key in [*json.loads(original), "id2label", "problem_type", "prompts", "pooling_mode"]:
            for value in ODD:
                path.write_text(json.dumps(json.loads(original) | {key: value}))
                outcomes[loads(old)] += 1
        for value in ODD:
            path.write_text(json.dumps(value))
            outcomes[loads(old)] += 1
        path.write_text(original)
    assert loads(old) and outcomes[True] > 100 and outcomes[False] > 100


def loads(folder: Path) -> bool:
    try:
        checkpoint.load(folder)
    except CheckpointError:
        return False
    return True
