"""Write a model: a folder of weights in one of three formats, with all files needed to use them.

Formats differ only in the file of weights and the name of the configuration. The tokenizer and the
sentence-transformers layout are written beside any of them, so that a model that was converted to
TensorFlow or ONNX still computes the same vectors when it is read here. A folder is written whole
or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint import adapters, files, hf, names, quantized, sentence
from packhorse.checkpoint.loading import Checkpoint
from packhorse.checkpoint.names.tf1 import to_tensorflow
from packhorse.checkpoint.tensorflow import tf1
from packhorse.device import dtype_name
from packhorse.errors import InputError
from packhorse.model.heads import Embed
from packhorse.tokens.files import gguf_settings, is_cased, open_library, wordpiece_vocabulary

ADAPTER = "adapter_model.safetensors"
PREFIX = "bert_model.ckpt"  # the name of Google's own checkpoints


def write(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    to: str = "hf",
    overwrite: bool = False,
    products: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a folder that transformers ("hf"), TensorFlow ("tf1") or ONNX Runtime ("onnx") loads.

    The tokenizer is copied from the checkpoint's folder. Keys of its configuration that are not
    understood here are kept. products: int8 or float8, to store the encoder's linear layers in
    ("hf" alone), but those that are `kept`, as `checkpoint.quantized` describes; the checkpoint
    must be in fp32, and for float8 have the scales of all inputs.
    """
    if to not in WRITERS:
        raise InputError(f"cannot write {to!r}; the formats are {', '.join(WRITERS)}")
    if checkpoint.layout and (checkpoint.layout.splade or checkpoint.layout.multi):
        raise InputError(
            "sparse and multi-vector models are not written, because their heads would be lost; "
            "use the folder as it is"
        )
    if to != "hf" and not checkpoint.config.classic:
        kind = checkpoint.raw.get("model_type", "such")
        raise InputError(
            f"{kind} models cannot be written as {to!r}, which here knows BERT's own layers only; "
            f"write 'hf'"
        )
    model = checkpoint.model
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("heads.embed.")
    }
    raw, tensors = names.export(checkpoint.raw, checkpoint.config, state, model.heads.keys())
    if products is not None:
        if to != "hf":
            raise InputError(f"{dtype_name(products)} is written as 'hf', not as {to!r}")
        raw, tensors = _rounded(checkpoint, state, raw, tensors, products)
    if checkpoint.labels:
        raw |= names.export_labels(checkpoint.labels, checkpoint.problem)
    with files.new_folder(Path(folder), overwrite=overwrite) as draft:
        WRITERS[to](draft, checkpoint, raw, tensors, max_shard_bytes)
        _write_tokenizer(draft, checkpoint)
        _write_layout(draft, checkpoint)
    return Path(folder)


def write_adapter(
    folder: str | Path,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    overwrite: bool = False,
) -> Path:
    """Write a LoRA adapter in PEFT's layout, with the tokenizer and the layout of its model.

    sentence-transformers opens the folder as a model; the base is where `config` says.
    """
    with files.new_folder(Path(folder), overwrite=overwrite) as draft:
        files.write_json(draft, adapters.CONFIG, dict(config))
        hf.write_tensors(draft / ADAPTER, tensors)
        _write_tokenizer(draft, checkpoint)
        _name_tokenizer(draft)
        _write_layout(draft, checkpoint)
    return Path(folder)


def _name_tokenizer(draft: Path) -> None:
    """Name the tokenizer's class, which transformers otherwise takes from config.json.

    An adapter has none: with one beside it, transformers looks for the model's weights there.
    """
    name = "tokenizer_config.json"
    settings = files.read_object(draft, name, optional=True)
    if "tokenizer_class" not in settings:
        is_wordpiece = (draft / "vocab.txt").is_file()
        kind = "BertTokenizer" if is_wordpiece else "PreTrainedTokenizerFast"
        files.write_json(draft, name, {**settings, "tokenizer_class": kind})


