"""`packhorse inspect`: what is in a checkpoint of any format."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table, tree
from packhorse.cli.flags import GELUS, Beside

if TYPE_CHECKING:
    from packhorse.checkpoint.inspection import Inspection, TensorFacts


def inspect(
    path: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    /,
    *,
    beside: Beside = Beside(),  # noqa: B008 (frozen)
    as_tree: Annotated[
        bool,
        Parameter(
            name="--tree", negative="", show_default=False, help="Tensors as a tree of modules."
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show what a checkpoint holds, in any format that Packhorse opens.

    Format, family, configuration, heads, optimizer state, and every tensor with
    its shape, dtype, checksum and number of NaN or infinite values; and whether
    the model runs here, or why not.

    Try:
      packhorse inspect sentence-transformers/all-MiniLM-L6-v2
      packhorse inspect uncased_L-12_H-768_A-12/bert_model.ckpt --tree
      packhorse inspect frozen.pb --config bert_config.json --json
    """
    from packhorse.checkpoint.inspection import inspect as look

    with progress("looking at tensors", quiet=json) as advance:
        given = beside.given()
        del given["vocab"]  # texts are not asked for
        found = look(path, **given, progress=advance)
    table(found.path, ["", ""], _about(found))
    if as_tree:
        tree("tensors", _nested(found.tensors))
    else:
        columns = ["tensor", "shape", "dtype", "values", "not finite", "crc32c"]
        table(None, columns, [_row(facts) for facts in found.tensors])
    for line in found.notes:
        note(line)
    emit(asdict(found), json)


def _about(found: "Inspection") -> list[list[object]]:
    config = ", ".join(f"{key} {value}" for key, value in found.config.items())
    slots = ", ".join(f"{kind}: {count} tensors" for kind, count in found.slots.items())
    dtypes = ", ".join(sorted({facts.dtype for facts in found.tensors}))
    rows: list[list[object]] = [
        ["format", found.format],
        ["runs here", "yes" if found.runs else f"no: {found.why_not}"],
        ["family", found.family],
        ["configuration", config],
        ["GELU", f"{GELUS[found.gelu]}: {found.gelu_reason}" if found.gelu else ""],
        ["heads", ", ".join(found.heads)],
        ["labels", ", ".join(found.labels)],
        ["length at most", f"{found.max_length} tokens" if found.max_length else ""],
        ["values", f"{found.parameters:,} in {len(found.tensors)} tensors, {dtypes}"],
        ["not finite", f"{found.nonfinite:,} values"],
        ["training step", found.step],
        ["optimizer state", slots],
    ]
    for file in found.files:
        rows.append(["file", f"{file.name}, {file.bytes:,} bytes, sha256 {file.sha256}"])
    return [row for row in rows if row[1] not in ("", None)]


def _row(facts: "TensorFacts") -> list[object]:
    return [facts.name, _shape(facts), facts.dtype, facts.values, facts.nonfinite, facts.crc32c]


def _shape(facts: "TensorFacts") -> str:
    return "[" + ", ".join(map(str, facts.shape)) + "]"


def _nested(tensors: "Sequence[TensorFacts]") -> dict:
    """Modules within modules, by the dots or slashes of the names; leaves say what they are."""
    root: dict = {}
    for facts in tensors:
        *modules, leaf = facts.name.replace("/", ".").split(".")
        place = root
        for module in modules:
            place = place.setdefault(module, {})
        place[f"{leaf}  {_shape(facts)}  {facts.dtype}"] = {}
    return root
