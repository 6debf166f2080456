"""`packhorse verify`: are two checkpoints the same model?"""

import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import Beside
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    from packhorse.checkpoint import Checkpoint
    from packhorse.tokens import Encoding

TEXTS = 64  # of the standard library's docstrings, where no file is given


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
    tolerance: Annotated[float, Parameter(help="Outputs may differ by this much.")] = 1e-5,
    beside: Beside = Beside(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Compare two checkpoints: are their tensors equal, and their outputs on real text?

    Tensors are compared bit by bit under Packhorse's own names, whatever the
    files call them; outputs of every head that both have, in fp32. --config,
    --vocab and --heads stand in for what is not beside either of the two,
    --gelu for what a TensorFlow checkpoint does not say.
    The exit code is 0 if outputs agree within --tolerance, tensors have the same
    shapes, neither has one that the other lacks, and both read the texts alike,
    else 1.

    Try:
      packhorse verify bert_model.ckpt ./bert-base-hf
      packhorse verify model.onnx ./model --input texts.txt --tolerance 1e-3
    """
    from packhorse.runtime.verification import compare_outputs, compare_tensors

    with progress("comparing") as advance:
        advance(0, 3)
        first, second = _load(a, beside), _load(b, beside)
        advance(1, 3)
        tensors, only_a, only_b = compare_tensors(first, second)
        misfits = [found.name for found in tensors if found.largest == float("inf")]
        advance(2, 3)
        encodings, same_words = _encodings(first, second, input)
        outputs = [] if misfits else compare_outputs(first, second, encodings)
        advance(3, 3)
    apart = [found for found in tensors if not found.equal]
    about = f"{len(tensors) - len(apart)} of {len(tensors)} tensors are equal bit by bit"
    rows = [["output", found.name, found.equal, found.largest] for found in outputs]
    rows += [["tensor", found.name, found.equal, found.largest] for found in apart]
    rows += [["tensor", name, f"only in {a}", None] for name in only_a]
    rows += [["tensor", name, f"only in {b}", None] for name in only_b]
    table(about, ["", "name", "bit-equal", "largest difference"], rows)
    beyond = [found.name for found in outputs if not found.largest <= tolerance]
    why = [
        *([f"{len(misfits)} tensors have other shapes (first {misfits[0]})"] if misfits else []),
        *([f"outputs of {', '.join(beyond)} differ"] if beyond else []),
        *(_alone(model, names) for model, names in ((a, only_a), (b, only_b)) if names),
        *([] if same_words else ["their tokenizers read the texts differently"]),
    ]
    emit(
        {
            "same": not why,
            "why_not": why,
            "tensors": [asdict(found) for found in tensors],
            "outputs": [asdict(found) for found in outputs],
            "only_a": only_a,
            "only_b": only_b,
            "tolerance": tolerance,
        },
        json,
    )
    if why:
        raise Different(f"not the same model: {'; '.join(why)}")
    note(f"the same model: {about}, outputs within {max(f.largest for f in outputs):.2g}")


def _alone(model: str, names: Sequence[str]) -> str:
    return f"{len(names)} tensors are only in {model} (first {names[0]})"


def _load(model: str, beside: Beside) -> "Checkpoint":
    """What is given stands in only for what does not lie beside the weights."""
    from packhorse import checkpoint
    from packhorse.checkpoint import configuration, sources

    source = sources.find(model)
    folder = source.folder
    configured = configuration.locate(folder, None) is not None
    return checkpoint.load(
        source,
        config=None if configured else beside.config,
        heads=None if configured else beside.heads,
        vocab=None if configuration.vocabulary(folder, None) else beside.vocab,
        gelu=beside.gelu if source.format in ("tf1", "frozen") else None,
        ignore=beside.ignore or (),
        dtype=None,
        allow_nonfinite=True,
    )


def _encodings(
    a: "Checkpoint", b: "Checkpoint", input: str | None
) -> "tuple[list[Encoding], bool]":
    """The texts as the first model that can read them does; would the other read the same?"""
    from packhorse import checkpoint

    length = min(a.max_length, b.max_length)
    readers = [checkpoint.tokenizer(each) for each in (a, b) if each.vocabulary]
    if not readers:
        raise InputError("neither has a tokenizer; pass --vocab FILE")
    first, *others = [reader.encode(_texts(input), length) for reader in readers]
    same = all(
        list(map(bytes, (e.ids for e in first))) == list(map(bytes, (e.ids for e in other)))
        for other in others
    )
    return first, same


def _texts(input: str | None) -> list[str | tuple[str, str]]:
    from packhorse.data.tables import read_texts
    from packhorse.reports import docstrings

    if input is None:
        some = Path(sysconfig.get_path("stdlib")) / "asyncio"  # all of them take seconds to parse
        return [found.text for found in docstrings.read(some)[:TEXTS]]
    texts = [record.text for record in islice(read_texts(input), 1024)]
    if not texts:
        raise InputError(f"{input}: there is no text to compare the outputs on")
    return texts
