"""`packhorse quantize`: write a model in int8 or float8, and say what that does to its vectors."""

import time
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import ModelFlags, flag
from packhorse.errors import InputError, PackhorseError

DEFAULT_TEXTS = 400  # docstrings of the standard library, if no file is passed


class TooCoarse(PackhorseError):
    """A model in int8 or float8 is too far from the one in fp32."""

    exit_code = 1


def quantize(
    source: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    target: Annotated[Path, Parameter(help="The folder to write, new or empty.")],
    /,
    *,
    dtype: Annotated[
        Literal["int8", "float8"],
        Parameter(
            help="Number format of the products: int8 for CPUs, float8 for GPUs from Ada on."
        ),
    ] = "int8",
    device: Annotated[
        str | None,
        Parameter(help="For float8: where to measure; default the accelerator, else cpu."),
    ] = None,
    calibrate: Annotated[
        str | None,
        Parameter(
            help="Texts whose vectors are compared, one per line or a column `text`: best those "
            "you will encode. Default docstrings of the standard library."
        ),
    ] = None,
    limit: Annotated[int, Parameter(help="Use at most so many of them.")] = 1000,
    keep: Annotated[
        str | None,
        Parameter(
            help="The share of fp32's score on your own task that must be kept, as 99.9%; needs "
            "--task and --input."
        ),
    ] = None,
    task: Annotated[
        Literal["squad", "stsb", "sts", "retrieval", "classification"] | None,
        Parameter(help="That task, as in evaluate: F1, Spearman, nDCG@10 or accuracy counts."),
    ] = None,
    input: Annotated[Path | None, flag(help="Its data, as for evaluate.")] = None,
    allow_loss: Annotated[
        bool, flag(help="Write the model even if its vectors move too far.")
    ] = False,
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    overwrite: Annotated[bool, flag(help="Replace an existing folder.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write a model whose linear layers are int8 or float8: smaller, and faster.

    int8 is for CPUs: weights get a scale per output channel, activations get one per
    token while the model runs. float8 is for GPUs: a weight and its input have one
    scale each, those of inputs calibrated by the texts.

    The texts also say how far vectors move: the cosine to fp32 and the overlap of the
    ten nearest texts, also for queries in the new format over an index in fp32. Layers
    that move them too far stay floats; with --keep the score of your own task decides
    that. If half of the layers are not enough, nothing is written and the exit code
    is 1.

    The folder loads as any other: on a CPU (int8) or a GPU (float8) in that format
    unless another --dtype is named. Its layout is that of compressed-tensors.

    Try:
      packhorse quantize sentence-transformers/all-MiniLM-L6-v2 ./minilm-int8
      packhorse quantize ./my-model ./my-model-int8 --calibrate texts.jsonl --json
      packhorse quantize ./my-model ./my-model-float8 --dtype float8 --calibrate texts.jsonl
      packhorse quantize ./bert-squad ./squad-float8 --dtype float8 --keep 99.9% \\
        --task squad --input dev-v1.1.json
    """
    from packhorse import checkpoint
    from packhorse.checkpoint import files
    from packhorse.device import choose_device, parse_dtype
    from packhorse.runtime import quality, quantizing

    if limit < 1:
        raise InputError(f"--limit is {limit}; it must be 1 or more")
    if device and dtype == "int8":
        raise InputError("--device is for --dtype float8; int8 is for CPUs and measured there")
    share = _read_share(keep)
    if (share is None) != (task is None) or (task is None) != (input is None):
        raise InputError("--keep, --task and --input belong together; pass all three, or none")
    files.check_new(target, overwrite=overwrite)
    gate = None
    if share is not None and task is not None and input is not None:
        from packhorse.runtime.evaluation.gate import open_gate

        gate = quantizing.Gate(open_gate(task, input), share)
    texts = _read_texts(calibrate, limit)
    load = partial(checkpoint.load, source, **model_flags.load_options())
    start = time.perf_counter()
    with progress("running the texts") as advance:
        model = quantizing.choose_layers(
            load,
            texts,
            advance,
            dtype=parse_dtype(dtype),
            device=choose_device("cpu" if dtype == "int8" else device),
            gate=gate,
        )
    result = model.quality
    kept = sorted(model.checkpoint.kept)
    rows = [
        ["cosine to fp32, mean", result.cosine_mean, quality.LEAST_MEAN],
        ["cosine to fp32, least", result.cosine_min, quality.LEAST],
        ["overlap of the nearest 10", result.top10, quality.LEAST_OVERLAP],
        ["the same, queries over fp32", result.top10_mixed, quality.LEAST_OVERLAP],
    ]
    if gate is not None and model.exact_score is not None:
        least = gate.keep * model.exact_score
        rows = [[*row[:2], None] for row in rows]  # they do not decide
        rows.append([f"score on {task}, in fp32 {model.exact_score:.4f}", model.score, least])
    table(f"{source} in {dtype} on {result.texts:,} texts", ["", "", "at least"], rows)
    if not (model.good or allow_loss):
        what = f"vectors of {source} in {dtype} are" if gate is None else f"{source} in {dtype} is"
        raise TooCoarse(
            f"{what} too far from fp32, with {len(kept)} layers kept as floats; use --dtype bf16 "
            "when you run the model, or write it nevertheless with --allow-loss"
        )
    checkpoint.write(target, model.checkpoint, overwrite=overwrite, products=parse_dtype(dtype))
    written = [path for path in target.rglob("*") if path.is_file()]
    note(f"{target}: {model.layers} linear layers in {dtype}, {len(kept)} kept as floats")
    document = {
        "source": source,
        "folder": str(target),
        "dtype": dtype,
        "layers": model.layers,
        "kept": kept,
        "bytes": sum(path.stat().st_size for path in written),
        "seconds": time.perf_counter() - start,
        "quality": asdict(result),
        "score": model.score,
        "score_fp32": model.exact_score,
        "ok": model.good,
    }
    emit(document, json)


def _read_share(keep: str | None) -> float | None:
    """The share that `99.9%` or `0.999` stands for."""
    if keep is None:
        return None
    try:
        share = float(keep.removesuffix("%")) / (100 if keep.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InputError(f"--keep is {keep!r}; write a share of fp32's score, as 99.9% or 0.999")
    return share


def _read_texts(path: str | None, limit: int) -> list[str]:
    """Return each text once: among equal texts, rounding would decide which are nearest."""
    from packhorse.data.tables import read_texts
    from packhorse.reports import docstrings

    if path is None:
        texts = dict.fromkeys(docstring.text for docstring in docstrings.read())
        return list(texts)[: min(limit, DEFAULT_TEXTS)]
    records = islice(read_texts(path, skip_empty=True), limit)
    return list(dict.fromkeys(str(record.text) for record in records))
