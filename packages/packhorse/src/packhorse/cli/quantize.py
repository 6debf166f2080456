"""`packhorse quantize`: write a model in int8, and say what that does to its vectors."""

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
    """Vectors in int8 are too far from those in fp32."""

    exit_code = 1


def quantize(
    source: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    target: Annotated[Path, Parameter(help="The folder to write, new or empty.")],
    /,
    *,
    dtype: Annotated[Literal["int8"], Parameter(help="Number format of the products.")] = "int8",
    calibrate: Annotated[
        str | None,
        Parameter(
            help="Texts whose vectors are compared, one per line or a column `text`: best those "
            "you will encode. Default docstrings of the standard library."
        ),
    ] = None,
    limit: Annotated[int, Parameter(help="Use at most so many of them.")] = 1000,
    allow_loss: Annotated[
        bool, flag(help="Write the model even if its vectors move too far.")
    ] = False,
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    overwrite: Annotated[bool, flag(help="Replace an existing folder.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write a model whose linear layers are int8: smaller, and faster on CPUs.

    Weights get a scale per output channel, activations get one per token while the
    model runs, so no ranges are calibrated. The texts say how far vectors move: the
    cosine to fp32 and the overlap of the ten nearest texts, also for queries in int8
    over an index in fp32. Layers that move them too far stay fp32. If that is not
    enough, nothing is written and the exit code is 1.

    The folder loads as any other, in int8 on a CPU unless another --dtype is named.
    Its layout is that of compressed-tensors.

    Try:
      packhorse quantize sentence-transformers/all-MiniLM-L6-v2 ./minilm-int8
      packhorse quantize ./my-model ./my-model-int8 --calibrate texts.jsonl --json
    """
    from packhorse import checkpoint
    from packhorse.checkpoint import files
    from packhorse.runtime import quality, quantizing

    if limit < 1:
        raise InputError(f"--limit is {limit}; it must be 1 or more")
    files.check_new(target, overwrite=overwrite)
    texts = _read_texts(calibrate, limit)
    load = partial(checkpoint.load, source, **model_flags.load_options())
    start = time.perf_counter()
    with progress("running the texts") as advance:
        model = quantizing.choose_layers(load, texts, advance)
    result = model.quality
    kept = sorted(model.checkpoint.kept)
    rows = [
        ["cosine to fp32, mean", result.cosine_mean, quality.LEAST_MEAN],
        ["cosine to fp32, least", result.cosine_min, quality.LEAST],
        ["overlap of the nearest 10", result.top10, quality.LEAST_OVERLAP],
        ["the same, queries over fp32", result.top10_mixed, quality.LEAST_OVERLAP],
    ]
    table(f"{source} in int8 on {result.texts:,} texts", ["", "", "at least"], rows)
    if not (result.good or allow_loss):
        raise TooCoarse(
            f"vectors of {source} in int8 are too far from fp32, with {len(kept)} layers kept in "
            "fp32; use --dtype bf16, or write it nevertheless with --allow-loss"
        )
    checkpoint.write(target, model.checkpoint, overwrite=overwrite, int8=True)
    written = [path for path in target.rglob("*") if path.is_file()]
    note(f"{target}: {model.layers} linear layers in int8, {len(kept)} kept in fp32")
    document = {
        "source": source,
        "folder": str(target),
        "dtype": dtype,
        "layers": model.layers,
        "kept": kept,
        "bytes": sum(path.stat().st_size for path in written),
        "seconds": time.perf_counter() - start,
        "quality": asdict(result),
        "ok": result.good,
    }
    emit(document, json)


def _read_texts(path: str | None, limit: int) -> list[str]:
    """Return each text once: among equal texts, rounding would decide which are nearest."""
    from packhorse.data.tables import read_texts
    from packhorse.reports import docstrings

    if path is None:
        texts = dict.fromkeys(docstring.text for docstring in docstrings.read())
        return list(texts)[: min(limit, DEFAULT_TEXTS)]
    records = islice(read_texts(path, skip_empty=True), limit)
    return list(dict.fromkeys(str(record.text) for record in records))
