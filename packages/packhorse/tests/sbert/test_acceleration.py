"""Accelerated models give the numbers of their library, and are still its own models."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse.errors import InputError
from packhorse.sbert.acceleration import AccelerationWarning, PackedInference

from ..runtime import retrieval_models as models
from ..runtime.retrieval_models import TEXTS

# What the libraries warn of is not ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::packhorse.sbert.acceleration.AccelerationWarning"),
]
CLOSE = 1e-5
PAIRS = [("the horse", text) for text in TEXTS]
DENSE: list[dict[str, Any]] = [
    {},
    {"normalize_embeddings": True, "batch_size": 2},
    {"truncate_dim": 8, "convert_to_tensor": True},
    {"convert_to_numpy": False},
    {"output_value": "token_embeddings"},
    {"prompt": "a mat "},
    {"precision": "uint8"},
]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").logging.disable_progress_bar()
        pytest.importorskip("sentence_transformers")
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.bert(tmp_path_factory.mktemp("model") / "bert", "BertModel")


@pytest.fixture
def dense(base: Path) -> Any:
    return dense_model(base)


def dense_model(base: Path, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    pooling = modules.Pooling(32, "mean", include_prompt=False)
    parts = [modules.Transformer(str(base)), pooling, modules.Dense(32, 16)]
    return SentenceTransformer(modules=parts, device="cpu", **options)


def encoder_of(model: Any) -> Any:
    return model._inference._encoder


def far(actual: Any, expected: Any) -> float:
    """The largest difference, of results of one kind and shape."""
    assert type(actual) is type(expected)
    if isinstance(actual, list):
        return max(map(far, actual, expected))
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if actual.dtype == np.uint8:
        actual, expected = actual.astype(int), expected.astype(int)
    return float(abs(actual - expected).max())


@pytest.mark.parametrize("options", DENSE, ids=str)
def test_vectors_are_the_librarys(dense: Any, options: dict[str, Any]) -> None:
    single = {} if "precision" in options else options  # one vector has no ranges
    expected = dense.encode(TEXTS, **options), dense.encode(TEXTS[1], **single)
    assert packhorse.accelerate(dense) is dense and packhorse.accelerate(dense) is dense
    close = 1 if "precision" in options else CLOSE  # a number may lie between two bytes
    assert far(dense.encode(TEXTS, **options), expected[0]) <= close
    assert far(dense.encode(TEXTS[1], **single), expected[1]) <= close
    assert encoder_of(dense) is not None, "the library's own method ran"
    assert type(dense).__name__ == "SentenceTransformer" and dense[1].pooling_mode == "mean"


def test_minilm(minilm: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm), device="cpu")
    texts = ["A man eats.", "", "a b " * 200, "Die Straße ist naß. 東京"]
    expected = model.encode(texts)
    packhorse.accelerate(model)
    assert far(model.encode(texts), expected) <= CLOSE
    model.max_seq_length = 8  # and whatever else decides which tokens there are
    cut = model.encode(texts)
    del model._inference
    assert far(cut, model.encode(texts)) <= CLOSE < far(cut, expected)


@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_the_librarys(labels: int, base: Path) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(base), num_labels=labels, device="cpu")
    calls: list[dict[str, Any]] = [
        {},
        {"activation_fn": torch.nn.Identity(), "convert_to_tensor": True},
        {"apply_softmax": True, "convert_to_numpy": False},
        {"prompt": "a mat "},
    ]
    expected = [model.predict(PAIRS, **options) for options in calls]
    packhorse.accelerate(model)
    for options, scores in zip(calls, expected, strict=True):
        assert far(model.predict(PAIRS, **options), scores) <= CLOSE
    if labels == 1:
        ranking: list[Any] = model.rank("the horse", TEXTS)
        scores = [row["score"] for row in ranking]
        np.testing.assert_allclose(scores, np.sort(expected[0])[::-1], atol=CLOSE)
    assert encoder_of(model) is not None


def test_weights_of_words_are_the_librarys(tmp_path: Path) -> None:
    model = models.splade(models.bert(tmp_path / "mlm"), tmp_path / "model", "max", "relu")
    calls: list[dict[str, Any]] = [
        {},
        {"max_active_dims": 4},
        {"convert_to_sparse_tensor": False},
        {"convert_to_tensor": False, "save_to_cpu": True},
    ]
    expected = [model.encode(TEXTS, **options) for options in calls]
    packhorse.accelerate(model)
    for options, vectors in zip(calls, expected, strict=True):
        ours = model.encode(TEXTS, **options)
        assert type(ours) is type(vectors)
        rows = zip(ours, vectors, strict=True)
        for actual, row in rows:
            assert actual.is_sparse == row.is_sparse
            assert far(actual.to_dense(), row.to_dense()) <= CLOSE * max(1.0, row.to_dense().max())
    assert encoder_of(model) is not None


def test_copies_are_accelerated_too(dense: Any) -> None:
    expected = dense.encode(TEXTS)
    packhorse.accelerate(dense)
    for model in (copy.deepcopy(dense), pickle.loads(pickle.dumps(dense))):
        assert isinstance(model._inference, PackedInference) and model._inference.model is model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        assert far(model.encode(TEXTS), dense.encode(TEXTS)) > 1e-2
        assert far(dense.encode(TEXTS), expected) <= CLOSE


def test_training_goes_on_and_is_seen(dense: Any) -> None:
    packhorse.accelerate(dense)
    before = dense.encode(TEXTS)
    dense.train()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=0.05)
    features = dense.preprocess(TEXTS)
    dense(features)["sentence_embedding"].square().sum().backward()
    optimizer.step()
    trained = dense.encode(TEXTS)
    assert far(trained, before) > 1e-2
    assert encoder_of(dense) is not None
    del dense._inference
    assert far(trained, dense.encode(TEXTS)) <= CLOSE
    # In training mode even what no version counter shows is seen.
    packhorse.accelerate(dense)
    dense.encode(TEXTS)
    dense.train()
    dense[2].linear.bias.data += 1
    changed = dense.encode(TEXTS)
    del dense._inference
    assert far(changed, dense.encode(TEXTS)) <= CLOSE < far(changed, trained)


def test_what_is_not_packed_runs_as_before(dense: Any) -> None:
    everything = dense.encode(TEXTS[:2], output_value=None)
    expected = dense.encode(TEXTS)
    packhorse.accelerate(dense)
    found = dense.encode(TEXTS[:2], output_value=None)
    assert [row.keys() for row in found] == [row.keys() for row in everything]
    calls: list[bool] = []
    hook = dense[0].register_forward_hook(lambda *_: calls.append(True))
    dense.encode(TEXTS)
    assert calls, "a hook saw nothing"
    hook.remove()
    calls.clear()
    assert far(dense.encode(TEXTS), expected) <= CLOSE and not calls
    with pytest.raises(ValueError, match="does not use"):
        dense.encode(TEXTS, unknown=1)


def test_other_results_are_noticed(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own way is taken where its code computes something else than ours."""
    packhorse.accelerate(dense)
    forward = type(dense[1]).forward

    def twice(self: Any, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        features = forward(self, features, **options)
        features["sentence_embedding"] = 2 * features["sentence_embedding"]
        return features

    monkeypatch.setattr(type(dense[1]), "forward", twice)
    with pytest.warns(AccelerationWarning, match="its results differ by"):
        vectors = dense.encode(TEXTS)
    del dense._inference
    assert far(vectors, dense.encode(TEXTS)) == 0


def test_a_model_that_changes_its_modules(dense: Any) -> None:
    from sentence_transformers.sentence_transformer import modules

    packhorse.accelerate(dense)
    before = dense.encode(TEXTS)
    dense[1] = modules.Pooling(32, "max")
    maxima = dense.encode(TEXTS)
    assert far(maxima, before) > 1e-2 and encoder_of(dense) is not None
    dense[0].auto_model.embeddings.word_embeddings.weight = torch.nn.Parameter(
        2 * dense[0].auto_model.embeddings.word_embeddings.weight
    )
    doubled = dense.encode(TEXTS)
    assert far(doubled, maxima) > 1e-2
    dense.append(modules.CNN(16, 16))
    with (
        pytest.warns(AccelerationWarning, match=r"not computed packed any more: .*CNN"),
        pytest.raises(RuntimeError, match="to have 16 channels"),  # as without us
    ):
        dense.encode(TEXTS)
    del dense[3]
    assert far(dense.encode(TEXTS), doubled) <= CLOSE and encoder_of(dense) is not None


def test_other_models_are_refused_and_stay_as_they_were(base: Path) -> None:
    from sentence_transformers.sentence_transformer import modules

    with pytest.raises(InputError, match="of sentence-transformers, not a Linear"):
        packhorse.accelerate(torch.nn.Linear(2, 2))  # type: ignore[type-var]
    model = dense_model(base)
    model[1] = modules.WeightedLayerPooling(32, num_hidden_layers=2)
    with pytest.raises(InputError, match=r"cannot be accelerated: .*WeightedLayerPooling"):
        packhorse.accelerate(model)
    assert "_inference" not in vars(model)


def test_a_folder_that_is_gone_does_not_matter(base: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    dense_model(base).save_pretrained(str(tmp_path / "model"))
    model = packhorse.accelerate(SentenceTransformer(str(tmp_path / "model"), device="cpu"))
    shutil.rmtree(tmp_path / "model")
    expected = model.encode(TEXTS)
    assert far(copy.deepcopy(model).encode(TEXTS), expected) <= CLOSE
