"""Write a model: a folder of weights in one of three formats, and all that is needed to use them.

Only the file of weights and the name of the configuration differ from format to format. Tokenizer
and sentence-transformers layout go beside any of them, so that a model that went through TensorFlow
or ONNX still gives the same vectors when it is read here. A folder is written whole or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import files, hf, names, sentence
from packhorse.checkpoint.loading import Checkpoint
from packhorse.checkpoint.names.tf1 import to_tensorflow
from packhorse.checkpoint.tensorflow import tf1_write
from packhorse.errors import InputError
from packhorse.model.heads import Embed
from packhorse.tokens.files import is_cased, wordpiece_vocabulary

PREFIX = "bert_model.ckpt"  # as Google's own checkpoints are called


def write(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    to: str = "hf",
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a folder that transformers ("hf"), TensorFlow ("tf1") or ONNX Runtime ("onnx") loads.

    The tokenizer is copied from the checkpoint's own folder. What its configuration said and is not
    understood here is kept.
    """
    if to not in WRITERS:
        raise InputError(f"cannot write {to!r}; the formats are {', '.join(WRITERS)}")
    if to != "hf" and not checkpoint.config.classic:
        kind = checkpoint.raw.get("model_type", "such")
        raise InputError(
            f"{kind} models cannot be written as {to!r}, which here knows BERT's own layers only; "
            f"write 'hf'"
        )
    model = checkpoint.model
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("heads.embed.")}
    raw, tensors = names.export(checkpoint.raw, checkpoint.config, state, model.heads.keys())
    if checkpoint.labels:
        raw |= names.export_labels(checkpoint.labels, checkpoint.problem)
    with files.new_folder(Path(folder), overwrite=overwrite) as draft:
        WRITERS[to](draft, checkpoint, raw, tensors, max_shard_bytes)
        _write_tokenizer(draft, checkpoint)
        _write_layout(draft, checkpoint)
    return Path(folder)


Writer = Callable[[Path, Checkpoint, dict[str, Any], dict[str, Tensor], int], None]


def _write_hf(
    draft: Path, of: Checkpoint, raw: dict[str, Any], tensors: dict[str, Tensor], limit: int
) -> None:
    hf.write(draft, raw, tensors, limit)


def _write_tf1(
    draft: Path, of: Checkpoint, raw: dict[str, Any], tensors: dict[str, Tensor], limit: int
) -> None:
    files.write_json(draft, "bert_config.json", raw)
    tf1_write.write(draft / PREFIX, to_tensorflow(names.prefixed(raw, tensors)))
    _write_vocabulary(draft, of)


def _write_onnx(
    draft: Path, of: Checkpoint, raw: dict[str, Any], tensors: dict[str, Tensor], limit: int
) -> None:
    from packhorse.checkpoint.onnx import export as onnx_export

    files.write_json(draft, hf.CONFIG, raw)
    onnx_export.write(draft / "model.onnx", of.model, tensors)


WRITERS: Mapping[str, Writer] = {"hf": _write_hf, "tf1": _write_tf1, "onnx": _write_onnx}


def _write_vocabulary(draft: Path, of: Checkpoint) -> None:
    """TensorFlow's tools read a `vocab.txt`; a WordPiece tokenizer.json has all that is in it."""
    where = of.vocabulary
    if where is None or (where / "vocab.txt").is_file():
        return
    made = where / "tokenizer.json" if where.is_dir() else where
    if made.suffix == ".json" and (words := wordpiece_vocabulary(made)):
        (draft / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")


def _write_tokenizer(draft: Path, of: Checkpoint) -> None:
    where = of.vocabulary
    if where is None:
        return
    if where.is_dir():
        hf.copy_tokenizer(where, draft)
    else:
        name = "tokenizer.json" if where.suffix == ".json" else "vocab.txt"
        shutil.copyfile(where, draft / name)
        for settings in set(hf.TOKENIZER) - {"tokenizer.json", "vocab.txt"}:
            if where.with_name(settings).is_file():
                shutil.copyfile(where.with_name(settings), draft / settings)
    # transformers takes a bare vocabulary for an uncased one.
    if not {"tokenizer.json", "tokenizer_config.json"} & {path.name for path in draft.iterdir()}:
        lower = not is_cased(draft / "vocab.txt")
        settings = {"do_lower_case": lower, "model_max_length": of.max_length}
        files.write_json(draft, "tokenizer_config.json", settings)


def _write_layout(draft: Path, of: Checkpoint) -> None:
    """The layout that was read, or a new one if the vectors cannot do without."""
    head = dict(of.model.heads).get("embed")
    embed = head if isinstance(head, Embed) else None
    plain = embed is None or not (embed.stages or embed.normalise or embed.pooling != ("mean",))
    if of.layout is None and plain:
        return
    layout = of.layout or sentence.Layout(draft, draft)
    said = {"prompts": of.prompts, "default_prompt_name": of.default_prompt}
    layout = replace(layout, settings={**layout.settings, **said})
    sentence.write(draft, layout, embed, of.config.hidden_size, of.max_length)
