"""`packhorse onnx`: ONNX models for packed rows."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from cyclopts import App, Parameter

from packhorse.cli.console import emit, note, progress, table
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.onnxpack import PackingReport

app = App(name="onnx", help="Rewrite ONNX models for packed rows.", help_format="plaintext")

Kind = Literal["token", "sequence"]


def _flag(*names: str, help: str) -> Parameter:
    return Parameter(name=names, help=help, negative="", show_default=False)


@app.command
def pack(
    source: Annotated[Path, Parameter(help="The model as it was exported.")],
    target: Annotated[Path, Parameter(help="The model for packed rows.")],
    /,
    *,
    mode: Annotated[
        Literal["positions", "mask", "repack"],
        _flag("--mode", help="How rows are taken; see above."),
    ],
    precision: Annotated[
        Literal["fp32", "fp16"],
        _flag("--precision", help="fp16 halves weights and arithmetic; inputs and outputs stay."),
    ] = "fp32",
    input_shape: Annotated[
        str | None,
        _flag("--input-shape", help="ROWS,TOKENS, as 16,256, to be fixed; default any."),
    ] = None,
    output: Annotated[
        list[str] | None,
        _flag("--output", help="NAME=token or NAME=sequence, where the graph does not show it."),
    ] = None,
    explain: Annotated[
        bool, _flag("--explain", help="Show what was found in the graph and what was done.")
    ] = False,
    overwrite: Annotated[bool, _flag("--overwrite", help="Replace a file that is there.")] = False,
    json: Annotated[bool, _flag("--json", help="One line of JSON at the end.")] = False,
) -> None:
    """Rewrite a model of the BERT family so that several sequences share a row.

    positions   position_ids become an input; nothing else changes.
    mask        attention_mask holds the number of each token's sequence (1, 2 … in
                a row, 0 for padding), and tokens see those of their number only.
    repack      attention works on sequences side by side, all else on the packed
                rows, which sequences may cross; unpack_info holds the lengths.

    Heads that answer once a sequence get first_positions as an input, the place
    of each sequence's first token in the rows laid end to end (in repack mode it
    follows from the lengths). Int8 models that choose scales while they run get
    one per sequence instead of one per batch. What was made is compared with the
    original, sequence by sequence, and run with other neighbors before it is
    written: a neighbor that changes a bit is an error, a difference above 0.05 of
    the outputs' size a warning.

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
            shape=_shape(input_shape),
            outputs=dict(map(_stated, output or ())),
            overwrite=overwrite,
        )
        advance(1, 1)
    if explain:
        rows = [[found.what, found.where, found.done] for found in report.findings]
        table(f"{source}, mode {mode}", ["found", "where", "done"], rows)
    before, after = report.nodes
    note(
        f"{target}: {before} nodes became {after}; its answers differ from the original's by "
        f"{report.difference:.1e} of their size"
    )
    if report.warning:
        note(f"warning: {report.warning}")
    emit(_document(source, report, precision), json)


def _shape(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--input-shape: {text!r} is not ROWS,TOKENS, as in 16,256")
    return int(parts[0]), int(parts[1])


def _stated(text: str) -> tuple[str, Kind]:
    name, _, said = text.rpartition("=")
    kind = next((kind for kind in get_args(Kind) if kind == said), None)
    if not name or kind is None:
        raise InputError(f"--output: {text!r} is not NAME=token or NAME=sequence")
    return name, kind


def _document(source: Path, report: "PackingReport", precision: str) -> dict:
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
        "findings": [asdict(found) for found in report.findings],
    }
