"""`packhorse verify`: check whether two checkpoints are the same model."""

import sysconfig
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import ModelFlags
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    from packhorse.checkpoint import Checkpoint
    from packhorse.checkpoint.fingerprint import Fingerprint
    from packhorse.tokens import Encoding

DEFAULT_TEXTS = 64  # docstrings of the standard library, if no file is passed
MAX_TEXTS = 1024  # of a file


class Different(PackhorseError):
    """The two checkpoints are not the same model."""

    exit_code = 1


def verify(
    a: Annotated[str, Parameter(help="A checkpoint in any format.")],
    b: Annotated[str, Parameter(help="Another, in the same or another format.")],
    /,
    *,
    input: Annotated[
        str | None, Parameter(help="Texts to compare the outputs on; default real English.")
    ] = None,
    tolerance: Annotated[
        float, Parameter(help="Largest difference allowed between the outputs.")
    ] = 1e-5,
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Compare two checkpoints: are tensors equal, and outputs on real text?

    Tensors are compared bit by bit under Packhorse's names, whatever the files
    call them; outputs are those of each head that both have, in fp32. --config,
    --vocab and --heads apply to a checkpoint that lacks them, --gelu to a
    TensorFlow checkpoint.
    The exit code is 0 if outputs agree within --tolerance, tensors have the same
    shapes, neither has a tensor that the other lacks, and both tokenize the texts
    alike, else 1. What of their fingerprints differs besides is only reported.

    Try:
      packhorse verify bert_model.ckpt ./bert-base-hf
      packhorse verify model.onnx ./model --input texts.txt --tolerance 1e-3
    """
    from packhorse.runtime.verification import compare_outputs, compare_tensors

    with progress("comparing") as advance:
        advance(0, 3)
        first = _load(a, model_flags)
        second = _load(b, model_flags)
        advance(1, 3)
        tensors, only_a, only_b = compare_tensors(first, second)
        misfits = [tensor.name for tensor in tensors if tensor.largest == float("inf")]
        advance(2, 3)
        encodings, same_tokens = _encode_texts(first, second, input)
        outputs = [] if misfits else compare_outputs(first, second, encodings)
        fingerprints = _fingerprints(first, second)
        advance(3, 3)
    unequal = [tensor for tensor in tensors if not tensor.equal]
    summary = f"{len(tensors) - len(unequal)} of {len(tensors)} tensors are equal bit by bit"
    rows = [["output", output.name, output.equal, output.largest] for output in outputs]
    rows += [["tensor", tensor.name, tensor.equal, tensor.largest] for tensor in unequal]
    rows += [["tensor", name, f"only in {a}", None] for name in only_a]
    rows += [["tensor", name, f"only in {b}", None] for name in only_b]
    table(summary, ["", "name", "bit-equal", "largest difference"], rows)

    reasons = []
    if misfits:
        reasons.append(f"{len(misfits)} tensors have other shapes (first {misfits[0]})")
    differing = [output.name for output in outputs if not output.largest <= tolerance]
    if differing:
        reasons.append(f"outputs of {', '.join(differing)} differ")
    for model, names in ((a, only_a), (b, only_b)):
        if names:
            reasons.append(f"{len(names)} tensors are only in {model} (first {names[0]})")
    if not same_tokens:
        reasons.append("their tokenizers encode the texts differently")
    differing_parts = fingerprints[0].differences(fingerprints[1]) if fingerprints else []
    if differing_parts:
        note(f"their fingerprints differ in: {', '.join(differing_parts)}")
    document = {
        "same": not reasons,
        "why_not": reasons,
        "tensors": [asdict(tensor) for tensor in tensors],
        "outputs": [asdict(output) for output in outputs],
        "only_a": only_a,
        "only_b": only_b,
        "tolerance": tolerance,
        "fingerprints": [str(fingerprint) for fingerprint in fingerprints],
        "fingerprint_differs_in": differing_parts,
    }
    emit(document, json)
    if reasons:
        raise Different(f"not the same model: {'; '.join(reasons)}")
    largest = max(output.largest for output in outputs)
    note(f"the same model: {summary}, outputs within {largest:.2g}")


def _load(model: str, model_flags: ModelFlags) -> "Checkpoint":
    """Load one of the two; flags apply only to what is not stored next to its weights."""
    from packhorse import checkpoint
    from packhorse.checkpoint import configuration, sources

    source = sources.find(model)
    folder = source.folder
    configured = configuration.locate(folder, None) is not None
    return checkpoint.load(
        source,
        config=None if configured else model_flags.config,
        heads=None if configured else model_flags.heads,
        vocab=None if configuration.vocabulary(folder, None) else model_flags.vocab,
        gelu=model_flags.gelu if source.format in ("tf1", "frozen") else None,
        ignore=model_flags.ignore or (),
        dtype=None,
        allow_nonfinite=True,
    )


def _fingerprints(a: "Checkpoint", b: "Checkpoint") -> "list[Fingerprint]":
    """Return the fingerprints of both in fp32; none unless both have a tokenizer."""
    from packhorse import checkpoint
    from packhorse.checkpoint import fingerprint
    from packhorse.device import parse_dtype

    if not (a.vocabulary and b.vocabulary):
        return []
    return [
        fingerprint.of_checkpoint(model, checkpoint.tokenizer(model), parse_dtype("fp32"))
        for model in (a, b)
    ]


def _encode_texts(
    a: "Checkpoint", b: "Checkpoint", input: str | None
) -> "tuple[list[Encoding], bool]":
    """Encode the texts with the first tokenizer there is; also return whether both agree."""
    from packhorse import checkpoint

    length = min(a.max_length, b.max_length)
    tokenizers = [checkpoint.tokenizer(model) for model in (a, b) if model.vocabulary]
    if not tokenizers:
        raise InputError("neither has a tokenizer; pass --vocab FILE")
    texts = _read_texts(input)
    results = [tokenizer.encode(texts, length) for tokenizer in tokenizers]
    ids = [[bytes(encoding.ids) for encoding in encodings] for encodings in results]
    return results[0], all(ids[0] == tokens for tokens in ids[1:])


def _read_texts(input: str | None) -> list[str | tuple[str, str]]:
    from packhorse.data.tables import read_texts
    from packhorse.reports import docstrings

    if input is None:
        # One package is enough: parsing the whole library takes seconds.
        folder = Path(sysconfig.get_path("stdlib")) / "asyncio"
        return [docstring.text for docstring in docstrings.read(folder)[:DEFAULT_TEXTS]]
    texts = [record.text for record in islice(read_texts(input), MAX_TEXTS)]
    if not texts:
        raise InputError(f"{input}: there is no text to compare the outputs on")
    return texts
