"""`packhorse freeze`: a TensorFlow graph and its checkpoint, made one file without TensorFlow."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress


def _flag(name: str, help: str) -> Parameter:
    """A flag with TensorFlow's spelling, which has underscores, beside ours."""
    names = (f"--{name}", f"--{name.replace('-', '_')}")
    return Parameter(name=names, help=help, negative="", show_default=False)


def freeze(
    *,
    input_checkpoint: Annotated[
        Path, _flag("input-checkpoint", help="The checkpoint: its prefix, its index or its folder.")
    ],
    output_node_names: Annotated[
        str, _flag("output-node-names", help="The nodes to compute, with commas between them.")
    ],
    output_graph: Annotated[Path, _flag("output-graph", help="The file to write.")],
    input_meta_graph: Annotated[
        Path | None, _flag("input-meta-graph", help="Its graph; default PREFIX.meta.")
    ] = None,
    clear_devices: Annotated[
        bool, _flag("clear-devices", help="Forget on which device each node was to run.")
    ] = False,
    input_binary: Annotated[str | None, Parameter(name="--input_binary", show=False)] = None,
    json: JsonFlag = False,
) -> None:
    """Make a frozen graph: what the outputs need, with the weights in it as constants.

    Needs no TensorFlow, and gives the outputs of its own freeze_graph bit by bit;
    the spellings of that tool are understood. The file is written whole or not at all.

    Try:
      packhorse freeze --input-checkpoint model.ckpt-28252 --output-node-names add_1 \
--output-graph frozen.pb
      packhorse freeze --input_meta_graph model.ckpt.meta --input_checkpoint model.ckpt \
--output_node_names add_1 --output_graph frozen.pb --clear_devices
    """
    from packhorse.checkpoint.tensorflow import freezing

    names = output_node_names.split(",")
    with progress("writing bytes") as advance:
        made = freezing.freeze(
            input_meta_graph,
            input_checkpoint,
            names,
            output_graph,
            clear_devices=clear_devices,
            progress=advance,
        )
    note(
        f"{output_graph}: {made.nodes:,} of {made.nodes_before:,} nodes, "
        f"{made.variables:,} variables as constants, {made.bytes:,} bytes"
    )
    emit({"graph": str(output_graph), "outputs": names, **asdict(made)}, json)
