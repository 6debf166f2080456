"""`packhorse verify`: are two checkpoints the same model, does a model give the vectors one has?"""

import os
import shlex
import sysconfig
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import Advance, JsonFlag, emit, note, progress, short, table
from packhorse.cli.flags import ModelFlags
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    import numpy as np

    from packhorse.checkpoint import Checkpoint
    from packhorse.checkpoint.fingerprint import Fingerprint
    from packhorse.reports.other_vectors import Agreement
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Encoding

DEFAULT_TEXTS = 64  # docstrings of the standard library, if no file is passed
MAX_TEXTS = 1024  # of a file
DEFAULT_QUERIES = 256  # docstrings, to compare vectors on
PROMPT_TEXTS = 16  # enough to see which prompt was used
PROMPT_GAIN = 1e-3  # of the mean cosine, above which another prompt is recommended
KEY_VARIABLE = "PACKHORSE_API_KEY"


class Different(PackhorseError):
    """The two checkpoints, or the vectors, are not of the same model."""

    exit_code = 1


def verify(
    a: Annotated[str, Parameter(help="A checkpoint in any format.")],
    b: Annotated[
        str | None, Parameter(help="Another, in the same or another format.", show_default=False)
    ] = None,
    /,
    *,
    against: Annotated[
        str | None,
        Parameter(
            help="Instead of another checkpoint: the URL of a server of vectors "
            "(text-embeddings-inference, vLLM, Infinity, any with OpenAI's API), or a file of "
            "vectors: parquet or jsonl with a column of texts, or npy with --texts."
        ),
    ] = None,
    input: Annotated[
        str | None,
        Parameter(
            name=["--input", "--texts"],
            help="Texts to compare on; default real English, or those of the file of vectors.",
        ),
    ] = None,
    min_overlap: Annotated[
        float,
        Parameter(
            help="With --against: the least part of the 10 nearest texts of each text that both "
            "kinds of vectors must have in common."
        ),
    ] = 0.99,
    prompt: Annotated[
        str | None,
        Parameter(
            help="With --against: the model's prompt to use, if not its default; '' for none."
        ),
    ] = None,
    tolerance: Annotated[
        float, Parameter(help="Largest difference allowed between the outputs.")
    ] = 1e-5,
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Compare a checkpoint with another, or its vectors with those you have.

    Tensors are compared bit by bit under Packhorse's names, whatever the files
    call them; outputs are those of each head that both have, in fp32. --config,
    --vocab and --heads apply to a checkpoint that lacks them, --gelu to a
    TensorFlow checkpoint.
    The exit code is 0 if outputs agree within --tolerance, tensors have the same
    shapes, neither has a tensor that the other lacks, and both tokenize the texts
    alike, else 1. What of their fingerprints differs besides is only reported.

    With --against, vectors of the model are compared with those of a running
    server or an index: dimension, normalization, prompt, cosine, and whether a
    search finds the same texts. The exit code is 1 below --min-overlap. A
    server's key is read from PACKHORSE_API_KEY.

    Try:
      packhorse verify bert_model.ckpt ./bert-base-hf
      packhorse verify model.onnx ./model --input texts.txt --tolerance 1e-3
      packhorse verify FOLDER --against http://localhost:8080
      packhorse verify FOLDER --against vectors.parquet --min-overlap 0.95
    """
    if against is not None and b is not None:
        raise InputError("B and --against both say what to compare with; leave one out")
    if against is not None:
        return _verify_vectors(a, against, input, min_overlap, prompt, model_flags, json)
    if b is None:
        raise InputError("there is nothing to compare with; name another checkpoint, or --against")
    if prompt is not None:
        raise InputError("--prompt is for --against; checkpoints are compared without prompts")
    from packhorse.runtime.verification import compare_outputs, compare_tensors

    if model_flags.adapter:
        _check_adapter(a, b)
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


def _check_adapter(a: str, b: str) -> None:
    """Raise unless one of the two has adapters in its own file, of which --adapter chooses one."""
    from packhorse.checkpoint import sources, stored_adapters

    if not any(stored_adapters.has_any(sources.find(model).folder) for model in (a, b)):
        raise InputError(
            "--adapter does not say which of the two it belongs to; pass the adapter's folder or "
            "hub id as one of the two models"
        )


def _load(model: str, model_flags: ModelFlags) -> "Checkpoint":
    """Load one of the two; flags apply only to what is not stored next to its weights."""
    from packhorse import checkpoint
    from packhorse.checkpoint import configuration, sources, stored_adapters

    adapter = model_flags.adapter
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
        adapter=adapter if adapter and stored_adapters.has_any(folder) else None,
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


# Vectors -----------------------------------------------------------------------------------------


def _verify_vectors(
    model: str,
    against: str,
    input: str | None,
    min_overlap: float,
    prompt: str | None,
    model_flags: ModelFlags,
    json: bool,
) -> None:
    """Compare a model's vectors with those of a server or a file."""
    from packhorse.reports import other_vectors
    from packhorse.runtime.loading import load

    if not 0 <= min_overlap <= 1:
        raise InputError(f"--min-overlap is {min_overlap:g}; it must be between 0 and 1")
    with progress("asking" if _is_url(against) else "reading") as advance:
        kind, texts, compared_vectors = _other_vectors(against, input, advance)
    if len(texts) < other_vectors.MIN_TEXTS:
        raise InputError(
            f"there are {len(texts)} different texts; to compare the nearest of each, "
            f"{other_vectors.MIN_TEXTS} are needed"
        )
    encoder = load(model, dtype="fp32", **model_flags.load_options())
    if prompt == "":
        encoder = replace(encoder, default_prompt=None)
    dimensions = (encoder.get_embedding_dimension(), compared_vectors.shape[1])
    document = {
        "against": kind,
        "texts": len(texts),
        "dimension": {"model": dimensions[0], "other": dimensions[1]},
        "min_overlap": min_overlap,
    }
    if dimensions[0] != dimensions[1]:
        reason = f"vectors have {dimensions[0]} dimensions here and {dimensions[1]} there"
        emit({"same": False, "why_not": [reason], **document}, json)
        raise Different(f"not the same vectors: {reason}; it is another model")
    with progress("embedding") as advance:
        model_vectors = encoder.embed(
            texts, prompt=prompt or None, long="truncate", progress=advance
        )
    agreement = other_vectors.compare(model_vectors, compared_vectors)
    normalized = (
        other_vectors.is_normalized(model_vectors),
        other_vectors.is_normalized(compared_vectors),
    )
    used = prompt or encoder.default_prompt
    better = _better_prompt(encoder, texts, model_vectors, compared_vectors, used)
    _show_agreement(kind, dimensions, normalized, used, agreement, len(texts))
    is_same = agreement.overlap >= min_overlap
    reason = (
        f"of the {other_vectors.NEIGHBORS} nearest texts both find {agreement.overlap:.1%}, less "
        f"than {min_overlap:.1%}"
    )
    emit(
        {
            "same": is_same,
            "why_not": [] if is_same else [reason],
            **document,
            "normalized": {"model": normalized[0], "other": normalized[1]},
            "prompt": {"model": used, "better": better},
            "cosine": {"mean": agreement.mean_cosine, "least": agreement.least_cosine},
            "least_text": texts[agreement.least_text],
            "overlap": agreement.overlap,
        },
        json,
    )
    if normalized[0] != normalized[1]:
        here, there = ("have", "do not") if normalized[0] else ("do not have", "do")
        note(f"vectors of the model {here} length one, the others {there}: search by cosine")
    if better is not None:
        name = f"with the prompt {better!r}" if better else "without a prompt"
        note(f"{name} they agree better: try --prompt {shlex.quote(better)}")
    if not is_same:
        raise Different(
            f"not the same vectors: {reason}; they differ most for "
            f"{short(texts[agreement.least_text])!r} (cosine {agreement.least_cosine:.4f})"
        )
    note(
        f"the same vectors for a search: {agreement.overlap:.1%} of the nearest texts are the same"
    )


def _is_url(against: str) -> bool:
    return against.startswith(("http://", "https://"))


def _other_vectors(
    against: str, input: str | None, advance: Advance
) -> "tuple[str, list[str], np.ndarray]":
    """Return what has the vectors, for people; different texts; their vectors."""
    from packhorse.reports import other_vectors

    if _is_url(against):
        server = other_vectors.find_server(against, os.environ.get(KEY_VARIABLE, ""))
        texts = list(dict.fromkeys(_query_texts(input)))
        return server.kind, texts, server.embed(texts, advance)
    texts, vectors = other_vectors.read_index(Path(against), input, MAX_TEXTS)
    first_rows = {text: row for row, text in reversed(list(enumerate(texts)))}
    rows = sorted(first_rows.values())  # a text that is there twice would be its own neighbor
    return "file", [texts[row] for row in rows], vectors[rows]


def _query_texts(input: str | None) -> list[str]:
    from packhorse.reports import docstrings

    if input is not None:
        return [str(text) for text in _read_texts(input)]
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for package in ("asyncio", "email", "json", "logging", "unittest", "http"):
        texts += [docstring.text for docstring in docstrings.read(folder / package)]
    return texts[:DEFAULT_QUERIES]


def _better_prompt(
    encoder: "Encoder",
    texts: list[str],
    model_vectors: "np.ndarray",
    compared_vectors: "np.ndarray",
    used: str | None,
) -> str | None:
    """Return the prompt with which vectors are clearly nearer to the others; "" for no prompt."""
    from packhorse.reports.other_vectors import compare

    compared_vectors = compared_vectors[:PROMPT_TEXTS]
    best = compare(model_vectors[:PROMPT_TEXTS], compared_vectors).mean_cosine + PROMPT_GAIN
    better = None
    plain = replace(encoder, default_prompt=None)
    for name in ("", *encoder.prompts):
        if name == (used or ""):
            continue
        vectors = plain.embed(texts[:PROMPT_TEXTS], prompt=name or None, long="truncate")
        cosine = compare(vectors, compared_vectors).mean_cosine
        if cosine > best:
            best = cosine
            better = name
    return better


def _show_agreement(
    kind: str,
    dimensions: tuple[int, int],
    normalized: tuple[bool, bool],
    prompt: str | None,
    agreement: "Agreement",
    texts: int,
) -> None:
    rows = [
        ["dimension", dimensions[0], dimensions[1]],
        ["length one", *("yes" if flag else "no" for flag in normalized)],
        ["prompt", prompt or "none", ""],
        ["cosine, mean", f"{agreement.mean_cosine:.6f}", ""],
        ["cosine, least", f"{agreement.least_cosine:.6f}", ""],
        ["nearest 10 in common", f"{agreement.overlap:.1%}", ""],
    ]
    table(f"vectors of {texts} texts", ["", "model", kind], rows)