def _rounded(
    checkpoint: Checkpoint,
    state: dict[str, Tensor],
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    products: torch.dtype,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and foreign `tensors` with linear layers in int8 or float8."""
    weights = quantized.quantizable(state, checkpoint.kept)

    def foreign(numbers: Mapping[str, float]) -> dict[str, float]:
        """A number for each of our weights as one for each foreign tensor that it becomes."""
        # Integers in the places of these weights, whose values are the numbers' positions.
        order = {name: place for place, name in enumerate(numbers)}
        marks = state | {
            name: torch.tensor(place, dtype=torch.int32).expand(state[name].shape)
            for name, place in order.items()
        }
        _, marks = names.export(
            checkpoint.raw, checkpoint.config, marks, checkpoint.model.heads.keys()
        )
        values = list(numbers.values())
        return {
            name: values[int(mark.flatten()[0])]
            for name, mark in marks.items()
            if mark.dtype == torch.int32
        }

    if products == torch.int8:
        return quantized.quantize(raw, tensors, set(foreign(dict.fromkeys(weights, 0.0))))
    inputs = {
        name: checkpoint.scales.get(name.removeprefix(quantized.LAYERS).removesuffix(".weight"))
        for name in weights
    }
    missing = [name for name, scale in inputs.items() if scale is None]
    if missing:
        raise InputError(
            f"the input of {missing[0]} has no scale for float8; write with `packhorse quantize`, "
            "which calibrates"
        )
    of_weights = foreign(quantized.weight_scales(state, weights))
    of_inputs = foreign({name: scale for name, scale in inputs.items() if scale is not None})
    scales = {name: (scale, of_inputs[name]) for name, scale in of_weights.items()}
    return quantized.to_e4m3(raw, tensors, scales)


Writer = Callable[[Path, Checkpoint, dict[str, Any], dict[str, Tensor], int], None]


def _write_hf(
    draft: Path, checkpoint: Checkpoint, raw: dict[str, Any], tensors: dict[str, Tensor], limit: int
) -> None:
    hf.write(draft, raw, tensors, limit)


def _write_tf1(
    draft: Path, checkpoint: Checkpoint, raw: dict[str, Any], tensors: dict[str, Tensor], limit: int
) -> None:
    files.write_json(draft, "bert_config.json", raw)
    tf1.write(draft / PREFIX, to_tensorflow(names.prefixed(raw, tensors)))
    _write_vocabulary(draft, checkpoint)


def _write_onnx(
    draft: Path, checkpoint: Checkpoint, raw: dict[str, Any], tensors: dict[str, Tensor], limit: int
) -> None:
    from packhorse.checkpoint.onnx import export as onnx_export

    files.write_json(draft, hf.CONFIG, raw)
    onnx_export.write(draft / "model.onnx", checkpoint.model, tensors)


WRITERS: Mapping[str, Writer] = {"hf": _write_hf, "tf1": _write_tf1, "onnx": _write_onnx}


def _write_vocabulary(draft: Path, checkpoint: Checkpoint) -> None:
    """Write a `vocab.txt`, which TensorFlow's tools read, from a WordPiece tokenizer.json."""
    path = checkpoint.vocabulary
    if path is None or (path / "vocab.txt").is_file():
        return
    tokenizer = path / "tokenizer.json" if path.is_dir() else path
    if tokenizer.suffix in (".json", ".gguf") and (words := wordpiece_vocabulary(tokenizer)):
        (draft / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")


def _write_tokenizer(draft: Path, checkpoint: Checkpoint) -> None:
    path = checkpoint.vocabulary
    if path is None:
        return
    if path.is_dir():
        hf.copy_tokenizer(path, draft)
    elif path.suffix == ".gguf":
        open_library(path, {})[0].save(str(draft / "tokenizer.json"))
        settings = gguf_settings(path) | {"model_max_length": checkpoint.max_length}
        files.write_json(draft, "tokenizer_config.json", settings)
    else:
        name = "tokenizer.json" if path.suffix == ".json" else "vocab.txt"
        shutil.copyfile(path, draft / name)
        for name in set(hf.TOKENIZER) - {"tokenizer.json", "vocab.txt"}:
            if path.with_name(name).is_file():
                shutil.copyfile(path.with_name(name), draft / name)
    # transformers treats a vocabulary without settings as uncased.
    if not {"tokenizer.json", "tokenizer_config.json"} & {path.name for path in draft.iterdir()}:
        settings = {
            "do_lower_case": not is_cased(draft / "vocab.txt"),
            "model_max_length": checkpoint.max_length,
        }
        files.write_json(draft, "tokenizer_config.json", settings)


def _write_layout(draft: Path, checkpoint: Checkpoint) -> None:
    """Write the layout that was read, or a new one if the vectors are not plain means."""
    head = dict(checkpoint.model.heads).get("embed")
    embed = head if isinstance(head, Embed) else None
    plain = embed is None or not (embed.stages or embed.normalize or embed.pooling != ("mean",))
    if checkpoint.layout is None and plain:
        return
    layout = checkpoint.layout or sentence.SentenceLayout(draft, draft)
    prompts = {"prompts": checkpoint.prompts, "default_prompt_name": checkpoint.default_prompt}
    layout = replace(layout, settings={**layout.settings, **prompts})
    sentence.write(draft, layout, embed, checkpoint.config.hidden_size, checkpoint.max_length)
