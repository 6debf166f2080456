"""Tiny models under the names that sentence-transformers' own tests open, in folders of a hub.

They are made here, by that library: the right architectures, modules and files, few numbers. Words
have the first principal components of all-MiniLM-L6-v2's embeddings, because some tests compare
what sentences mean; all else is random. `ROOT/org/name/revision` is one revision of a model.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

WIDTH = 128
TINY = "sentence-transformers-testing/stsb-bert-tiny-safetensors"
OLDER = "ba33022fdf0b0fc2643263f0726f44d0a07d0e24"
LATEST = "f3cb857cba53019a20df283396bcca179cf051a4"
SAMPLE = [
    "What is the capital of France?",
    "Who has won the World Cup in 2016?",
    "The weather is nice!",
]


def make(root: Path, minilm: Path) -> None:
    """Write all models below `root`."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    words = _words(minilm)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(minilm))
    tokenizer.model_max_length = 512
    bert = root / "google-bert/bert-base-uncased/main"
    tokenizer.save_pretrained(bert)
    _config(transformers).save_pretrained(bert)
    _dense(root, bert, words)
    _rankers(root, bert, words)
    _sparse(root, bert, words)


def _words(minilm: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    words = load_file(minilm / "model.safetensors")["embeddings.word_embeddings.weight"]
    words = words - words.mean(0)
    _, _, directions = torch.linalg.svd(words, full_matrices=False)
    words = words @ directions[:WIDTH].T  # [V, WIDTH]
    return words / words.std()


def _config(transformers: Any, **options: Any) -> Any:
    return transformers.BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * WIDTH,
        **options,
    )


def _bert(kind: str, words: torch.Tensor, seed: int = 0, **options: Any) -> Any:
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, kind)(_config(transformers, **options))
    embeddings = model.base_model.embeddings
    with torch.no_grad():
        embeddings.word_embeddings.weight.copy_(words + 0.3 * seed * torch.randn_like(words))
        # The mean of a vector is not 0, as of a trained model's.
        model.base_model.encoder.layer[-1].output.LayerNorm.bias.fill_(0.03)
    return model


def _write(model: Any, bert: Path, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bert / name, folder / name)
    return folder


def _dense(root: Path, bert: Path, words: torch.Tensor) -> None:
    from peft import LoraConfig, get_peft_model
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    for revision, seed in (("main", 0), (OLDER, 1)):
        plain = _write(_bert("BertModel", words, seed), bert, root / "plain" / revision)
        parts = [modules.Transformer(str(plain)), modules.Pooling(WIDTH, "mean")]
        folder = root / TINY / revision
        SentenceTransformer(modules=parts, device="cpu").save_pretrained(
            str(folder), create_model_card=False
        )
        weights = parts[0].auto_model.state_dict()  # type: ignore[union-attr]
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "README.md").write_text(
            "---\nlibrary_name: sentence-transformers\n---\n\n# A model\n"
        )
    shutil.copytree(root / TINY / "main", root / TINY / LATEST)
    lora = root / "sentence-transformers-testing/stsb-bert-tiny-lora/main"
    adapted = get_peft_model(
        _bert("BertModel", words), LoraConfig(r=8, target_modules=["query", "key", "value"])
    )
    adapted.save_pretrained(str(lora))
    config = json.loads((lora / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = TINY
    (lora / "adapter_config.json").write_text(json.dumps(config))
    # As wide as the tests want it.
    import transformers

    wide = transformers.BertConfig(
        hidden_size=768, num_hidden_layers=1, num_attention_heads=12, intermediate_size=768
    )
    torch.manual_seed(0)
    folder = _write(transformers.BertModel(wide), bert, root / "wide/main")
    parts = [modules.Transformer(str(folder)), modules.Pooling(768, "mean")]
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(
        str(root / "sentence-transformers/paraphrase-distilroberta-base-v1/main"),
        create_model_card=False,
    )


def _rankers(root: Path, bert: Path, words: torch.Tensor) -> None:
    names = {
        "cross-encoder-testing/reranker-bert-tiny-gooaq-bce": 1,
        "cross-encoder-testing/reranker-bert-tiny-gooaq-bce-STv54": 1,
        "cross-encoder/stsb-distilroberta-base": 1,
        "BAAI/bge-reranker-base": 1,
        "cross-encoder/nli-MiniLM2-L6-H768": 3,
    }
    for name, labels in names.items():
        options: dict[str, Any] = {"num_labels": labels}
        if labels == 3:
            labels_by_number = {0: "contradiction", 1: "entailment", 2: "neutral"}
            options = {"id2label": labels_by_number}
            options["label2id"] = {label: number for number, label in labels_by_number.items()}
        model = _bert("BertForSequenceClassification", words, **options)
        folder = _write(model, bert, root / name / "main")
        (folder / "README.md").write_text("# A model\n")
    tanh = "torch.nn.modules.activation.Tanh"
    said = {
        "v3": {"sbert_ce_default_activation_function": tanh},
        "v4": {"sentence_transformers": {"activation_fn": tanh, "version": "4.0.1"}},
    }
    for version, settings in said.items():
        model = _bert("BertForSequenceClassification", words, num_labels=1)
        name = f"cross-encoder-testing/reranker-bert-tiny-gooaq-bce-tanh-{version}"
        folder = _write(model, bert, root / name / "main")
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(config))


def _sparse(root: Path, bert: Path, words: torch.Tensor) -> None:
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    model = _bert("BertForMaskedLM", words).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(bert))
    batch = tokenizer(SAMPLE, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits.amax(1)  # [n, V]
        model.cls.predictions.bias.fill_(-float(logits.quantile(0.9985)))
    folder = _write(model, bert, root / "mlm/main")
    transformer = Transformer(str(folder), transformer_task="fill-mask")
    splade = SparseEncoder(modules=[transformer, SpladePooling("max")], device="cpu")
    tiny = "sparse-encoder-testing/splade-bert-tiny-nq"
    splade.save_pretrained(str(root / tiny / "main"), create_model_card=False)
    weights = torch.rand(len(words), generator=torch.Generator().manual_seed(5))
    table = SparseStaticEmbedding(tokenizer, weights, frozen=True)
    router = Router.for_query_document([table], [transformer, SpladePooling("max")])
    free = "sparse-encoder-testing/inference-free-splade-bert-tiny-nq"
    SparseEncoder(modules=[router], device="cpu").save_pretrained(
        str(root / free / "main"), create_model_card=False
    )
    config = transformers.DistilBertConfig(dim=WIDTH, n_layers=1, n_heads=2, hidden_dim=WIDTH)
    model = transformers.DistilBertForMaskedLM(config)
    _write(model, bert, root / "distilbert/distilbert-base-uncased/main")


if __name__ == "__main__":
    import sys

    make(Path(sys.argv[1]), Path(sys.argv[2]))
