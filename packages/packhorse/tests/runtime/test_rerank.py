"""Rankings are those of sentence-transformers' CrossEncoder, scores and order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse.errors import CheckpointError, InputError

from .retrieval_models import bert

QUERY = "who carries two sacks to market ?"
DOCUMENTS = ["the horse and the mule", "a dog barks", "the cat sat on a mat .", "home and market"]
IDENTITY = "torch.nn.modules.linear.Identity"
# What a folder says: keys of config.json, and of config_sentence_transformers.json if it has one.
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "nothing said": ({}, None),
    "before release 4": ({"sbert_ce_default_activation_function": IDENTITY}, None),
    "since release 4": ({"sentence_transformers": {"activation_fn": IDENTITY}}, None),
    "tanh": ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, None),
    "modules": ({}, {"activation_fn": IDENTITY}),
    "both, of which the newer counts": (
        {"sbert_ce_default_activation_function": IDENTITY},
        {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
    ),
    "code of the repository, which nobody runs": (
        {"sentence_transformers": {"activation_fn": "my_code.Halved"}},
        None,
    ),
}


def write(folder: Path, config: dict[str, Any], settings: dict[str, Any] | None) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    bert(folder, "BertForSequenceClassification")
    stored = json.loads((folder / "config.json").read_text())
    model = BertForSequenceClassification(
        BertConfig.from_dict({**stored, "num_labels": 1, "initializer_range": 0.5})
    )
    model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | config))
    if settings is not None:
        module = {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.models.Transformer",
        }
        (folder / "modules.json").write_text(json.dumps([module]))
        (folder / "sentence_bert_config.json").write_text(
            json.dumps({"transformer_task": "sequence-classification"})
        )
        (folder / "config_sentence_transformers.json").write_text(
            json.dumps({"model_type": "CrossEncoder", **settings})
        )
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FOLDERS)
def test_scores_are_those_of_the_cross_encoder(name: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = write(tmp_path / "model", *FOLDERS[name])
    theirs = CrossEncoder(str(folder), device="cpu")
    ours = packhorse.load(folder, device="cpu", dtype="fp32")
    want: list[dict[str, Any]] = theirs.rank(QUERY, DOCUMENTS)  # type: ignore[assignment]
    ranking = ours.rerank(QUERY, DOCUMENTS)
    assert [rank.index for rank in ranking] == [row["corpus_id"] for row in want]
    scores = np.array([rank.score for rank in ranking])
    np.testing.assert_allclose(scores, [row["score"] for row in want], atol=1e-5)
    raw = ours.rerank(QUERY, DOCUMENTS, raw=True)
    pairs = [(QUERY, rank.text) for rank in raw]
    logits = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose([rank.score for rank in raw], logits, atol=1e-5)
    # The control: the logits are no scores of this model, unless it says so.
    is_raw = np.allclose(scores, logits, atol=1e-3)
    assert is_raw == (ours.score_activation == "Identity")


def test_an_activation_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    said = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GLU"}}
    ours = packhorse.load(write(tmp_path / "model", said, None), device="cpu")
    with pytest.raises(CheckpointError, match=r"scores by GLU are not computed here.*raw=True"):
        ours.rerank(QUERY, DOCUMENTS)
    assert len(ours.rerank(QUERY, DOCUMENTS, raw=True)) == 4


def test_truncate_dim_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    home = bert(tmp_path / "bert", "BertModel")
    transformer = modules.Transformer(str(home))
    parts = [transformer, modules.Pooling(32, "mean"), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "model"))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", truncate_dim=8)
    ours = packhorse.load(tmp_path / "model", device="cpu", dtype="fp32", truncate_dim=8)
    whole = packhorse.load(tmp_path / "model", device="cpu", dtype="fp32")
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 8
    assert ours.fingerprint != whole.fingerprint
    texts = [*DOCUMENTS, QUERY]
    want = theirs.encode(texts)
    assert want.shape == (5, 8)
    np.testing.assert_allclose(ours.encode(texts), want, atol=1e-6)
    np.testing.assert_allclose(ours.embed(texts), want, atol=1e-6)  # a list, in bulk
    np.testing.assert_allclose(ours.embed(texts[:1]), want[:1], atol=1e-6)  # as a job
    np.testing.assert_allclose(
        ours.encode(texts, truncate_dim=16), theirs.encode(texts, truncate_dim=16), atol=1e-6
    )
    unit = theirs.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(ours.embed(texts, normalize=True), unit, atol=1e-6)
    np.testing.assert_allclose(ours.embed(texts[:1], normalize=True), unit[:1], atol=1e-6)
    assert np.abs(unit - want).max() > 1e-3  # the control: cut vectors are shorter than 1
    late = ours.embed(texts[:2], late_chunking=True)
    np.testing.assert_array_equal(late, whole.embed(texts[:2], late_chunking=True)[:, :8])
    assert ours.embed([]).shape == (0, 8)


def test_a_truncate_dim_that_cannot_be_is_refused(tmp_path: Path) -> None:
    home = bert(tmp_path / "bert", "BertModel")
    with pytest.raises(InputError, match="truncate_dim is 0"):
        packhorse.load(home, truncate_dim=0)
    with pytest.raises(InputError, match="truncate_dim is 33; vectors of bert have 32 numbers"):
        packhorse.load(home, truncate_dim=33)
    with pytest.raises(InputError, match="model makes no vectors"):
        packhorse.load(write(tmp_path / "model", {}, None), truncate_dim=4)
