"""Make the golden vectors again: `python packages/packhorse/tests/golden/make_golden.py MINILM`.

Vectors are API: people store them and compare new ones with them. These are the references, made by
transformers and sentence-transformers, not by us: a tiny random model per family with the mean of
its last hidden states, and all-MiniLM-L6-v2 (its folder is the argument) with its own pooling. They
are made once and then kept; making them again is a breaking change.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "MPNet")
FAMILIES += ("ModernBert",)
LENGTHS = (5, 24, 1, 9)
TEXTS = (
    "A man is eating food.",
    "Someone eats a meal.",
    "The packhorse carries sacks to market.",
    "",
    "ÅNGSTRÖM, naïve café; 東京 12,345.67 €!",
    "word " * 400,
    "BERT without padding: sequences laid end to end.",
    "?",
)


def token_ids(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    """Sequences of ids below 50, the same on every machine."""
    return [(np.arange(n) * 7 + 3 * n) % 45 + 5 for n in lengths]


def make_model(transformers: Any, family: str) -> Any:
    """Two layers, 16 wide, with weights that are no multiple of anything."""
    import torch

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    if family == "DistilBert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    if family == "Electra":
        sizes["embedding_size"] = 8
    if family == "ModernBert":
        sizes |= {"global_attn_every_n_layers": 2, "local_attention": 8}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, max_position_embeddings=32, pad_token_id=1, **sizes
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def vectors_of(model: Any) -> np.ndarray:
    """The mean of the last hidden states of each sequence alone, computed in float64."""
    import torch

    model = model.double()
    rows = []
    for ids in token_ids():
        with torch.no_grad():
            states = model(input_ids=torch.from_numpy(ids)[None]).last_hidden_state
        rows.append(states[0].mean(0).numpy())
    return np.array(rows, np.float32)


def main(minilm: str) -> None:
    import transformers
    from sentence_transformers import SentenceTransformer

    vectors = {}
    for family in FAMILIES:
        model = make_model(transformers, family)
        model.save_pretrained(HERE / family.lower())
        vectors[family.lower()] = vectors_of(model)
    reference = SentenceTransformer(minilm, device="cpu")
    vectors["minilm"] = reference.encode(list(TEXTS), batch_size=1).astype(np.float32)
    np.savez_compressed(HERE / "golden.npz", **vectors)


if __name__ == "__main__":
    main(sys.argv[1])
