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
of every class (`test_families.py`, `test_newer.py` and `test_later.py` in `tests/checkpoint`), and
on the real weights of all-MiniLM-L6-v2; that vectors are those of sentence-transformers, on random
models which it saved, with every module below (`tests/runtime/test_sentence_models.py`). A model
that is not here is tried by loading it: what does not run is refused by name, before a weight is
placed.

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


def albert(kind: str = "ForMaskedLM") -> Raw:
    own = {"embedding_size": 128, "num_hidden_groups": 1, "inner_group_num": 1}
    named = {"model_type": "albert", "architectures": [f"Albert{kind}"], "hidden_act": "gelu_new"}
    return {**sizes(768, 12, 30000), **own, **named}


def electra(hidden: int, kind: str = "ForPreTraining") -> Raw:
    own = {"embedding_size": 128 if hidden == 256 else hidden}
    named = {"model_type": "electra", "architectures": [f"Electra{kind}"]}
    return {**sizes(hidden, 12, 30522), **own, **named}


def mpnet(kind: str = "Model") -> Raw:
    own = {"vocab_size": 30527, "max_position_embeddings": 514}
    return {**BASE, **own, "model_type": "mpnet", "architectures": [f"MPNet{kind}"]}


def deberta(kind: str) -> Raw:
    """Of v3, whose configurations say v2; Microsoft's own name no class."""
    own = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 256}
    own |= {"max_relative_positions": -1, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    own |= {"position_biased_input": False, "type_vocab_size": 0, "layer_norm_eps": 1e-7}
    named: Raw = {"model_type": "deberta-v2"}
    named |= {"architectures": [f"DebertaV2{kind}"]} if kind else {}
    return {**sizes(768, 12, 128100), **own, **named}


def modernbert(hidden: int = 768, kind: str = "Model") -> Raw:
    own = {"global_attn_every_n_layers": 3, "local_attention": 128, "global_rope_theta": 160000.0}
    own |= {"local_rope_theta": 10000.0, "max_position_embeddings": 8192}
    layers, between = (22, 1152) if hidden == 768 else (28, 2624)
    named = {"model_type": "modernbert", "architectures": [f"ModernBert{kind}"]}
    return {**sizes(hidden, layers, 50368), "intermediate_size": between, **own, **named}


def nomic(**more: Any) -> Raw:
    shape = {"vocab_size": 30528, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072}
    own = {"activation_function": "swiglu", "rotary_emb_fraction": 1.0, "rotary_emb_base": 1000}
    biases = dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False)
    own |= {"n_positions": 8192, "max_trained_positions": 2048, "prenorm": False, **biases}
    named = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}
    return {**shape, **own, **named, **more}


def gte(shape: Raw = BASE, factor: float = 2.0, base: int = 500_000, **more: Any) -> Raw:
    angles = {"rope_theta": base, "rope_scaling": {"type": "ntk", "factor": factor}}
    own = {"position_embedding_type": "rope", "max_position_embeddings": 8192, **angles}
    named = {"model_type": "new", "architectures": ["NewModel"]}
    return {**shape, **own, **named, "type_vocab_size": 0, **more}


def qwen3(hidden: int, layers: int, kind: str = "ForCausalLM") -> Raw:
    shape = sizes(hidden, layers, 151669) | {"num_attention_heads": 16 if hidden == 1024 else 32}
    own = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1_000_000}
    return {**shape, **own, "model_type": "qwen3", "architectures": [f"Qwen3{kind}"]}


def eurobert(hidden: int = 768, kv_heads: int = 12) -> Raw:
    own = {"num_key_value_heads": kv_heads, "rope_theta": 250_000}
    named = {"model_type": "eurobert", "architectures": ["EuroBertForMaskedLM"]}
    return {**sizes(hidden, 12, 128256), **own, **named}


EMBEDDING_GEMMA = {
    **sizes(768, 24, 262144),
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
}


