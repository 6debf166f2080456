"""Writes docs/models.md: much-used encoders of the hub, and whether each runs here.

    python docs/models.py docs/models.md     # after a family or a refusal has changed

An entry holds the few fields of a model's published configuration that decide; each is put before
the very check that `packhorse.load` makes, and what that says is what the page says. Nothing is
fetched. A test compares the page with what this script writes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packhorse import atomic
from packhorse.checkpoint import names
from packhorse.checkpoint.names.families import REFUSED
from packhorse.checkpoint.sentence import KINDS
from packhorse.errors import CheckpointError
from packhorse.model.pooling import POOLINGS
from packhorse.model.vectors import ACTIVATIONS

Raw = dict[str, Any]
HERE = Path(__file__).parent
FACTS: dict[str, Any] = tomllib.loads((HERE / "models.toml").read_text("utf-8"))
WORKS: dict[str, Any] = tomllib.loads((HERE / "works.toml").read_text("utf-8"))

INTRODUCTION = """# Which models run

Written by `docs/models.py`. *Understood*: the fields of the model's configuration that decide, as
they are published, pass the check that `packhorse.load` makes, and a random model of this very
configuration, in smaller sizes, has the numbers of transformers' own class within 1e-5
(`tests/checkpoint/test_models_page.py`), or is tested as the table of layouts says. The real
weights were not fetched. *Works*: they were, and compared (`make test-models`). That vectors are
those of sentence-transformers is tested on random models which it saved, with every module below
(`tests/runtime/test_sentence_models.py`). A model that is not here is tried by loading it: what
does not run is refused by name, before a weight is placed.

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


def qwen3(
    hidden: int, layers: int, kind: str = "ForCausalLM", words: int = 151669, **more: Any
) -> Raw:
    shape = sizes(hidden, layers, words)
    shape |= {"num_attention_heads": 16 if hidden == 1024 else 32}
    shape |= {"intermediate_size": {1024: 3072, 2560: 9728, 4096: 12288}[hidden]}
    own = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1_000_000}
    return {**shape, **own, "model_type": "qwen3", "architectures": [f"Qwen3{kind}"], **more}


def judge(hidden: int, layers: int) -> Raw:
    """Qwen3's reranker, which is told by its tokenizer; the name stands in for that here."""
    return qwen3(hidden, layers, _name_or_path="Qwen/Qwen3-Reranker")


def eurobert(hidden: int = 768, kv_heads: int = 12) -> Raw:
    own = {"num_key_value_heads": kv_heads, "rope_theta": 250_000}
    named = {"model_type": "eurobert", "architectures": ["EuroBertForMaskedLM"]}
    return {**sizes(hidden, 12, 128256), **own, **named}


