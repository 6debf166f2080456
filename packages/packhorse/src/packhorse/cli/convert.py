"""`packhorse convert`: write a checkpoint of any format in another format."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress
from packhorse.cli.flags import GELUS, ModelFlags, flag
from packhorse.errors import CheckpointError


def convert(
    source: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    target: Annotated[Path, Parameter(help="The folder to write, new or empty.")],
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
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    vocab_size: Annotated[
        int | None, Parameter(help="Pad or crop the vocabulary's tables to this many rows.")
    ] = None,
    max_positions: Annotated[
        int | None, Parameter(help="Crop the table of positions to this many rows.")
    ] = None,
    repeat_positions: Annotated[
        bool, flag(help="Allow a longer table of positions, made by repeating the rows.")
    ] = False,
    allow_nonfinite: Annotated[bool, flag(help="Keep NaN and infinity.")] = False,
    overwrite: Annotated[bool, flag(help="Replace an existing folder.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint in another format, with its configuration and tokenizer.

    Values equal those of the source bit for bit, unless --dtype changes them. The
    folder is written whole or not at all. Optimizer state is not converted. The
    form of GELU of a TensorFlow model is read from its graph (.pb, .meta) or passed
    with --gelu, and written into the configuration as gelu or gelu_new.

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
        loaded = checkpoint.load(
            source,
            **model_flags.load_options(),
            vocab_size=vocab_size,
            max_positions=max_positions,
            repeat_positions=repeat_positions,
            dtype=parse_dtype(dtype) if dtype else None,
            allow_nonfinite=allow_nonfinite,
        )
        advance(1, 2)
        checkpoint.write(target, loaded, to=to, overwrite=overwrite)
        advance(2, 2)
    files = sorted(
        path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()
    )
    for message in loaded.notes:
        note(message)
    if loaded.format in ("tf1", "frozen") and loaded.gelu.form:
        note(f"GELU: {GELUS[loaded.gelu.form]}: {loaded.gelu.reason}")
    try:
        checkpoint.tokenizer(loaded)
    except CheckpointError as error:
        note(f"warning: the target cannot be used with texts: {error}")
    note(f"{loaded.format} to {to}: {target} ({', '.join(files)})")
    tensors = dict(loaded.model.named_parameters())
    document = {
        "source": source,
        "from": loaded.format,
        "to": to,
        "folder": str(target),
        "files": files,
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "heads": list(loaded.model.heads),
        "gelu": loaded.gelu.form,
        "gelu_reason": loaded.gelu.reason,
    }
    emit(document, json)
