"""The shape of sentence-transformers: its library is the measure, on the same weights."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse import progress
from packhorse.errors import CheckpointError, InputError
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.precision import CalibrationWarning
from packhorse.runtime.sentences import SIMILARITIES, PromptWarning

CLOSE = 1e-5
TEXTS = ["A man eats.", "", "a b " * 12, "Die Straße ist naß. 東京", "A man eats."]
PROMPTS = {"query": "query: ", "passage": "passage: "}


@pytest.fixture(scope="module")
def st() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def both(minilm: Path, st: ModuleType, tmp_path_factory: Any) -> Callable[..., tuple[Encoder, Any]]:
    """The model opened here and there, after its settings were changed; each is opened once."""
    models: dict[str, tuple[Encoder, Any]] = {}
    folder = tmp_path_factory.mktemp("model") / "mini"
    shutil.copytree(minilm, folder)

    def build(**settings: Any) -> tuple[Encoder, Any]:
        if (key := json.dumps(settings)) not in models:
            (folder / "config_sentence_transformers.json").write_text(key)
            library_model = st.SentenceTransformer(str(folder), device="cpu")
            models[key] = packhorse.load(folder, device="cpu", dtype="fp32"), library_model
        encoder, library_model = models[key]
        return replace(encoder, warned=set()), library_model

    return build


@pytest.fixture(scope="module")
def plain(both: Callable[..., tuple[Encoder, Any]]) -> tuple[Encoder, Any]:
    return both()


def far(actual: Any, expected: Any) -> float:
    """The largest difference, of arrays or tensors of one kind and shape."""
    assert type(actual) is type(expected)
    if isinstance(actual, list):
        return max(map(far, actual, expected))
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    return float(abs(actual - expected).max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize_embeddings": True, "batch_size": 2},
        {"truncate_dim": 64},
        {"truncate_dim": 64, "normalize_embeddings": True},
        {"truncate_dim": 1000, "convert_to_tensor": True},
        {"convert_to_numpy": False},
        {"output_value": "token_embeddings"},
        {"prompt": "query: ", "device": "cpu"},
        {"prompt_name": "query"},
    ],
    ids=str,
)
def test_vectors_are_theirs(plain: tuple[Encoder, Any], options: dict[str, Any]) -> None:
    encoder, library_model = plain
    assert far(encoder.encode(TEXTS, **options), library_model.encode(TEXTS, **options)) <= CLOSE
    assert (
        far(encoder.encode(TEXTS[0], **options), library_model.encode(TEXTS[0], **options)) <= CLOSE
    )


def test_long_texts_are_cut_as_there(plain: tuple[Encoder, Any]) -> None:
    encoder, library_model = plain
    text = "one two three " * 90
    assert far(encoder.encode([text, "a"]), library_model.encode([text, "a"])) <= CLOSE


@pytest.mark.parametrize("kind", [tuple, np.array, iter])
def test_other_lists_of_texts(plain: tuple[Encoder, Any], kind: Callable[..., Any]) -> None:
    assert far(plain[0].encode(sentences=kind(TEXTS)), plain[0].encode(TEXTS)) == 0


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_bits(plain: tuple[Encoder, Any], precision: Any) -> None:
    actual, expected = (model.encode(TEXTS, precision=precision) for model in plain)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape == (len(TEXTS), 48)
    shift = 128 if precision == "binary" else 0
    bits = [
        np.unpackbits((vectors.astype(int) + shift).astype(np.uint8))
        for vectors in (actual, expected)
    ]
    unclear = abs(plain[0].encode(TEXTS)).ravel() < CLOSE  # the sign of nearly nothing
    assert ((bits[0] == bits[1]) | unclear).all() and unclear.mean() < 0.01


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_bytes(plain: tuple[Encoder, Any], st: ModuleType, precision: Any) -> None:
    encoder, library_model = plain
    with pytest.warns(CalibrationWarning, match="5 vectors calibrate badly"):
        actual = encoder.encode(TEXTS, precision=precision)
    expected = library_model.encode(TEXTS, precision=precision)
    # By one step where a number lies on the edge between two.
    assert actual.dtype == expected.dtype
    assert abs(actual.astype(int) - expected).max() <= 1
    ranges = np.float32([[-0.2] * 384, [0.2] * 384])
    for vectors in (
        encoder.encode(TEXTS, precision=precision, ranges=ranges),
        encoder.embed(TEXTS, precision=precision, ranges=ranges),
    ):
        theirs = st.util.quantization.quantize_embeddings(encoder.embed(TEXTS), precision, ranges)
        assert (vectors == theirs).all()


def test_no_texts_give_no_vectors(plain: tuple[Encoder, Any]) -> None:
    encoder, library_model = plain
    assert len(encoder.encode([])) == len(library_model.encode([])) == 0
    assert encoder.encode([], truncate_dim=8).shape == (0, 8)  # theirs has no second dimension
    assert encoder.encode([], convert_to_tensor=True).shape == (0, 384)
    assert encoder.encode([], convert_to_numpy=False) == []
    assert encoder.encode([], output_value="token_embeddings") == []


def test_options_have_their_names_order_and_defaults(st: ModuleType) -> None:
    def shape(method: Callable[..., Any]) -> list[tuple[str, Any]]:
        parameters = inspect.signature(method).parameters.values()
        return [
            (parameter.name, parameter.default)
            for parameter in parameters
            if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
        ]

    actual, expected = shape(Encoder.encode), shape(st.SentenceTransformer.encode)
    assert expected[1] == ("inputs", inspect.Parameter.empty)
    assert actual[2:] == expected[2:] and actual[1][0] == "inputs"


@pytest.mark.parametrize("default", [None, "passage"])
def test_prompts(both: Callable[..., tuple[Encoder, Any]], default: str | None) -> None:
    encoder, library_model = both(prompts=PROMPTS, default_prompt_name=default)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("encode", {}),
        ("encode", {"prompt": ""}),
        ("encode", {"prompt": "about: ", "prompt_name": "query"}),
        ("encode", {"prompt_name": "passage"}),
        ("encode", {"output_value": "token_embeddings"}),
        ("encode_query", {}),
        ("encode_query", {"prompt_name": "passage", "truncate_dim": 32}),
        ("encode_document", {}),
        ("encode_document", {"prompt": "passage: "}),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PromptWarning)
        for method, options in calls:
            results = [
                getattr(model, method)(TEXTS, **options) for model in (encoder, library_model)
            ]
            assert far(*results) <= CLOSE, (method, options)
        bare = encoder.encode(TEXTS, prompt="")
        assert far(encoder.encode_query(TEXTS), bare) > 0.01  # a prompt that is lost would be seen


def test_an_unused_prompt_is_warned_about_once(both: Callable[..., tuple[Encoder, Any]]) -> None:
    encoder, _ = both(prompts=PROMPTS)
    with pytest.warns(PromptWarning, match=r"mini has prompts \(query, passage\)") as seen:
        encoder.encode(["a"])
    assert [warning.filename for warning in seen] == [__file__]
    with pytest.warns(PromptWarning, match="no prompt 'document'.*prompt_name='passage'") as seen:
        encoder.encode_document(["a"])
    assert [warning.filename for warning in seen] == [__file__]
    encoder.encode(["a"])  # warnings are errors here: this one and those that follow are silent
    encoder.encode_document(["a"])
    again = replace(encoder, warned=set())
    again.encode_query("a")
    again.encode("a", prompt="")
    again.encode("a", prompt_name="passage")
    replace(again, default_prompt="query").encode("a")
    replace(again, prompts={"query": "", "document": ""}).encode("a")
    replace(again, prompts={"query": "query: "}).encode_document("a")


def test_refusals(plain: tuple[Encoder, Any], both: Callable[..., tuple[Encoder, Any]]) -> None:
    encoder, _ = plain
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt_name": "nope"}, "has no prompt 'nope'; it has: query, document$"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"truncate_dim": 0}, "truncate_dim is 0"),
        ({"output_value": None}, "output_value is None; use one of sentence_embedding, token"),
        ({"precision": "int4"}, "precision is 'int4'; use one of float32, int8"),
        ({"precision": "int8"}, "one vector has no range; pass ranges="),
        ({"device": "meta"}, "meta"),
        ({"device": ["cpu", "cpu"]}, "runs in this process"),
        ({"pool": {"processes": []}}, "runs in this process"),
        ({"chunk_size": 10}, "runs in this process"),
        ({"inputs": None}, "a text or a list of texts, not None"),
        ({"inputs": {"text": "a"}}, "a text or a list of texts, not {'text'"),
        ({"inputs": [("a", "b")], "prompt": "x "}, "before single texts"),
    ]
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            encoder.encode(**{"inputs": ["a"], **options})
    with pytest.raises(InputError, match="it has: query, document, passage"):
        both(prompts=PROMPTS)[0].encode("a", prompt_name="title")
    with pytest.raises(TypeError, match="processing_kwargs"):
        encoder.encode("a", processing_kwargs={})  # pyright: ignore[reportCallIssue]
    with pytest.raises(CheckpointError, match="no 'embed' head"):
        replace(encoder, heads=()).encode("a")


@pytest.mark.parametrize("name", SIMILARITIES)
def test_similarity(plain: tuple[Encoder, Any], rng: np.random.Generator, name: Any) -> None:
    encoder, library_model = replace(plain[0], similarity_fn_name=name), plain[1]
    a, b = rng.normal(size=(2, 5, 16)).astype(np.float32)
    b[0] = 0
    library_model.similarity_fn_name = name
    pairs: list[tuple[Any, Any]] = [(a, b), (a[1], b[1]), (torch.tensor(a), b), (list(a), list(b))]
    for first, second in pairs:
        assert (
            far(encoder.similarity(first, second), library_model.similarity(first, second)) <= CLOSE
        )
        scores = (
            encoder.similarity_pairwise(first, second),
            library_model.similarity_pairwise(first, second),
        )
        assert far(*scores) <= CLOSE


def test_what_else_callers_ask_for(plain: tuple[Encoder, Any]) -> None:
    encoder, library_model = plain
    assert encoder.similarity_fn_name == "cosine"
    assert encoder.max_seq_length == library_model.max_seq_length == 256
    assert encoder.get_embedding_dimension() == library_model.get_embedding_dimension() == 384
    short = replace(encoder, truncate_dim=64)
    assert short.get_sentence_embedding_dimension() == short.encode("a").size == 64
    with pytest.raises(InputError, match="similarity_fn_name is 'maxsim'; use one of cosine"):
        replace(encoder, similarity_fn_name="maxsim").similarity(np.ones(1), np.ones(1))


def test_progress_is_shown_to_who_asks(
    plain: tuple[Encoder, Any], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain[0].encode(TEXTS)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    plain[0].encode(TEXTS, show_progress_bar=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "Encoding" in captured.err and "100%" in captured.err


def test_without_mteb_there_is_no_model_meta(
    plain: tuple[Encoder, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mteb.models.model_meta", None)
    assert not hasattr(plain[0], "mteb_model_meta")


def test_a_folder_says_how_its_vectors_are_compared(
    both: Callable[..., tuple[Encoder, Any]],
) -> None:
    encoder, library_model = both(similarity_fn_name="dot", truncate_dim=32)
    assert (encoder.similarity_fn_name, encoder.truncate_dim) == ("dot", 32)
    assert far(encoder.encode(TEXTS), library_model.encode(TEXTS)) <= CLOSE
    vectors = encoder.encode(TEXTS)
    assert (
        far(encoder.similarity(vectors, vectors), library_model.similarity(vectors, vectors))
        <= CLOSE
    )
