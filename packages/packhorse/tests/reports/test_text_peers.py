"""Other libraries read texts to the same numbers; what they do not do is said in a line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse.errors import InputError, MissingExtra
from packhorse.model.heads import Embed
from packhorse.reports import text_peers
from packhorse.reports.text_peers import PEERS, TextPeerSetting, choose_peer, open_peer
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.evaluation.reading import reader
from packhorse.runtime.tasks import TruncationWarning

pytest.importorskip("transformers")

TEXTS = ["A mule.", "The horse carries sacks to the market. " * 4, "Where is the horse?", "?"]
LONGEST = 16  # tokens, which one of them has not


@pytest.fixture(scope="module")
def folder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM with prompts, which it lacks."""
    copy = Path(shutil.copytree(minilm, tmp_path_factory.mktemp("prompted") / "model"))
    prompts = {"prompts": {"query": "find: ", "passage": "here: "}}
    (copy / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return copy


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return packhorse.load(folder, device="cpu", dtype="fp32")


@pytest.mark.parametrize("name", PEERS)
def test_vectors_are_ours_with_every_prompt(name: str, encoder: Encoder, folder: Path) -> None:
    pytest.importorskip(name.replace("-", "_"))
    their_read = open_peer(name, TextPeerSetting(folder, encoder, "embed", LONGEST, 2))
    our_read = reader(encoder, "embed", LONGEST)
    steps: list[tuple[int, int]] = []
    vectors: dict[Any, np.ndarray] = {}
    for role in (None, "query", "document"):
        vectors[role] = their_read(TEXTS, role, lambda *counts: steps.append(counts))
        with pytest.warns(TruncationWarning):
            np.testing.assert_allclose(vectors[role], our_read(TEXTS, role), atol=2e-6)
    assert steps == [(2, 4), (4, 4)] * 3
    assert np.abs(vectors["query"] - vectors["document"]).max() > 1e-3  # the prompts show
    assert vectors[None].dtype == np.float32


def test_every_pooling_is_ours(encoder: Encoder, folder: Path) -> None:
    for kind, normal in (("cls", True), ("max", False), ("mean", False)):
        head = Embed((kind,), normalize=normal)
        encoder.backend.model.heads["embed"] = head  # pyright: ignore
        changed = replace(encoder, embedder=head)
        their_read = open_peer("transformers", TextPeerSetting(folder, changed, "embed", 64, 3))
        short = TEXTS[::2]
        np.testing.assert_allclose(their_read(short), changed.embed(short), atol=2e-5)
    encoder.backend.model.heads["embed"] = encoder.embedder  # pyright: ignore
    several = replace(encoder, embedder=Embed(("mean", "cls")))
    with pytest.raises(InputError, match="pass --beside sentence-transformers or none"):
        open_peer("transformers", TextPeerSetting(folder, several, "embed", 64))


def test_logits_are_ours(tmp_path: Path) -> None:
    import transformers

    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "horse",
        "carries",
        "sacks",
        "?",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
        initializer_range=0.4,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    encoder = packhorse.load(tmp_path, device="cpu", dtype="fp32")
    their_read = open_peer("transformers", TextPeerSetting(tmp_path, encoder, "classify", 64, 2))
    our_read = reader(encoder, "classify")
    for texts in (["the horse", "the horse carries sacks", "?"], [("the", "horse ?"), ("?", "?")]):
        np.testing.assert_allclose(their_read(texts), our_read(texts), atol=1e-5)
    assert np.ptp(our_read(["the horse", "?"]), axis=0).max() > 1e-2


def test_which_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"sentence-transformers", "transformers"}
    monkeypatch.setattr(text_peers, "_installed", there.__contains__)
    assert choose_peer(None, "embed") == "sentence-transformers"
    assert choose_peer(None, "classify") == choose_peer("transformers", "embed") == "transformers"
    with pytest.raises(InputError, match="has no 'classify' head to compare with"):
        choose_peer("sentence-transformers", "classify")
    there.remove("sentence-transformers")
    assert choose_peer(None, "embed") == "transformers"
    with pytest.raises(MissingExtra, match=r"pip install 'packhorse\[peers\]'"):
        choose_peer("sentence-transformers", "embed")
    there.clear()
    assert choose_peer(None, "embed") is None


def test_a_folder_that_cannot_be_opened_is_one_line(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"transformers fails on model .*pass --beside none"):
        open_peer("transformers", TextPeerSetting(tmp_path, encoder, "embed", 64))
