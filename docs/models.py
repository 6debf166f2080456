"""Writes docs/models.md: much-used encoders of the hub, and whether each runs here.

    python docs/models.py docs/models.md     # after a family or a refusal has changed

An entry holds the few fields of a model's published configuration that decide; each is put before
the very check that `packhorse.load` makes, and what that says is what the page says. Nothing is
fetched. A test compares the page with what this script writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packhorse import atomic
from packhorse.checkpoint import names
from packhorse.checkpoint.sentence import KINDS
from packhorse.errors import CheckpointError
from packhorse.model.pooling import POOLINGS
from packhorse.model.vectors import ACTIVATIONS

Raw = dict[str, Any]

INTRODUCTION = """# Which models run

Written by `docs/models.py`: the few fields of each model's configuration that decide, written down
by hand, are put before the check that `packhorse.load` makes; no model was fetched. "Understood"
says no more than that. That a family's numbers are those of transformers is tested on random models
of every class (`tests/checkpoint/test_families.py`, `tests/checkpoint/test_newer.py`), and on the
real weights of all-MiniLM-L6-v2; that vectors are those of sentence-transformers, on random models
which it saved, with every module below (`tests/runtime/test_sentence_models.py`). A model that is
not here is tried by loading it: what does not run is refused by name, before a weight is placed.

A model needs a `tokenizer.json` or a `vocab.txt` beside its weights. Code that a repository brings
along is never run.
"""

MODULES = """## sentence-transformers folders

Their modules run one after the other, in the layout of every release since 2:

- modules: {kinds}.
  Others (`CNN`, `LSTM`, `BoW`, `WordEmbeddings`, `StaticEmbedding`) are refused by name.
- sparse models (`SparseEncoder`): a transformer that scores words, as `Transformer` or
  `MLMTransformer`, and `SpladePooling`; behind a `Router`, queries as `SparseStaticEmbedding`,
  the inference-free kind.
- multi-vector models: `Dense`, `MultiVectorMask` and `Normalize` on tokens, PyLate's folders, and
  the original ColBERT's (class `HF_ColBERT` with `artifact.metadata`).
- bge-m3's `sparse_linear.pt` and `colbert_linear.pt` beside its modules: three outputs of one pass.
- `Pooling`, in one mode or several side by side: {poolings}.
  With `include_prompt` false the tokens of a prompt take no part.
- `Dense`, with or without bias and residual, any number in a row; activations of torch's own:
  {activations}.
