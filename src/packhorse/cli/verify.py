"""`packhorse verify`: are two checkpoints the same model?"""

import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import emit, note, progress, table
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
    json: Annotated[
        bool, Parameter(negative="", show_default=False, help="One line of JSON at the end.")
    ] = False,
) -> None:
    """Compare two checkpoints: are their tensors equal, and their outputs on real text?

    Tensors are compared bit by bit under Packhorse's own names, whatever the
    files call them; outputs of every head that both have, in fp32. --config,
    --vocab and --heads stand in for what is not beside either of the two.
    The exit code is 0 if the outputs agree within --tolerance and neither has a
    tensor that the other lacks, else 1.

    Try:
      packhorse verify bert_model.ckpt ./bert-base-hf
      packhorse verify model.onnx ./model --input texts.txt --tolerance 1e-3
    """
    from packhorse import checkpoint
    from packhorse.runtime.verification import compare_outputs, compare_tensors

    def load(model: str) -> "Checkpoint":
        return checkpoint.load(model, **beside.given(), dtype=None, allow_nonfinite=True)

    with progress("comparing") as advance:
        advance(0, 3)
        first, second = load(a), load(b)
        advance(1, 3)
        tensors, only_a, only_b = compare_tensors(first, second)
        advance(2, 3)
        outputs = compare_outputs(first, second, _encodings(first, second, input))
        advance(3, 3)
    apart = [found for found in tensors if not found.equal]
    about = f"{len(tensors) - len(apart)} of {len(tensors)} tensors are equal bit by bit"
    rows = [["output", found.name, found.equal, found.largest] for found in outputs]
    rows += [["tensor", found.name, found.equal, found.largest] for found in apart]
    rows += [["tensor", name, f"only in {a}", None] for name in only_a]
    rows += [["tensor", name, f"only in {b}", None] for name in only_b]
    table(about, ["", "name", "bit-equal", "largest difference"], rows)
    beyond = [found for found in outputs if not found.largest <= tolerance]
    same = not (beyond or only_a or only_b)
    emit(
        {
            "same": same,
            "tensors": [asdict(found) for found in tensors],
            "outputs": [asdict(found) for found in outputs],
            "only_a": only_a,
            "only_b": only_b,
            "tolerance": tolerance,
        },
        json,
    )
    if not same:
        raise Different(_verdict(a, b, [found.name for found in beyond], only_a, only_b))
    note(f"the same model: {about}, outputs within {max(f.largest for f in outputs):.2g}")


def _encodings(a: "Checkpoint", b: "Checkpoint", input: str | None) -> "list[Encoding]":
    from packhorse import checkpoint
    from packhorse.bench import docstrings
    from packhorse.data.texts import read_texts

    if input:
        texts = [record.text for record in islice(read_texts(input), 1024)]
    else:
        some = Path(sysconfig.get_path("stdlib")) / "asyncio"  # all of them take seconds to parse
        texts = [found.text for found in docstrings.read(some)[:TEXTS]]
    if not texts:
        raise InputError(f"{input}: there is no text to compare the outputs on")
    length = min(a.max_length, b.max_length)
    spoken = a if a.vocabulary else b
    return checkpoint.tokenizer(spoken).encode(texts, length)


def _verdict(
    a: str, b: str, heads: Sequence[str], only_a: Sequence[str], only_b: Sequence[str]
) -> str:
    said = [f"outputs of {', '.join(heads)} differ"] if heads else []
    for model, names in ((a, only_a), (b, only_b)):
        if names:
            said.append(f"{len(names)} tensors are only in {model} (first {names[0]})")
    return f"not the same model: {'; '.join(said)}"