def jina(shape: Raw = BASE, kind: str = "ForMaskedLM") -> Raw:
    own = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    own |= {"max_position_embeddings": 8192}
    return {**shape, **own, "model_type": "bert", "architectures": [f"JinaBert{kind}"]}


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
        "Alibaba-NLP/gte-base-en-v1.5": gte(),
        "Alibaba-NLP/gte-large-en-v1.5": gte(LARGE, base=160_000),
        "Alibaba-NLP/gte-multilingual-base": gte(
            factor=8.0, base=20_000, vocab_size=250048, type_vocab_size=1
        ),
        "Alibaba-NLP/gte-multilingual-reranker-base": gte(
            factor=8.0,
            base=20_000,
            vocab_size=250048,
            type_vocab_size=1,
            architectures=["NewForSequenceClassification"],
        ),
        "alibaba-nlp-community/gte-multilingual-base": {
            **sizes(768, 12, 250048),
            "model_type": "gte",
            "architectures": ["GteModel"],
        },
    },
    "Arctic, mxbai, Nomic, Jina and later": {
        "Snowflake/snowflake-arctic-embed-xs": bert(sizes(384, 6, 30522)),
        "Snowflake/snowflake-arctic-embed-m": bert(),
        "Snowflake/snowflake-arctic-embed-l": bert(LARGE),
        "Snowflake/snowflake-arctic-embed-l-v2.0": xlmr(LARGE, max_position_embeddings=8194),
        "Snowflake/snowflake-arctic-embed-m-long": nomic(),
        "mixedbread-ai/mxbai-embed-large-v1": bert(LARGE),
        "mixedbread-ai/mxbai-rerank-base-v1": deberta(RANKS),
        "nomic-ai/modernbert-embed-base": modernbert(),
        "nomic-ai/nomic-embed-text-v1": nomic(),
        "nomic-ai/nomic-embed-text-v1.5": nomic(),
        "jinaai/jina-embeddings-v2-base-en": jina(),
        "jinaai/jina-embeddings-v2-small-en": jina(sizes(512, 4, 30528)),
        "jinaai/jina-embeddings-v2-base-de": jina(sizes(768, 12, 61056)),
        "jinaai/jina-embeddings-v2-base-code": jina(sizes(768, 12, 61056))
        | {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"},
        "jinaai/jina-embeddings-v3": xlmr(
            LARGE, position_embedding_type="rotary", rotary_emb_base=20_000.0
        ),
        "jinaai/jina-embeddings-v3-hf": {
            **sizes(1024, 24, MANY_WORDS),
            "model_type": "jina_embeddings_v3",
            "architectures": ["JinaEmbeddingsV3Model"],
        },
        "Qwen/Qwen3-Embedding-0.6B": qwen3(1024, 28),
        "Qwen/Qwen3-Embedding-4B": qwen3(2560, 36),
        "Qwen/Qwen3-Embedding-8B": qwen3(4096, 36),
        "google/embeddinggemma-300m": EMBEDDING_GEMMA,
    },
    "Rerankers and other cross-encoders": {
        "cross-encoder/ms-marco-MiniLM-L6-v2": bert(sizes(384, 6, 30522), RANKS),
        "cross-encoder/ms-marco-MiniLM-L12-v2": bert(SMALL, RANKS),
        "cross-encoder/ms-marco-TinyBERT-L2-v2": bert(sizes(128, 2, 30522), RANKS),
        "cross-encoder/ms-marco-electra-base": electra(768, RANKS),
        "cross-encoder/stsb-roberta-base": roberta(BASE, RANKS),
        "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": qwen3(1024, 28, RANKS),
        "cross-encoder/nli-deberta-v3-base": deberta(RANKS),
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
        "EuroBERT/EuroBERT-210m": eurobert(),
        "chandar-lab/NeoBERT": {
            **sizes(768, 28, 30522),
            "model_type": "neobert",
            "architectures": ["NeoBERTLMHead"],
            "hidden_act": "SwiGLU",
            "max_length": 4096,
        },
        "EuroBERT/EuroBERT-610m": eurobert(1152, 6),
        "microsoft/deberta-v3-base": deberta(""),
        "albert/albert-base-v2": albert(),
        "allenai/longformer-base-4096": other("longformer"),
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": distilbert(RANKS),
        "cardiffnlp/twitter-roberta-base-sentiment-latest": roberta(BASE, RANKS),
        "ProsusAI/finbert": bert(BASE, RANKS),
        "dslim/bert-base-NER": bert(sizes(768, 12, 28996), TOKENS),
        "deepset/roberta-base-squad2": roberta(BASE, SPANS),
        "colbert-ir/colbertv2.0": {**bert(), "architectures": ["HF_ColBERT"]},
    },
}