EMBEDDING_GEMMA = {
    **sizes(768, 24, 262144),
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "num_attention_heads": 3,
    "intermediate_size": 1152,
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

MINI = sizes(384, 6, 30522)
CHINESE, CASED = 21128, 28996


def sized(hidden: int, layers: int, heads: int, between: int, words: int) -> Raw:
    """Sizes that are not in BERT's proportions."""
    return {
        **sizes(hidden, layers, words),
        "num_attention_heads": heads,
        "intermediate_size": between,
    }


def ettin(hidden: int, layers: int, heads: int, between: int, words: int, kind: str) -> Raw:
    """ModernBERT in other sizes."""
    return modernbert(768, kind) | sized(hidden, layers, heads, between, words)


def embedding_model(shape: Raw) -> Raw:
    """A family without a class for words, as vectors alone are computed with it."""
    return {**shape, "architectures": [shape["architectures"][0].partition("For")[0] + "Model"]}


MODELS: dict[str, dict[str, Raw]] = {
    "sentence-transformers": {
        "sentence-transformers/all-MiniLM-L6-v2": bert(MINI),
        "sentence-transformers/all-MiniLM-L12-v2": bert(SMALL),
        "sentence-transformers/all-MiniLM-L12-v1": bert(SMALL),
        "sentence-transformers/paraphrase-MiniLM-L3-v2": bert(sizes(384, 3, 30522)),
        "sentence-transformers/paraphrase-MiniLM-L6-v2": bert(MINI),
        "sentence-transformers/multi-qa-MiniLM-L6-cos-v1": bert(MINI),
        "sentence-transformers/msmarco-MiniLM-L6-cos-v5": bert(MINI),
        "sentence-transformers/all-mpnet-base-v2": mpnet(WORDS),
        "sentence-transformers/paraphrase-mpnet-base-v2": mpnet(),
        "sentence-transformers/multi-qa-mpnet-base-dot-v1": mpnet(WORDS),
        "sentence-transformers/multi-qa-mpnet-base-cos-v1": mpnet(WORDS),
        "sentence-transformers/all-distilroberta-v1": roberta(sizes(768, 6, 50265), WORDS),
        "sentence-transformers/all-roberta-large-v1": roberta(LARGE, WORDS),
        "sentence-transformers/multi-qa-distilbert-cos-v1": distilbert(WORDS),
        "sentence-transformers/msmarco-distilbert-base-tas-b": distilbert(),
        "sentence-transformers/msmarco-bert-base-dot-v5": bert(),
        "sentence-transformers/bert-base-nli-mean-tokens": bert(),
        "sentence-transformers/nli-mpnet-base-v2": mpnet(),
        "sentence-transformers/stsb-xlm-r-multilingual": xlmr(),
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": bert(sizes(384, 12, 250037)),
        "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": xlmr(),
        "sentence-transformers/distiluse-base-multilingual-cased-v1": distilbert(words=119547),
        "sentence-transformers/distiluse-base-multilingual-cased-v2": distilbert(words=119547),
        "sentence-transformers/clip-ViT-B-32-multilingual-v1": distilbert(words=119547),
        "sentence-transformers/LaBSE": bert(sizes(768, 12, 501153)),
        "sentence-transformers/sentence-t5-base": other("t5"),
        "sentence-transformers/gtr-t5-base": other("t5"),
        "openai/clip-vit-base-patch32": {"model_type": "clip", "architectures": ["CLIPModel"]},
    },
    "BGE": {
        "BAAI/bge-small-en": bert(SMALL),
        "BAAI/bge-base-en": bert(),
        "BAAI/bge-large-en": bert(LARGE),
        "BAAI/bge-small-en-v1.5": bert(SMALL),
        "BAAI/bge-base-en-v1.5": bert(),
        "BAAI/bge-large-en-v1.5": bert(LARGE),
        "BAAI/bge-small-zh-v1.5": bert(sizes(512, 4, CHINESE)),
        "BAAI/bge-base-zh-v1.5": bert(sizes(768, 12, CHINESE)),
        "BAAI/bge-large-zh-v1.5": bert(sizes(1024, 24, CHINESE)),
        "BAAI/bge-m3": xlmr(LARGE, max_position_embeddings=8194),
        "BAAI/bge-m3-unsupervised": xlmr(LARGE, max_position_embeddings=8194),
        "BAAI/bge-reranker-base": xlmr(BASE, RANKS),
        "BAAI/bge-reranker-large": xlmr(LARGE, RANKS),
        "BAAI/bge-reranker-v2-m3": xlmr(LARGE, RANKS, max_position_embeddings=8194),
    },
    "E5": {
        "intfloat/e5-small": bert(SMALL),
        "intfloat/e5-base": bert(),
        "intfloat/e5-large": bert(LARGE),
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
        "thenlper/gte-small-zh": bert(sizes(512, 6, CHINESE)),
        "thenlper/gte-base-zh": bert(sizes(768, 12, CHINESE)),
        "thenlper/gte-large-zh": bert(sizes(1024, 24, CHINESE)),
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
        "NovaSearch/stella_en_400M_v5": gte(LARGE, base=160_000),
    },
    "Arctic, mxbai and others made of BERT": {
        "Snowflake/snowflake-arctic-embed-xs": bert(MINI),
        "Snowflake/snowflake-arctic-embed-s": bert(SMALL),
        "Snowflake/snowflake-arctic-embed-m": bert(),
        "Snowflake/snowflake-arctic-embed-m-v1.5": bert(),
        "Snowflake/snowflake-arctic-embed-l": bert(LARGE),
        "Snowflake/snowflake-arctic-embed-l-v2.0": xlmr(LARGE, max_position_embeddings=8194),
        "Snowflake/snowflake-arctic-embed-m-long": nomic(),
        "mixedbread-ai/mxbai-embed-large-v1": bert(LARGE),
        "mixedbread-ai/mxbai-embed-2d-large-v1": bert(LARGE),
        "mixedbread-ai/mxbai-embed-xsmall-v1": bert(MINI, max_position_embeddings=4096),
        "mixedbread-ai/deepset-mxbai-embed-de-large-v1": xlmr(LARGE, vocab_size=178885),
        "WhereIsAI/UAE-Large-V1": bert(LARGE),
        "llmrails/ember-v1": bert(LARGE),
        "avsolatorio/GIST-small-Embedding-v0": bert(SMALL),
        "avsolatorio/GIST-Embedding-v0": bert(),
        "avsolatorio/GIST-large-Embedding-v0": bert(LARGE),
        "avsolatorio/GIST-all-MiniLM-L6-v2": bert(MINI),
        "avsolatorio/NoInstruct-small-Embedding-v0": bert(SMALL),
        "abhinand/MedEmbed-small-v0.1": bert(SMALL),
        "MongoDB/mdbr-leaf-ir": bert(MINI),
        "MongoDB/mdbr-leaf-mt": bert(MINI),
        "infgrad/stella-base-en-v2": bert(),
        "facebook/contriever": bert(),
        "facebook/contriever-msmarco": bert(),
        "shibing624/text2vec-base-chinese": bert(sizes(768, 12, CHINESE)),
        "shibing624/text2vec-base-multilingual": bert(sizes(384, 12, 250037)),
        "moka-ai/m3e-base": bert(sizes(768, 12, CHINESE)),
        "moka-ai/m3e-small": bert(sizes(512, 4, CHINESE)),
        "cointegrated/rubert-tiny2": bert(
            sized(312, 3, 12, 600, 83828), max_position_embeddings=2048
        ),
        "cointegrated/LaBSE-en-ru": bert(sizes(768, 12, 55083)),
        "ai-forever/sbert_large_nlu_ru": bert(sizes(1024, 24, 120138)),
        "NbAiLab/nb-sbert-base": bert(sizes(768, 12, 119547)),
        "ibm-granite/granite-embedding-30m-english": roberta(sized(384, 6, 12, 1536, 50265)),
        "ibm-granite/granite-embedding-125m-english": roberta(),
        "ibm-granite/granite-embedding-107m-multilingual": xlmr(sized(384, 6, 12, 1536, 250002)),
        "ibm-granite/granite-embedding-278m-multilingual": xlmr(),
        "jhgan/ko-sroberta-multitask": {**roberta(), "vocab_size": 32000},
        "sdadas/mmlw-roberta-base": {**roberta(), "vocab_size": 50001},
        "nlpai-lab/KURE-v1": xlmr(LARGE, max_position_embeddings=8194),
        "dragonkue/BGE-m3-ko": xlmr(LARGE, max_position_embeddings=8194),
        "AITeamVN/Vietnamese_Embedding": xlmr(LARGE, max_position_embeddings=8194),
        "deepvk/USER-bge-m3": xlmr(LARGE, max_position_embeddings=8194, vocab_size=46166),
        "OrdalieTech/Solon-embeddings-large-0.1": xlmr(LARGE),
    },
    "Nomic, Jina, ModernBERT, decoders": {
        "nomic-ai/modernbert-embed-base": modernbert(),
        "nomic-ai/nomic-embed-text-v1": nomic(),
        "nomic-ai/nomic-embed-text-v1-unsupervised": nomic(),
        "nomic-ai/nomic-embed-text-v1.5": nomic(),
        "nomic-ai/nomic-embed-text-v2-moe": nomic(
            vocab_size=250048, moe_every_n_layers=2, num_experts=8, moe_top_k=2
        ),
        "ibm-granite/granite-embedding-english-r2": modernbert(),
        "ibm-granite/granite-embedding-small-english-r2": ettin(384, 12, 12, 1536, 50368, "Model"),
        "ibm-granite/granite-embedding-311m-multilingual-r2": modernbert() | {"vocab_size": 262152},
        "ibm-granite/granite-embedding-97m-multilingual-r2": ettin(
            384, 12, 12, 1536, 180000, "Model"
        ),
        "cl-nagoya/ruri-v3-130m": ettin(512, 19, 8, 2048, 102400, "Model"),
        "cl-nagoya/ruri-v3-310m": ettin(768, 25, 12, 3072, 102400, "Model"),
        "jinaai/jina-embeddings-v2-base-en": jina(),
        "jinaai/jina-embeddings-v2-small-en": jina(sizes(512, 4, 30528)),
        "jinaai/jina-embeddings-v2-base-de": jina(sizes(768, 12, 61056)),
        "jinaai/jina-embeddings-v2-base-es": jina(sizes(768, 12, 61056)),
        "jinaai/jina-embeddings-v2-base-zh": jina(sizes(768, 12, 61056)),
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
        "Qwen/Qwen3-Embedding-4B": qwen3(2560, 36, words=151665),
        "Qwen/Qwen3-Embedding-8B": qwen3(4096, 36, words=151665),
        "Octen/Octen-Embedding-0.6B": embedding_model(qwen3(1024, 28)),
        "google/embeddinggemma-300m": EMBEDDING_GEMMA,
        "emillykkejensen/EmbeddingGemma-Scandi-300m": EMBEDDING_GEMMA,
    },
    "Sparse and multi-vector": {
        "naver/splade-cocondenser-ensembledistil": bert(BASE, WORDS),
        "prithivida/Splade_PP_en_v1": bert(BASE, WORDS),
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v2-distill": distilbert(WORDS),
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v2-mini": bert(MINI, WORDS),
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill": distilbert(WORDS),
        "colbert-ir/colbertv2.0": {**bert(), "architectures": ["HF_ColBERT"]},
        "answerdotai/answerai-colbert-small-v1": {**bert(SMALL), "architectures": ["HF_ColBERT"]},
        "lightonai/GTE-ModernColBERT-v1": modernbert(),
        "mixedbread-ai/mxbai-edge-colbert-v0-17m": ettin(256, 7, 4, 384, 50370, "Model"),
    },
    "Rerankers and other cross-encoders": {
        "cross-encoder/ms-marco-MiniLM-L2-v2": bert(sizes(384, 2, 30522), RANKS),
        "cross-encoder/ms-marco-MiniLM-L4-v2": bert(sizes(384, 4, 30522), RANKS),
        "cross-encoder/ms-marco-MiniLM-L6-v2": bert(MINI, RANKS),
        "cross-encoder/ms-marco-MiniLM-L12-v2": bert(SMALL, RANKS),
        "cross-encoder/ms-marco-TinyBERT-L2-v2": bert(sizes(128, 2, 30522), RANKS),
        "cross-encoder/ms-marco-electra-base": electra(768, RANKS),
        "cross-encoder/stsb-roberta-base": roberta(BASE, RANKS),
        "cross-encoder/stsb-roberta-large": roberta(LARGE, RANKS),
        "cross-encoder/quora-roberta-base": roberta(BASE, RANKS),
        "cross-encoder/nli-roberta-base": roberta(BASE, RANKS),
        "cross-encoder/nli-distilroberta-base": roberta(sizes(768, 6, 50265), RANKS),
        "cross-encoder/nli-deberta-v3-small": deberta(RANKS) | {"num_hidden_layers": 6},
        "cross-encoder/nli-deberta-v3-base": deberta(RANKS),
        "cross-encoder/nli-deberta-v3-large": deberta(RANKS) | sizes(1024, 24, 128100),
        "cross-encoder/ettin-reranker-17m-v1": ettin(256, 7, 4, 384, 50368, RANKS),
        "cross-encoder/ettin-reranker-32m-v1": ettin(384, 10, 6, 576, 50368, RANKS),
        "cross-encoder/ettin-reranker-68m-v1": ettin(512, 19, 8, 768, 50368, RANKS),
        "cross-encoder/ettin-reranker-150m-v1": modernbert(768, RANKS),
        "cross-encoder/ettin-reranker-400m-v1": modernbert(1024, RANKS),
        "mixedbread-ai/mxbai-rerank-xsmall-v1": deberta(RANKS) | sized(384, 12, 6, 1536, 128100),
        "mixedbread-ai/mxbai-rerank-base-v1": deberta(RANKS),
        "mixedbread-ai/mxbai-rerank-large-v1": deberta(RANKS) | sizes(1024, 24, 128100),
        "jinaai/jina-reranker-v1-tiny-en": jina(sizes(384, 4, 61056), RANKS),
        "jinaai/jina-reranker-v1-turbo-en": jina(sizes(384, 6, 61056), RANKS),
        "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": qwen3(1024, 28, RANKS),
        "Qwen/Qwen3-Reranker-0.6B": judge(1024, 28),
        "Qwen/Qwen3-Reranker-4B": judge(2560, 36),
        "Qwen/Qwen3-Reranker-8B": judge(4096, 36),
    },
    "To fine-tune, and fine-tuned": {
        "google-bert/bert-base-uncased": bert(BASE, WORDS),
        "google-bert/bert-large-uncased": bert(LARGE, WORDS),
        "google-bert/bert-base-cased": bert(sizes(768, 12, CASED), WORDS),
        "google-bert/bert-base-multilingual-cased": bert(sizes(768, 12, 119547), WORDS),
        "google-bert/bert-base-multilingual-uncased": bert(sizes(768, 12, 105879), WORDS),
        "google-bert/bert-base-chinese": bert(sizes(768, 12, CHINESE), WORDS),
        "FacebookAI/roberta-base": roberta(BASE, WORDS),
        "FacebookAI/roberta-large": roberta(LARGE, WORDS),
        "FacebookAI/xlm-roberta-base": xlmr(BASE, WORDS),
        "FacebookAI/xlm-roberta-large": xlmr(LARGE, WORDS),
        "almanach/camembert-base": roberta(
            vocab_size=32005, model_type="camembert", architectures=["CamembertForMaskedLM"]
        ),
        "distilbert/distilbert-base-uncased": distilbert(WORDS),
        "distilbert/distilbert-base-cased": distilbert(WORDS, CASED),
        "distilbert/distilbert-base-multilingual-cased": distilbert(WORDS, 119547),
        "distilbert/distilroberta-base": roberta(sizes(768, 6, 50265), WORDS),
        "google/electra-small-discriminator": electra(256),
        "google/electra-base-discriminator": electra(768),
        "microsoft/mpnet-base": mpnet(WORDS),
        "microsoft/codebert-base": roberta(),
        "microsoft/graphcodebert-base": roberta(BASE, WORDS),
        "allenai/scibert_scivocab_uncased": {**sizes(768, 12, 31090), "model_type": "bert"},
        "emilyalsentzer/Bio_ClinicalBERT": bert(sizes(768, 12, CASED), WORDS),
        "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract": bert(BASE, WORDS),
        "answerdotai/ModernBERT-base": modernbert(768, WORDS),
        "answerdotai/ModernBERT-large": modernbert(1024, WORDS),
        "jhu-clsp/mmBERT-base": modernbert(768, WORDS)
        | {"vocab_size": 256000, "local_rope_theta": 160000.0},
        "EuroBERT/EuroBERT-210m": eurobert(),
        "EuroBERT/EuroBERT-610m": eurobert(1152, 6),
        "chandar-lab/NeoBERT": {
            **sizes(768, 28, 30522),
            "model_type": "neobert",
            "architectures": ["NeoBERTLMHead"],
            "hidden_act": "SwiGLU",
            "max_length": 4096,
        },
        "microsoft/deberta-v3-small": deberta("") | {"num_hidden_layers": 6},
        "microsoft/deberta-v3-base": deberta(""),
        "microsoft/deberta-v3-large": deberta("") | sizes(1024, 24, 128100),
        "microsoft/mdeberta-v3-base": deberta("") | {"vocab_size": 251000},
        "microsoft/deberta-base": other("deberta"),
        "albert/albert-base-v2": albert(),
        "allenai/longformer-base-4096": other("longformer"),
        "facebook/bart-large-mnli": other("bart"),
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": distilbert(RANKS),
        "distilbert/distilbert-base-cased-distilled-squad": distilbert(SPANS, CASED),
        "cardiffnlp/twitter-roberta-base-sentiment-latest": roberta(BASE, RANKS),
        "j-hartmann/emotion-english-distilroberta-base": roberta(sizes(768, 6, 50265), RANKS),
        "SamLowe/roberta-base-go_emotions": roberta(BASE, RANKS),
        "nlptown/bert-base-multilingual-uncased-sentiment": bert(sizes(768, 12, 105879), RANKS),
        "unitary/toxic-bert": bert(BASE, RANKS),
        "ProsusAI/finbert": bert(BASE, RANKS),
        "papluca/xlm-roberta-base-language-detection": xlmr(BASE, RANKS),
        "joeddav/xlm-roberta-large-xnli": xlmr(LARGE, RANKS),
        "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli": deberta(RANKS),
        "MoritzLaurer/mDeBERTa-v3-base-mnli-xnli": deberta(RANKS) | {"vocab_size": 251000},
        "protectai/deberta-v3-base-prompt-injection-v2": deberta(RANKS),
        "dslim/bert-base-NER": bert(sizes(768, 12, CASED), TOKENS),
        "dslim/bert-large-NER": bert(sizes(1024, 24, CASED), TOKENS),
        "Davlan/distilbert-base-multilingual-cased-ner-hrl": distilbert(TOKENS, 119547),
        "Jean-Baptiste/camembert-ner": roberta(
            vocab_size=32005,
            model_type="camembert",
            architectures=["CamembertForTokenClassification"],
        ),
        "deepset/roberta-base-squad2": roberta(BASE, SPANS),
    },
}

# Where the layouts of families were taken from, and against what the results are tested. A layout
# is a family's keys and tensor names; see `layout_of`.
TRANSFORMERS = "transformers 5.22, `src/transformers/models/{0}/modeling_{0}.py`"
SAVED = "transformers' classes, each saved and loaded"
LAYOUTS: dict[str, tuple[str, str]] = {
    **{
        kind: (f"{TRANSFORMERS.format(module)}, {commit}", SAVED)
        for kind, module, commit in (
            ("bert", "bert", "8ec58104181b"),
            ("roberta", "roberta", "87b236ba2be8"),
            ("xlm-roberta", "xlm_roberta", "c919542dd33c"),
            ("camembert", "camembert", "658e0fb337a3"),
            ("distilbert", "distilbert", "e368c1a8819d"),
            ("electra", "electra", "4770c6d87fb4"),
            ("mpnet", "mpnet", "ade3d756fc1a"),
            ("albert", "albert", "3c354ea20e34"),
            ("deberta-v2", "deberta_v2", "967ed0db0367"),
            ("modernbert", "modernbert", "1ae3d1e0c466"),
            ("eurobert", "eurobert", "af50c3ca5652"),
            ("qwen3", "qwen3", "9ee3f431c32e"),
            ("gemma3_text", "gemma3", "f14d0cbc824e"),
        )
    },
    "qwen3 that answers yes or no": (
        "the card of Qwen/Qwen3-Reranker-0.6B, as huggingface/sentence-transformers has it, "
        "`tests/cross_encoder/test_model.py`, cad211983f36",
        "transformers' Qwen3ForCausalLM by the recipe of the card; sentence-transformers' "
        "CrossEncoder with LogitScore",
    ),
    "nomic_bert": (
        "nomic-ai/contrastors, `src/contrastors/models/huggingface/modeling_hf_nomic_bert.py`, "
        "613ddfd37309; " + TRANSFORMERS.format("nomic_bert") + ", ca6025a149ca",
        SAVED,
    ),
    "gte": (TRANSFORMERS.format("gte"), SAVED),
    "new": (
        "xuhaike/SparseCL (the authors' code with additions), `sparsecl/gte/modeling.py`, "
        "14fcd8bcfeef",
        "transformers' classes; stretched angles, which these lack, the authors' code run in place",
    ),
    "bert with ALiBi": (
        "huggingface/text-embeddings-inference, `backends/candle/src/models/jina.rs`, 02506d0b3879",
        "a reference in float64 written from the paper; unproven against the authors' code",
    ),
    "jina_embeddings_v3": (TRANSFORMERS.format("jina_embeddings_v3") + ", 5f8d1c6bac8e", SAVED),
    "xlm-roberta with rotary positions": (
        "ggml-org/llama.cpp, `conversion/bert.py`, 7bca1fd9ca2a",
        "transformers' classes, with adapters merged by hand",
    ),
    "neobert": (
        "the authors' first commit in JonasNasimzada/NeoBERT, `src/neobert/model/model.py`, "
        "c898c9794322",
        "the authors' code run in place",
    ),
}
POSITIONS = {"alibi": "ALiBi", "rotary": "rotary positions"}  # that make another layout

# What would have to be built, by what is refused; the loader says it too, where it is a family.
MISSING = {
    **REFUSED,
    "mixture of experts": "layers of which a token chooses two of eight",
    "jinaai/jina-bert-v2-qk-post-norm": "norms of all heads of queries and keys at once, and two "
    "norms after attention",
}


def layout_of(raw: Mapping[str, Any]) -> str:
    """The layout of a configuration, a key of LAYOUTS."""
    positions = POSITIONS.get(raw.get("position_embedding_type", ""))
    if raw["model_type"] == "qwen3" and "Reranker" in raw.get("_name_or_path", ""):
        return "qwen3 that answers yes or no"
    return f"{raw['model_type']} with {positions}" if positions else raw["model_type"]


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
        "mixture of experts" if raw.get("num_experts") else None,
        raw["model_type"],
    ]
    return next(value for value in values if value in MISSING)


