"""Small encoders of transformers, with weights that tell tokens apart, and sequences for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = 90
LENGTHS = (5, 17, 3, 30, 11, 30)
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "embedding_size": 24,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 1,
    "mask_token_id": 4,
    "bos_token_id": 0,
    "cls_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "qa_dropout": 0.0,
}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
Make = Callable[..., Any]


@pytest.fixture(scope="session")
def make() -> Make:
    """A model by family and auto class, the same one each time."""
    return _make


def _make(family: str, kind: str = "AutoModel", attention: str = "sdpa", **changes: Any) -> Any:
    import torch
    import transformers

    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {family}")
    sizes = {**SIZES, **(DISTILBERT if family == "distilbert" else {}), **changes}
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    auto = getattr(transformers, kind)
    model = auto.from_config(config, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name.lower() else 0.0, std=0.2)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Words are numbers; it pads, and knows its special tokens."""
    import transformers
    from tokenizers import Tokenizer, models

    special = {"bos_token": "0", "pad_token": "1", "eos_token": "2", "mask_token": "4"}
    words = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="3"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture(scope="session")
def sequences() -> list[dict[str, list[int]]]:
    """Of several lengths, two the same."""
    import numpy as np

    rng = np.random.default_rng(0)
    ids = [rng.integers(5, WORDS, length).tolist() for length in LENGTHS]
    return [{"input_ids": sequence, "attention_mask": [1] * len(sequence)} for sequence in ids]


@pytest.fixture
def padded(tokenizer: Any, sequences: list[dict[str, list[int]]]) -> dict[str, Any]:
    """The sequences as transformers takes them."""
    return dict(tokenizer.pad(sequences, return_tensors="pt"))