# Where the layouts of families were taken from that bring code of their own along or are new in
# transformers, and against what the results are tested.
TRANSFORMERS = "transformers 5.22, `src/transformers/models/{0}/modeling_{0}.py`"
LAYOUTS: dict[str, tuple[str, str]] = {
    "nomic_bert": (
        "nomic-ai/contrastors, `src/contrastors/models/huggingface/modeling_hf_nomic_bert.py`, "
        "613ddfd37309; " + TRANSFORMERS.format("nomic_bert"),
        "transformers' classes, each saved and loaded",
    ),
    "gte, new": (
        "xuhaike/SparseCL (the authors' code with additions), `sparsecl/gte/modeling.py`, "
        "14fcd8bcfeef; " + TRANSFORMERS.format("gte"),
        "transformers' classes; stretched angles, which these lack, the authors' code run in place",
    ),
    "bert with alibi (Jina v2)": (
        "huggingface/text-embeddings-inference, `backends/candle/src/models/jina.rs`, 02506d0b3879",
        "a reference in float64 written from the paper; unproven against the authors' code",
    ),
    "jina_embeddings_v3, xlm-roberta with rotary (Jina v3)": (
        TRANSFORMERS.format("jina_embeddings_v3") + "; adapters: ggml-org/llama.cpp, "
        "`conversion/bert.py`, 7bca1fd9ca2a",
        "transformers' classes, with adapters merged by hand",
    ),
    "neobert": (
        "the authors' first commit in JonasNasimzada/NeoBERT, `src/neobert/model/model.py`, "
        "c898c9794322",
        "the authors' code run in place",
    ),
    **{
        kind: (TRANSFORMERS.format(module), "transformers' classes, each saved and loaded")
        for kind, module in (
            ("qwen3", "qwen3"),
            ("gemma3_text", "gemma3"),
            ("eurobert", "eurobert"),
        )
    },
    "albert": (
        TRANSFORMERS.format("albert") + ", 3c354ea20e34",
        "transformers' classes, each saved and loaded",
    ),
    "deberta-v2": (
        TRANSFORMERS.format("deberta_v2") + ", 967ed0db0367",
        "transformers' classes, each saved and loaded",
    ),
}

# What would have to be built, by the value that is refused.
MISSING = {
    "longformer": "tokens that see everything beside those that see a window, chosen by the task",
    "t5": "distances with a bias, but RMS norms, no scale of scores, another checkpoint layout",
    "jinaai/jina-bert-v2-qk-post-norm": "norms of all heads of queries and keys at once, and two "
    "norms after attention",
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
    values = [
        raw.get("_name_or_path"),
        raw.get("position_embedding_type"),
        *raw.get("architectures", []),
        raw["model_type"],
    ]
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
    lines += ["## Where layouts were taken from\n", "| family | public files | tested against |"]
    lines.append("|---|---|---|")
    lines += [f"| {kind} | {source} | {oracle} |" for kind, (source, oracle) in LAYOUTS.items()]
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
