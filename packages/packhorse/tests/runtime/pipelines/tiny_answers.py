"""A tiny question-answering model that every release of transformers makes alike, and the answers.

    python tiny_answers.py answers.json    # with transformers 4, the last with such a pipeline

The weights are numpy's, so that they do not depend on torch's generators. `answers.json` holds what
the pipeline of transformers 4.57.1 answers; the tests compare with it under any release.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the horse mule carries two sacks to market and home cat sat on"
    " a mat who what where does it go ? . , ' don t ##s ##es ##ing un ##kind ##ly"
)
VOCABULARY = [*WORDS.split(), *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
VOCABULARY += list("abcdefghijklmnopqrstuvwxyz")
QUESTIONS = [
    ("Who carries two sacks?", "The horse carries two sacks to market, and the mule goes home."),
    ("where does it go", "home"),
    ("What?", "Unkindly horses don't carry. THE HORSE sat on a mat; the horse sat on a mat. " * 6),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_k": 20},
    {"align_to_words": False},
    {"align_to_words": False, "top_k": 7},
    {"max_answer_len": 2, "top_k": 4},
    {"max_answer_len": 40, "top_k": 4},
    {"handle_impossible_answer": True, "top_k": 3},
    {"handle_impossible_answer": True, "align_to_words": False, "top_k": 2},
    {"max_seq_len": 40, "doc_stride": 8, "top_k": 6},
    {"max_seq_len": 40, "doc_stride": 12, "top_k": 6, "align_to_words": False},
    {"max_seq_len": 40, "doc_stride": 8, "handle_impossible_answer": True, "top_k": 3},
]


def write_model(folder: Path) -> Path:
    """A folder with the model and its tokenizer."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=128,
    )
    model = transformers.BertForQuestionAnswering(config).eval()
    random = np.random.default_rng(11)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = random.normal(0, 0.4, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(values))
            if name.endswith("LayerNorm.weight"):
                parameter.add_(1)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 128, "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def main() -> None:
    import transformers

    pipe = None
    answers: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
        pipe = transformers.pipeline(
            "question-answering", model=folder, tokenizer=tokenizer, device="cpu"
        )
        for options in OPTIONS:
            results = [pipe(question=q, context=c, **options) for q, c in QUESTIONS]
            answers.append([row if isinstance(row, list) else [row] for row in results])
    document = {"transformers": transformers.__version__, "answers": answers}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
