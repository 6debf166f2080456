"""How tokens are embedded along the axes on which families differ, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse.errors import CheckpointError
from packhorse.model.bert import BertEmbeddings, positions_after_padding
from packhorse.model.config import BertConfig
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

SEQUENCES = ([7, 1, 8, 1, 1, 9], [1], [5, 6], [1, 1, 4])


def make_packed(sequences=SEQUENCES, kind: int = 0) -> Packed:
    return Packed.build(
        [SyntheticSequence(np.array(ids), np.full(len(ids), kind)) for ids in sequences]
    )


def loop(ids: list[int], pad: int) -> list[int]:
    """RoBERTa's rule: words are numbered on from the padding word's id, which is not counted."""
    rows, count = [], 0
    for id in ids:
        count += id != pad
        rows.append(pad + count if id != pad else pad)
    return rows


def test_positions_after_padding() -> None:
    expected = [row for ids in SEQUENCES for row in loop(ids, 1)]
    assert expected[:6] == [2, 1, 3, 1, 1, 4]
    assert positions_after_padding(make_packed(), 2).tolist() == expected


def test_positions_after_padding_where_rows_or_buckets_are_filled_up() -> None:
    """Fillers have positions of their own and change nobody else's."""
    expected = [loop(ids, 0) for ids in SEQUENCES]
    whole = make_packed()
    for packed in (whole.pad(32, 16), Packed.rows(fake_sequences(), [[0, 1], [2, 3]], 9)):
        result = positions_after_padding(packed, 1)
        assert [piece.tolist() for piece in packed.split(result)] == expected
        assert int(result.max()) <= packed.max_seqlen


def fake_sequences() -> list[SyntheticSequence]:
    return [SyntheticSequence(np.array(ids), np.zeros(len(ids), int)) for ids in SEQUENCES]


def embed(packed: Packed, **axes: int) -> tuple[BertEmbeddings, Tensor]:
    config = BertConfig(10, 6, 1, 1, 8, max_positions=8, **axes)
    module = BertEmbeddings(config).eval()
    return module, module(packed)


def test_a_text_without_the_padding_word_starts_at_the_offset() -> None:
    packed = make_packed(([5, 6, 7], [8, 9]))
    module, result = embed(packed, position_offset=3)
    assert module.positions.weight.shape == (11, 6)
    words, types = module.words(packed.ids), module.types
    assert types is not None
    expected = words + types.weight[0] + module.positions.weight[[3, 4, 5, 3, 4]]
    torch.testing.assert_close(result, module.norm(expected))


def test_no_types_and_one_type() -> None:
    module, result = embed(make_packed(kind=1), type_vocab_size=0)
    assert module.types is None and torch.isfinite(result).all()
    module, result = embed(make_packed(kind=1), type_vocab_size=1)
    torch.testing.assert_close(module(make_packed(kind=0)), result)
    module, result = embed(make_packed(kind=1), type_vocab_size=2)
    assert not torch.equal(module(make_packed(kind=0)), result)


def test_narrow_embeddings_are_projected() -> None:
    module, result = embed(make_packed(), embedding_size=4)
    assert module.words.weight.shape == (10, 4) and result.shape == (12, 6)
    narrow = BertEmbeddings(BertConfig(10, 4, 1, 1, 8, max_positions=8)).eval()
    narrow.load_state_dict({k: v for k, v in module.state_dict().items() if "project" not in k})
    torch.testing.assert_close(module.project(narrow(make_packed())), result)


def test_what_is_not_said_is_as_in_bert() -> None:
    config = BertConfig(10, 6, 1, 1, 8, activation="relu")
    assert (config.embedding_size, config.mlm_activation) == (6, "relu")
    assert config == BertConfig(10, 6, 1, 1, 8, activation="relu", embedding_size=6)


@pytest.mark.parametrize(
    "axes",
    [
        {"position_offset": -1},
        {"position_offset": True},
        {"position_offset": 10**7},
        {"type_vocab_size": -1},
        {"type_vocab_size": None},
        {"embedding_size": -2},
        {"embedding_size": 10**6},
        {"mlm_activation": "mish"},
        {"classify_activation": "softmax"},
        {"activation": ""},
        {"norm_eps": float("nan")},
        {"norm_eps": 10**400},
        {"dropout": float("inf")},
    ],
)
def test_axes_that_are_out_of_bounds(axes) -> None:
    with pytest.raises(CheckpointError, match="config"):
        BertConfig(10, 6, 1, 1, 8, **axes)
