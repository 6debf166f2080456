"""Tiny sparse and multi-vector models, written by the libraries that define their files."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import torch

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] [unused0] [unused1] the horse mule carries two sacks to market"
    " and home cat sat on mat a dog barks ##s"
)
VOCABULARY = [*WORDS.split(), *string.punctuation]
TEXTS = [
    "the horse",
    "the mule carries two sacks to market , and the horse carries two sacks home !",
    "mule",
    "a dog barks . the cat sat on a mat ?",
    "home and home and home and market",
    "",
]


def bert(folder: Path, kind: str = "BertForMaskedLM") -> Path:
    """A folder with a tiny random BERT and its tokenizer."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
    )
    torch.manual_seed(3)
    model = getattr(transformers, kind)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(model.base_model.embeddings.word_embeddings.weight, std=3)
    for name, parameter in model.named_parameters():
        if name.endswith("LayerNorm.weight"):  # around 1, so that words stay far apart
            torch.nn.init.normal_(parameter, mean=1, std=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.model_max_length = 40
    tokenizer.save_pretrained(folder)
    return folder


def splade(base: Path, folder: Path, pooling: str, activation: str) -> Any:
    """A model of one transformer, saved to the folder and opened again."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    transformer = Transformer(str(base), transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling(pooling, activation)], device="cpu")
    model.save_pretrained(str(folder))
    return SparseEncoder(str(folder), device="cpu")


def inference_free(base: Path, folder: Path) -> Any:
    """A model whose queries are weighed by a table."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    transformer = Transformer(str(base), transformer_task="fill-mask")
    weights = torch.rand(len(VOCABULARY), generator=torch.Generator().manual_seed(5))
    weights[7] = 0  # "the" weighs nothing
    table = SparseStaticEmbedding(transformer.tokenizer, weights, frozen=True)
    pooling = SpladePooling("max", "log1p_relu")
    router = Router.for_query_document([table], [transformer, pooling])
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(folder))
    return SparseEncoder(str(folder), device="cpu")


def late(base: Path, folder: Path, **settings: Any) -> Any:
    """A multi-vector model of sentence-transformers' own kind, with prompts and expansion."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    features = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    dense = Dense(32, 12, False, torch.nn.Identity(), **features)
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    model = MultiVectorEncoder(
        modules=[
            Transformer(str(base), **settings),
            dense,
            mask,
            Normalize(module_input_name="token_embeddings"),
        ],
        prompts={"query": "home ", "document": ""},
        device="cpu",
    )
    model.save_pretrained(str(folder))
    return MultiVectorEncoder(str(folder), device="cpu")


def stanford(base: Path, folder: Path, attends: bool = False) -> Any:
    """An original ColBERT's folder, and sentence-transformers' reading of it."""
    from safetensors.torch import load_file, save_file
    from sentence_transformers import MultiVectorEncoder

    shutil.copytree(base, folder)
    tensors = {f"bert.{k}": v for k, v in load_file(base / "model.safetensors").items()}
    random = torch.Generator().manual_seed(7)
    tensors["linear.weight"] = torch.randn(12, 32, generator=random)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 12,
        "doc_maxlen": 14,
        "mask_punctuation": True,
        "attend_to_mask_tokens": attends,
        "dim": 12,
        "similarity": "cosine",
    }
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return MultiVectorEncoder(str(folder), device="cpu")


def pylate(base: Path, folder: Path, **settings: Any) -> None:
    """A folder as PyLate 1.6 writes it: two modules, and its settings beside the prompts."""
    from safetensors.torch import save_file

    shutil.copytree(base, folder)
    (folder / "1_Dense").mkdir()
    random = torch.Generator().manual_seed(9)
    weight = torch.randn(12, 32, generator=random)
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    files: dict[str, Any] = {
        "1_Dense/config.json": {
            "in_features": 32,
            "out_features": 12,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
            "use_residual": False,
        },
        "modules.json": [
            {
                "idx": 0,
                "name": "0",
                "path": "",
                "type": "sentence_transformers.models.Transformer",
            },
            {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
        ],
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "ColBERT",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "query_prefix": "[unused0]",
            "document_prefix": "[unused1]",
            "query_length": 12,
            "document_length": 14,
            "attend_to_expansion_tokens": False,
            "skiplist_words": list(string.punctuation),
            "do_query_expansion": True,
            **settings,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


def m3(base: Path, folder: Path) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """A folder like bge-m3's: dense by its modules, and two files of further heads."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    parts = [modules.Transformer(str(base)), modules.Pooling(32, "cls"), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    torch.manual_seed(11)
    sparse, vectors = torch.nn.Linear(32, 1), torch.nn.Linear(32, 32)
    torch.nn.init.normal_(sparse.weight)  # large enough that some weights are above 0
    torch.save(sparse.state_dict(), folder / "sparse_linear.pt")
    torch.save(vectors.state_dict(), folder / "colbert_linear.pt")
    return sparse, vectors
