"""`packhorse inspect`: show the contents of a checkpoint of any format."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table, tree
from packhorse.cli.flags import GELUS, ModelFlags, flag

if TYPE_CHECKING:
    from packhorse.checkpoint.inspection import Inspection, TensorFacts


def inspect(
    path: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    /,
    *,
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    as_tree: Annotated[bool, flag("--tree", help="Show the tensors as a tree of modules.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show the contents of a checkpoint, in any format that Packhorse opens.

    Format, family, configuration, heads, optimizer state, and each tensor with its
    shape, dtype, checksum and number of NaN or infinite values; and whether the
    model runs here, or why not. The fingerprint is equal for models that give the
    same vectors.

    Try:
      packhorse inspect sentence-transformers/all-MiniLM-L6-v2
      packhorse inspect uncased_L-12_H-768_A-12/bert_model.ckpt --tree
      packhorse inspect frozen.pb --config bert_config.json --json
    """
    from packhorse.checkpoint.inspection import inspect as inspect_checkpoint

    options = model_flags.load_options()
    with progress("inspecting tensors") as advance:
        inspection = inspect_checkpoint(path, **options, progress=advance)
    table(inspection.path, ["", ""], _summary(inspection))
    if as_tree:
        tree("tensors", _nested(inspection.tensors))
    else:
        columns = ["tensor", "shape", "dtype", "values", "not finite", "crc32c"]
        rows = [
            [
                tensor.name,
                _shape(tensor),
                tensor.dtype,
                tensor.values,
                tensor.nonfinite,
                tensor.crc32c,
            ]
            for tensor in inspection.tensors
        ]
        table(None, columns, rows)
    for message in inspection.notes:
        note(message)
    emit(asdict(inspection), json)


def _summary(inspection: "Inspection") -> list[list[object]]:
    config = ", ".join(f"{key} {value}" for key, value in inspection.config.items())
    slots = ", ".join(f"{kind}: {count} tensors" for kind, count in inspection.slots.items())
    dtypes = ", ".join(sorted({tensor.dtype for tensor in inspection.tensors}))
    gelu = f"{GELUS[inspection.gelu]}: {inspection.gelu_reason}" if inspection.gelu else ""
    rows: list[list[object]] = [
        ["format", inspection.format],
        ["runs here", "yes" if inspection.runs else f"no: {inspection.why_not}"],
        ["family", inspection.family],
        ["configuration", config],
        ["GELU", gelu],
        ["heads", ", ".join(inspection.heads)],
        ["labels", ", ".join(inspection.labels)],
        ["maximum length", f"{inspection.max_length} tokens" if inspection.max_length else ""],
        ["values", f"{inspection.parameters:,} in {len(inspection.tensors)} tensors, {dtypes}"],
        ["not finite", f"{inspection.nonfinite:,} values"],
        ["fingerprint", ", ".join(f"{k} {v}" for k, v in inspection.fingerprints.items())],
        ["fingerprint of", ", ".join(f"{k} {v}" for k, v in inspection.fingerprint_parts.items())],
        ["training step", inspection.step],
        ["optimizer state", slots],
    ]
    for file in inspection.files:
        rows.append(["file", f"{file.name}, {file.bytes:,} bytes, sha256 {file.sha256}"])
    return [row for row in rows if row[1] not in ("", None)]


def _shape(tensor: "TensorFacts") -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def _nested(tensors: "Sequence[TensorFacts]") -> dict[str, Any]:
    """Nest the tensors by module, split at the dots or slashes of their names."""
    root: dict[str, Any] = {}
    for tensor in tensors:
        *modules, leaf = tensor.name.replace("/", ".").split(".")
        branch = root
        for module in modules:
            branch = branch.setdefault(module, {})
        branch[f"{leaf}  {_shape(tensor)}  {tensor.dtype}"] = {}
    return root
