"""`packhorse freeze`: a TensorFlow graph and its checkpoint in one file, without TensorFlow."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress
from packhorse.cli.flags import flag


def freeze(
    *,
    # Each flag also has TensorFlow's spelling, with underscores.
    input_checkpoint: Annotated[
        Path,
        flag(
            "--input-checkpoint",
            "--input_checkpoint",
            help="The checkpoint: its prefix, its index or its folder.",
        ),
    ],
    output_node_names: Annotated[
        str,
        flag(
            "--output-node-names",
            "--output_node_names",
            help="The nodes to compute, separated by commas.",
        ),
    ],
    output_graph: Annotated[
        Path, flag("--output-graph", "--output_graph", help="The file to write.")
    ],
    input_meta_graph: Annotated[
        Path | None,
        flag(
            "--input-meta-graph",
            "--input_meta_graph",
            help="The graph of the checkpoint; default PREFIX.meta.",
        ),
    ] = None,
    clear_devices: Annotated[
        bool,
        flag("--clear-devices", "--clear_devices", help="Drop the device of each node."),
    ] = False,
    input_binary: Annotated[str | None, Parameter(name="--input_binary", show=False)] = None,
    json: JsonFlag = False,
) -> None:
    """Make a frozen graph: the nodes that the outputs need, with the weights as constants.

    Needs no TensorFlow. The outputs equal those of TensorFlow's freeze_graph bit
    for bit, and the flags of that tool are accepted. The file is written whole or
    not at all.

    Try:
      packhorse freeze --input-checkpoint model.ckpt-28252 --output-node-names add_1 \
--output-graph frozen.pb
      packhorse freeze --input_meta_graph model.ckpt.meta --input_checkpoint model.ckpt \
--output_node_names add_1 --output_graph frozen.pb --clear_devices
    """
    from packhorse.checkpoint.tensorflow import freezing

    names = output_node_names.split(",")
    with progress("writing bytes") as advance:
        result = freezing.freeze(
            input_meta_graph,
            input_checkpoint,
            names,
            output_graph,
            clear_devices=clear_devices,
            progress=advance,
        )
    note(
        f"{output_graph}: {result.nodes:,} of {result.nodes_before:,} nodes, "
        f"{result.variables:,} variables as constants, {result.bytes:,} bytes"
    )
    emit({"graph": str(output_graph), "outputs": names, **asdict(result)}, json)