- Prompts by name, and a default one.
"""


def sizes(hidden: int, layers: int, words: int) -> Raw:
    """Of BERT's shape: heads 64 wide (MiniLM: 32), four times as wide between."""
    return {
        "vocab_size": words,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 12 if hidden == 384 else max(2, hidden // 64),
        "intermediate_size": 4 * hidden,
    }


SMALL, BASE, LARGE = sizes(384, 12, 30522), sizes(768, 12, 30522), sizes(1024, 24, 30522)
MANY_WORDS = 250002


def bert(shape: Raw = BASE, kind: str = "Model", **more: Any) -> Raw:
    return {**shape, "model_type": "bert", "architectures": [f"Bert{kind}"], **more}


def roberta(shape: Raw = BASE, kind: str = "Model", **more: Any) -> Raw:
    own = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    named = {"model_type": "roberta", "architectures": [f"Roberta{kind}"], "pad_token_id": 1}
    return {**shape, **own, **named, **more}


def xlmr(shape: Raw = BASE, kind: str = "Model", **more: Any) -> Raw:
    named = {"model_type": "xlm-roberta", "architectures": [f"XLMRoberta{kind}"]}
    return roberta(shape, **{**named, "vocab_size": MANY_WORDS, **more})


def distilbert(kind: str = "Model", words: int = 30522) -> Raw:
    shape = {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "vocab_size": words}
    return {**shape, "model_type": "distilbert", "architectures": [f"DistilBert{kind}"]}


def electra(hidden: int, kind: str = "ForPreTraining") -> Raw:
    own = {"embedding_size": 128 if hidden == 256 else hidden}
    named = {"model_type": "electra", "architectures": [f"Electra{kind}"]}
    return {**sizes(hidden, 12, 30522), **own, **named}


def mpnet(kind: str = "Model") -> Raw:
    own = {"vocab_size": 30527, "max_position_embeddings": 514}
    return {**BASE, **own, "model_type": "mpnet", "architectures": [f"MPNet{kind}"]}


def modernbert(hidden: int = 768, kind: str = "Model") -> Raw:
    own = {"global_attn_every_n_layers": 3, "local_attention": 128, "global_rope_theta": 160000.0}
    own |= {"local_rope_theta": 10000.0, "max_position_embeddings": 8192}
    layers, between = (22, 1152) if hidden == 768 else (28, 2624)
    named = {"model_type": "modernbert", "architectures": [f"ModernBert{kind}"]}
    return {**sizes(hidden, layers, 50368), "intermediate_size": between, **own, **named}


def other(kind: str, shape: Raw = BASE) -> Raw:
    return {**shape, "model_type": kind}


RANKS, TOKENS, WORDS = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"
SPANS = "ForQuestionAnswering"

MODELS: dict[str, dict[str, Raw]] = {
    "sentence-transformers": {
        "sentence-transformers/all-MiniLM-L6-v2": bert(sizes(384, 6, 30522)),
        "sentence-transformers/all-MiniLM-L12-v2": bert(SMALL),
        "sentence-transformers/paraphrase-MiniLM-L6-v2": bert(sizes(384, 6, 30522)),
        "sentence-transformers/all-mpnet-base-v2": mpnet(WORDS),
        "sentence-transformers/multi-qa-mpnet-base-dot-v1": mpnet(WORDS),
        "sentence-transformers/all-distilroberta-v1": roberta(sizes(768, 6, 50265), WORDS),
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": bert(sizes(384, 12, 250037)),
        "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": xlmr(),
        "sentence-transformers/distiluse-base-multilingual-cased-v2": distilbert(words=119547),
        "sentence-transformers/LaBSE": bert(sizes(768, 12, 501153)),
        "sentence-transformers/sentence-t5-base": other("t5"),
    },
    "BGE": {
        "BAAI/bge-small-en-v1.5": bert(SMALL),
        "BAAI/bge-base-en-v1.5": bert(),
        "BAAI/bge-large-en-v1.5": bert(LARGE),
        "BAAI/bge-m3": xlmr(LARGE, max_position_embeddings=8194),
        "BAAI/bge-reranker-base": xlmr(BASE, RANKS),
        "BAAI/bge-reranker-large": xlmr(LARGE, RANKS),
        "BAAI/bge-reranker-v2-m3": xlmr(LARGE, RANKS, max_position_embeddings=8194),
    },
    "E5": {
        "intfloat/e5-small-v2": bert(SMALL),
        "intfloat/e5-base-v2": bert(),
        "intfloat/e5-large-v2": bert(LARGE),
        "intfloat/multilingual-e5-small": bert(sizes(384, 12, 250037)),
        "intfloat/multilingual-e5-base": xlmr(),
        "intfloat/multilingual-e5-large": xlmr(LARGE),
        "intfloat/multilingual-e5-large-instruct": xlmr(LARGE),
    },
    "GTE": {
        "thenlper/gte-small": bert(SMALL),
        "thenlper/gte-base": bert(),
        "thenlper/gte-large": bert(LARGE),
        "Alibaba-NLP/gte-modernbert-base": modernbert(),
        "Alibaba-NLP/gte-reranker-modernbert-base": modernbert(768, RANKS),
        "Alibaba-NLP/gte-base-en-v1.5": other("new"),
        "Alibaba-NLP/gte-large-en-v1.5": other("new", LARGE),
        "Alibaba-NLP/gte-multilingual-base": other("new"),
    },
    "Arctic, mxbai, Nomic, Jina and later": {
        "Snowflake/snowflake-arctic-embed-xs": bert(sizes(384, 6, 30522)),
        "Snowflake/snowflake-arctic-embed-m": bert(),
        "Snowflake/snowflake-arctic-embed-l": bert(LARGE),
        "Snowflake/snowflake-arctic-embed-l-v2.0": xlmr(LARGE, max_position_embeddings=8194),
        "Snowflake/snowflake-arctic-embed-m-long": other("nomic_bert"),
        "mixedbread-ai/mxbai-embed-large-v1": bert(LARGE),
        "mixedbread-ai/mxbai-rerank-base-v1": other("deberta-v2"),
        "nomic-ai/modernbert-embed-base": modernbert(),
        "nomic-ai/nomic-embed-text-v1.5": other("nomic_bert"),
        "jinaai/jina-embeddings-v2-base-en": bert(position_embedding_type="alibi"),
        "jinaai/jina-embeddings-v3": xlmr(LARGE, position_embedding_type="rotary"),
        "Qwen/Qwen3-Embedding-0.6B": other("qwen3"),
        "google/embeddinggemma-300m": other("gemma3_text"),
    },
    "Rerankers and other cross-encoders": {
        "cross-encoder/ms-marco-MiniLM-L6-v2": bert(sizes(384, 6, 30522), RANKS),
        "cross-encoder/ms-marco-MiniLM-L12-v2": bert(SMALL, RANKS),
        "cross-encoder/ms-marco-TinyBERT-L2-v2": bert(sizes(128, 2, 30522), RANKS),
        "cross-encoder/ms-marco-electra-base": electra(768, RANKS),
        "cross-encoder/stsb-roberta-base": roberta(BASE, RANKS),
        "cross-encoder/nli-deberta-v3-base": other("deberta-v2"),
    },
    "To fine-tune, and fine-tuned": {
        "google-bert/bert-base-uncased": bert(BASE, WORDS),
        "google-bert/bert-large-uncased": bert(LARGE, WORDS),
        "google-bert/bert-base-multilingual-cased": bert(sizes(768, 12, 119547), WORDS),
        "FacebookAI/roberta-base": roberta(BASE, WORDS),
        "FacebookAI/roberta-large": roberta(LARGE, WORDS),
        "FacebookAI/xlm-roberta-base": xlmr(BASE, WORDS),
        "almanach/camembert-base": roberta(
            vocab_size=32005, model_type="camembert", architectures=["CamembertForMaskedLM"]
        ),
        "distilbert/distilbert-base-uncased": distilbert(WORDS),
        "google/electra-small-discriminator": electra(256),
        "google/electra-base-discriminator": electra(768),
        "microsoft/mpnet-base": mpnet(WORDS),
        "answerdotai/ModernBERT-base": modernbert(768, WORDS),
        "answerdotai/ModernBERT-large": modernbert(1024, WORDS),
        "microsoft/deberta-v3-base": other("deberta-v2"),
        "albert/albert-base-v2": other("albert"),
        "allenai/longformer-base-4096": other("longformer"),
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": distilbert(RANKS),
        "cardiffnlp/twitter-roberta-base-sentiment-latest": roberta(BASE, RANKS),
        "ProsusAI/finbert": bert(BASE, RANKS),
        "dslim/bert-base-NER": bert(sizes(768, 12, 28996), TOKENS),
        "deepset/roberta-base-squad2": roberta(BASE, SPANS),
        "colbert-ir/colbertv2.0": {**bert(), "architectures": ["HF_ColBERT"]},
    },
}

# What would have to be built, by the value that is refused.
MISSING = {
    "albert": "layers that share their weights, and embeddings factored in two",
    "deberta-v2": "disentangled attention: content and distance scored against each other",
    "gemma3_text": "a decoder's layers: grouped keys, RMS norms; and vectors made of them",
    "longformer": "tokens that see everything beside those that see a window, chosen by the task",
    "new": "its own layout: rotary positions stretched for length, gates, norms after",
    "nomic_bert": "its own code: rotary positions with SwiGLU, norms after",
    "qwen3": "causal attention, grouped keys, RMS norms; the last token's state as the vector",
    "t5": "distances with a bias, but RMS norms, no scale of scores, another checkpoint layout",
    "alibi": "scores that fall with the distance by a fixed slope, and gated feed-forward",
    "rotary": "its own code: rotary positions, and an adapter for each task",
}


def verdict(raw: Mapping[str, Any]) -> tuple[bool, str]:
    """Does it run, and in the words of the check, why not?"""
    try:
        names.understand(raw)
    except CheckpointError as error:
        return False, str(error).removeprefix("config: ").partition(";")[0]
    return True, ""


def rows() -> Iterator[tuple[str, str, Raw, bool, str]]:
    for group, models in MODELS.items():
        for name, raw in models.items():
            yield group, name, raw, *verdict(raw)


def lacking(raw: Mapping[str, Any]) -> str:
    """What of `MISSING` a refused configuration is about."""
    values = [raw.get("position_embedding_type"), *raw.get("architectures", []), raw["model_type"]]
    return next(value for value in values if value in MISSING)


def tables() -> dict[str, str]:
    """What a sentence-transformers folder may hold, as the loader has it."""
    listed = {"kinds": KINDS, "poolings": POOLINGS, "activations": ACTIVATIONS}
    return {name: ", ".join(f"`{item}`" for item in items) for name, items in listed.items()}


def page() -> str:
    """The whole file."""
    found = list(rows())
    works = sum(row[3] for row in found)
    lines = [INTRODUCTION, MODULES.format(**tables())]
    lines.append(f"## Models\n\n{works} of these {len(found)} are understood.\n")
    for group in MODELS:
        lines += [f"### {group}\n", "| model | family | |", "|---|---|---|"]
        for _, name, raw, good, why in (row for row in found if row[0] == group):
            lines.append(f"| {name} | {raw['model_type']} | {'understood' if good else why} |")
        lines.append("")
    lines += ["## What is missing for the rest\n", "| refused | models | what it would take |"]
    lines.append("|---|---|---|")
    refused = [(lacking(raw), name) for _, name, raw, good, _ in found if not good]
    for value, what in MISSING.items():
        named = ", ".join(name for lacks, name in refused if lacks == value)
        lines.append(f"| {value} | {named} | {what} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with atomic.new_file(Path(sys.argv[1])) as file:
        file.write(page().encode())
