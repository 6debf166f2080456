"""`packhorse convert`: a checkpoint of any format, written in another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress
from packhorse.cli.flags import GELUS, Beside
from packhorse.errors import CheckpointError

if TYPE_CHECKING:
    from packhorse.checkpoint import Checkpoint


def convert(
    source: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    target: Annotated[Path, Parameter(help="The folder to write: new, or empty.")],
    /,
    *,
    to: Annotated[
        Literal["hf", "tf1", "onnx"],
        Parameter(help="hf: safetensors; tf1: a TensorFlow checkpoint; onnx: the padded graph."),
    ] = "hf",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        Parameter(help="Number format of the weights; default that of the source."),
    ] = None,
    beside: Beside = Beside(),  # noqa: B008 (frozen)
    vocab_size: Annotated[
        int | None, Parameter(help="Pad or crop the vocabulary's tables to this many rows.")
    ] = None,
    max_positions: Annotated[
        int | None, Parameter(help="Crop the table of positions to this many rows.")
    ] = None,
    repeat_positions: Annotated[
        bool,
        Parameter(
            negative="", show_default=False, help="Make a longer table by repeating what is there."
        ),
    ] = False,
    allow_nonfinite: Annotated[
        bool, Parameter(negative="", show_default=False, help="Keep NaN and infinity.")
    ] = False,
    overwrite: Annotated[
        bool, Parameter(negative="", show_default=False, help="Replace a folder that is there.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint in another format, with its configuration and its tokenizer.

    Values are those of the source bit by bit unless --dtype says otherwise. The
    folder is written whole or not at all. Optimizer state is not carried over.
    Which GELU a TensorFlow model computes is read from its graph (.pb, .meta) or
    given with --gelu, and written into the configuration: gelu, or gelu_new.

    Try:
      packhorse convert uncased_L-12_H-768_A-12 bert-base-hf
      packhorse convert ./my-model ./my-model-tf1 --to tf1
      packhorse convert model.onnx ./hf --config config.json --vocab vocab.txt
      packhorse convert model.ckpt-9000 ./hf --gelu tanh --ignore 'teacher/*'
    """
    from packhorse import checkpoint
    from packhorse.device import parse_dtype

    with progress("converting") as advance:
        advance(0, 2)
        found = checkpoint.load(
            source,
            **beside.given(),
            vocab_size=vocab_size,
            max_positions=max_positions,
            repeat_positions=repeat_positions,
            dtype=parse_dtype(dtype) if dtype else None,
            allow_nonfinite=allow_nonfinite,
        )
        advance(1, 2)
        checkpoint.write(target, found, to=to, overwrite=overwrite)
        advance(2, 2)
    wrote = sorted(
        path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()
    )
    for line in found.notes:
        note(line)
    if found.format in ("tf1", "frozen") and found.gelu.form:
        note(f"GELU: {GELUS[found.gelu.form]}: {found.gelu.reason}")
    try:
        checkpoint.tokenizer(found)
    except CheckpointError as error:
        note(f"warning: the target cannot be used with texts: {error}")
    note(f"{found.format} to {to}: {target} ({', '.join(wrote)})")
    said = {"source": source, "from": found.format, "to": to, "folder": str(target)}
    emit({**said, "files": wrote, **_holds(found)}, json)


def _holds(found: "Checkpoint") -> dict[str, object]:
    tensors = dict(found.model.named_parameters())
    return {
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "heads": list(found.model.heads),
        "gelu": found.gelu.form,
        "gelu_reason": found.gelu.reason,
    }
