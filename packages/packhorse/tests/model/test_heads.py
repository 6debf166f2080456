"""Heads over packed sequences, against plain loops over each sequence by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed, Mlm, PooledLabels, Pooler, ReplacedTokenDetection
from packhorse.model.vectors import Dense
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

LENGTHS = (3, 1, 8, 5)


def make_packed(spare: int = 0) -> Packed:
    packed = Packed.build([SyntheticSequence(np.zeros(n, int), np.zeros(n, int)) for n in LENGTHS])
    return packed.pad(len(packed.ids) + spare, 16) if spare else packed


def test_several_poolings_stand_side_by_side_and_are_projected() -> None:
    packed = make_packed()
    hidden = torch.randn(len(packed.ids), 6)
    dense = Dense(12, 5, activation="Tanh")
    head = Embed(("mean", "max"), stages=[dense])
    assert head.width(6) == 5 and Embed(("mean", "max")).width(6) == 12
    both = torch.cat([Embed((mode,), normalize=False)(hidden, packed) for mode in head.pooling], 1)
    expected = torch.nn.functional.normalize(torch.tanh(dense.linear(both)), dim=-1)
    torch.testing.assert_close(head(hidden, packed), expected)


def test_half_precision_is_averaged_in_float() -> None:
    packed = make_packed()
    hidden = torch.randn(len(packed.ids), 6, dtype=torch.bfloat16)
    assert Embed(("mean",))(hidden, packed).dtype == torch.float32


def test_a_pooled_head_reads_first_tokens_only() -> None:
    config = BertConfig(10, 6, 1, 1, 8)
    head = PooledLabels(config, Pooler(config), 3).eval()
    packed = make_packed()
    hidden = torch.randn(len(packed.ids), 6)
    before = head(hidden, packed)
    others = torch.ones(len(hidden), dtype=torch.bool)
    others[packed.starts.long()] = False
    hidden[others] += 1
    assert torch.equal(before, head(hidden, packed))
    hidden[packed.starts.long()] += 1
    assert not torch.equal(before, head(hidden, packed))


@pytest.mark.parametrize(
    ("activation", "function"),
    [("tanh", torch.tanh), ("relu", torch.relu), ("gelu", torch.nn.functional.gelu)],
)
def test_a_pooler_of_any_activation(activation: str, function) -> None:
    packed, pooler = make_packed(), Pooler(BertConfig(10, 6, 1, 1, 8), activation)
    hidden = torch.randn(len(packed.ids), 6)
    firsts = torch.stack([piece[0] for piece in packed.split(hidden)])
    torch.testing.assert_close(pooler(hidden, packed), function(pooler.dense(firsts)))


def test_one_score_a_token() -> None:
    packed, head = (
        make_packed(),
        ReplacedTokenDetection(BertConfig(10, 6, 1, 1, 8, activation="relu")),
    )
    hidden = torch.randn(len(packed.ids), 6)
    scores = head(hidden, packed)
    assert scores.shape == (len(hidden),)
    weight, bias = head.score.weight[0], head.score.bias[0]
    expected = [torch.relu(head.dense(state)) @ weight + bias for state in hidden]
    torch.testing.assert_close(scores, torch.stack(expected))


def test_words_are_scored_in_the_width_of_their_embeddings() -> None:
    config = BertConfig(10, 6, 1, 1, 8, activation="relu", embedding_size=4, mlm_activation="tanh")
    packed, head = make_packed(), Mlm(config, torch.nn.Embedding(10, 4))
    hidden = torch.randn(5, 6)
    expected = head.decoder(head.norm(torch.tanh(head.dense(hidden))))
    torch.testing.assert_close(head(hidden, packed), expected)
    assert head.dense.weight.shape == (4, 6) and head.decoder.weight.shape == (10, 4)
    plain = BertConfig(10, 6, 1, 1, 8, activation="relu")
    assert Mlm(plain, torch.nn.Embedding(10, 6)).activation == "relu"
