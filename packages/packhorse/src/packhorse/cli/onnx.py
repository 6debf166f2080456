"""`packhorse onnx`: ONNX models for packed rows."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import App, Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import flag
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.onnxpack import PackingReport

app = App(name="onnx", help="Rewrite ONNX models for packed rows.", help_format="plaintext")

OutputKind = Literal["token", "sequence"]


@app.command
def pack(
    source: Annotated[Path, Parameter(help="The exported model.")],
    target: Annotated[Path, Parameter(help="The file to write: the model for packed rows.")],
    /,
    *,
    mode: Annotated[
        Literal["positions", "mask", "repack"],
        flag(help="How the model takes packed rows; see above."),
    ],
    precision: Annotated[
        Literal["fp32", "fp16"],
        flag(help="fp16 halves weights and arithmetic; inputs and outputs keep their type."),
    ] = "fp32",
    input_shape: Annotated[
        str | None,
        flag(help="Fix the input shape to ROWS,TOKENS, such as 16,256; default any shape."),
    ] = None,
    output: Annotated[
        list[str] | None,
        flag(help="Kind of an output, if the graph does not show it: NAME=token or NAME=sequence."),
    ] = None,
    explain: Annotated[
        bool, flag(help="Show what was found in the graph and what was changed.")
    ] = False,
    overwrite: Annotated[bool, flag(help="Replace an existing file.")] = False,
    json: JsonFlag = False,
) -> None:
    """Rewrite a model of the BERT family so that several sequences share a row.

    positions   position_ids become an input; nothing else changes.
    mask        attention_mask holds the sequence number of each token (1, 2 … in a
                row, 0 for padding), and tokens attend to their own sequence only.
    repack      attention runs on one sequence per row, everything else on the
                packed rows, which sequences may cross; unpack_info holds the
                lengths.

    Heads with one result per sequence get the input first_positions: the index of
    each sequence's first token in the rows laid end to end (in repack mode it
    follows from the lengths). Int8 models that choose scales at run time get one
    per sequence instead of one per batch. Before the result is written, it is
    compared with the original, sequence by sequence, and run with other
    neighbors: if a neighbor changes a bit, that is an error; a difference above
    0.05 of the outputs' magnitude is a warning.

    Try:
      packhorse onnx pack model.onnx packed.onnx --mode mask --explain
      packhorse onnx pack qa.onnx packed.onnx --mode repack --input-shape 16,256
    """
    from packhorse import onnxpack

    with progress("packing") as advance:
        advance(0, 1)
        report = onnxpack.pack(
            source,
            target,
            mode,
            precision=precision,
            shape=_parse_shape(input_shape),
            outputs=dict(map(_parse_output, output or ())),
            overwrite=overwrite,
        )
        advance(1, 1)
    if explain:
        rows = [[finding.what, finding.where, finding.done] for finding in report.findings]
        table(f"{source}, mode {mode}", ["found", "where", "done"], rows)
    before, after = report.nodes
    note(
        f"{target}: {before} nodes became {after}; its outputs differ from the original's by "
        f"{report.difference:.1e} of their magnitude"
    )
    if report.warning:
        note(f"warning: {report.warning}")
    emit(_document(source, report, precision), json)


def _parse_shape(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--input-shape: {text!r} is not ROWS,TOKENS, such as 16,256")
    return int(parts[0]), int(parts[1])


def _parse_output(text: str) -> tuple[str, OutputKind]:
    name, _, value = text.rpartition("=")
    kind = next((kind for kind in get_args(OutputKind) if kind == value), None)
    if not name or kind is None:
        raise InputError(f"--output: {text!r} is not NAME=token or NAME=sequence")
    return name, kind


def _document(source: Path, report: "PackingReport", precision: str) -> dict[str, Any]:
    facts = report.facts
    return {
        "source": str(source),
        "files": [str(path) for path in report.files],
        "mode": facts.mode,
        "precision": precision,
        "shape": facts.shape,
        "inputs": facts.inputs,
        "outputs": facts.outputs,
        "heads": facts.heads,
        "max_positions": facts.max_positions,
        "nodes": {"before": report.nodes[0], "after": report.nodes[1]},
        "difference": report.difference,
        "difference_unfused": report.difference_unfused,
        "warning": report.warning,
        "findings": [asdict(finding) for finding in report.findings],
    }