def tables() -> dict[str, str]:
    """What a sentence-transformers folder may hold, as the loader has it."""
    listed = {"kinds": KINDS, "poolings": POOLINGS, "activations": ACTIVATIONS}
    return {name: ", ".join(f"`{item}`" for item in items) for name, items in listed.items()}


def known(name: str) -> dict[str, Any]:
    """What MTEB's list of models says of a model; empty if it is not there."""
    return FACTS["models"].get(name, {})


def status(name: str, good: bool, why: str) -> str:
    """The last column: what was compared, what is understood, or why not."""
    if not good:
        return why.partition(": it needs")[0]
    if (work := WORKS.get(name)) is None:
        return "understood"
    return (
        f"**works**: {work['against']} at most {work['difference']:.1e} away, revision "
        f"{work['revision'][:19]}, {work['date']}"
    )


def page() -> str:
    """The whole file."""
    entries = list(rows())
    understood = [name for _, name, _, good, _ in entries if good]
    sized = [name for name in understood if "parameters" in known(name)]
    lines = [INTRODUCTION, MODULES.format(**tables())]
    lines.append(
        f"## Models\n\n**{len(understood)} of these {len(entries)} are understood** (the layout of "
        f"each is cited and tested below), {len(sized)} of them with sizes that are confirmed by "
        f"MTEB's count of weights.\n\n**Of {len(WORKS)} the real weights were compared**, and they "
        f"work.\n"
    )
    for group in MODELS:
        lines += [f"### {group}\n", "| model | layout | weights | |", "|---|---|---:|---|"]
        for _, name, raw, good, why in (row for row in entries if row[0] == group):
            count = known(name).get("parameters")
            size = f"{count / 1e6:,.1f} M" if count else ""
            lines.append(f"| {name} | {layout_of(raw)} | {size} | {status(name, good, why)} |")
        lines.append("")
    lines += ["## Where layouts were taken from\n", "| layout | public files | tested against |"]
    lines.append("|---|---|---|")
    lines += [f"| {kind} | {source} | {oracle} |" for kind, (source, oracle) in LAYOUTS.items()]
    lines.append(
        f"\nSizes and the numbers of weights: embeddings-benchmark/mteb, `mteb/models/`, "
        f"{FACTS['commit']}; file and revision of each model are in `docs/models.toml`.\n"
    )
    lines += ["## What is missing for the rest\n", "| refused | models | what it would take |"]
    lines.append("|---|---|---|")
    refused = [(lacking(raw), name) for _, name, raw, good, _ in entries if not good]
    for value, what in MISSING.items():
        named = ", ".join(name for lacks, name in refused if lacks == value)
        lines.append(f"| {value} | {named} | {what} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with atomic.new_file(Path(sys.argv[1])) as file:
        file.write(page().encode())
