"""Make the committed exports again: `python tests/checkpoint/make_exports.py FOLDER`.

optimum and `transformers.onnx` need an older transformers than the tests do, so they get an
environment of their own in FOLDER, which pip fills. What they write of tiny random models, and what
ONNX Runtime's quantizers make of that, goes to `exports/` with the weights as safetensors
(`KIND.safetensors`) to compare with, and README.md gets the versions that wrote them.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import venv
from functools import partial
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "exports"
# One call: the pin keeps pip from choosing another torch for one of the others.
PACKAGES = ("torch==2.13.0", "transformers==4.57.*", "optimum-onnx", "onnx", "onnxruntime")
VERSIONS = ("torch", "transformers", "optimum", "optimum-onnx", "onnx", "onnxruntime")
SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
}
DISTIL = {
    "vocab_size": 60,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 24,
}
ELECTRA = SIZES | {"embedding_size": 8}
# Kind: the class, the task as optimum calls it, the sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "feature-extraction", SIZES),
    "bert-mlm": ("BertForMaskedLM", "fill-mask", SIZES),
    "bert-classify": ("BertForSequenceClassification", "text-classification", SIZES),
    "bert-span": ("BertForQuestionAnswering", "question-answering", SIZES),
    "roberta-mlm": ("RobertaForMaskedLM", "fill-mask", SIZES),
    "distilbert-span": ("DistilBertForQuestionAnswering", "question-answering", DISTIL),
    "electra-classify": ("ElectraForSequenceClassification", "text-classification", ELECTRA),
}
FEATURES = {
    "bert": "default",
    "bert-mlm": "masked-lm",
    "bert-classify": "sequence-classification",
    "bert-span": "question-answering",
}


def main(folder: Path) -> None:
    """Make the environment and run this file again inside it."""
    python = folder / "environment" / "bin" / "python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    subprocess.run([python, "-m", "pip", "install", *PACKAGES], check=True)
    subprocess.run([python, __file__, "--inside"], check=True)


def inside() -> None:
    """Write every export and the table of them."""
    TARGET.mkdir(exist_ok=True)
    rows = []
    for kind in MODELS:
        model = make(kind)
        save_weights(model, kind)
        rows += [(name, kind, variant) for name, variant in export(model, kind).items()]
    write_readme(rows)


def make(kind: str) -> Any:
    """A model whose weights are all random: zeros and ones would hide one that went astray."""
    import torch
    import transformers

    name, _, sizes = MODELS[kind]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_weights(model: Any, kind: str) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, TARGET / f"{kind}.safetensors")
    (TARGET / f"{kind}.safetensors").chmod(0o644)  # the library lets no one but the owner read it


def export(model: Any, kind: str) -> dict[str, str]:
    """Every export of one model: file and how it came about."""
    written = {f"optimum-{kind}.onnx": "optimum"}
    export_optimum(model, kind, TARGET / f"optimum-{kind}.onnx")
    if kind in FEATURES:
        written[f"transformers-{kind}.onnx"] = "transformers.onnx"
        export_transformers(model, kind, TARGET / f"transformers-{kind}.onnx")
    if kind == "bert-mlm":
        written |= derive(model, TARGET / f"optimum-{kind}.onnx")
    return written


def export_optimum(model: Any, kind: str, to: Path) -> None:
    from optimum.exporters.onnx import onnx_export_from_model

    with tempfile.TemporaryDirectory() as folder:
        onnx_export_from_model(
            model, folder, task=MODELS[kind][1], do_validation=False, sequence_length=12
        )
        to.write_bytes((Path(folder) / "model.onnx").read_bytes())


def export_transformers(model: Any, kind: str, to: Path) -> None:
    import torch
    from transformers import BertTokenizer
    from transformers.models.bert import BertOnnxConfig
    from transformers.onnx import export

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    newer = torch.onnx.export
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        vocabulary.write_text("\n".join(words))
        config = BertOnnxConfig(model.config, task=FEATURES[kind])
        # It was written when this was torch's default.
        torch.onnx.export = partial(newer, dynamo=False)
        try:
            export(BertTokenizer(str(vocabulary)), model, config, 17, to)
        finally:
            torch.onnx.export = newer


def derive(model: Any, plain: Path) -> dict[str, str]:
    """What is made of an export: weights tied, halved, quantized in three ways."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from optimum.onnx import remove_duplicate_weights_from_tied_info

    tied = [["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"]]
    to = {
        variant: plain.with_stem(f"{plain.stem}-{variant}") for variant in ("tied", "half", "int8")
    }
    remove_duplicate_weights_from_tied_info(onnx.load(plain), model, tied, str(to["tied"]))
    onnx.save(convert_float_to_float16(onnx.load(plain)), to["half"])
    quantize_dynamic(plain, to["int8"])
    channels = plain.with_stem(f"{plain.stem}-uint8-channels")
    quantize_dynamic(plain, channels, per_channel=True, weight_type=QuantType.QUInt8)
    static = plain.with_stem(f"{plain.stem}-qdq")
    quantize(plain, static)
    return {
        to["tied"].name: "optimum, its removal of duplicates",
        to["half"].name: "optimum, then onnxruntime.transformers.float16",
        to["int8"].name: "optimum, then onnxruntime quantize_dynamic",
        channels.name: "optimum, then quantize_dynamic to unsigned numbers, per channel",
        static.name: "optimum, then onnxruntime quantize_static (QDQ), per channel",
    }


def quantize(plain: Path, to: Path) -> None:
    import numpy
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        """Three batches of random tokens."""

        def __init__(self) -> None:
            rng = numpy.random.default_rng(0)
            self.batches = iter([rng.integers(0, 60, (2, 12)) for _ in range(3)])

        def get_next(self) -> dict[str, Any] | None:
            ids = next(self.batches, None)
            if ids is None:
                return None
            return {
                "input_ids": ids,
                "attention_mask": numpy.ones_like(ids),
                "token_type_ids": numpy.zeros_like(ids),
            }

    quantize_static(plain, to, Reader(), per_channel=True, weight_type=QuantType.QInt8)


def write_readme(rows: list[tuple[str, str, str]]) -> None:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    table = "\n".join(
        f"| `{name}` | `{kind}.safetensors` | {variant} |" for name, kind, variant in rows
    )
    text = f"""# Exports by other programs

Tiny random models, written by `tests/checkpoint/make_exports.py` with {versions}; the weights of
each as safetensors, to compare with. `tests/checkpoint/test_onnx_exports.py` reads them.

| file | weights | written by |
|---|---|---|
{table}
"""
    (TARGET / "README.md").write_text(text)


if __name__ == "__main__":
    inside() if sys.argv[1:] == ["--inside"] else main(Path(sys.argv[1]))
