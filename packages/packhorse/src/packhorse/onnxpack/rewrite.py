"""Rewrite a BERT-family graph so that it takes packed rows.

Three modes. *positions*: position ids become an input, nothing else changes. *mask*: a row holds
several sequences, and the mask, which held 1 for a token and 0 for padding, holds the number of the
token's sequence (any numbers that differ within a row; 0 is still padding): tokens of the same
number attend to each other. A padded batch is the case of one sequence per row. *repack*: all
operations per token get the packed rows, attention gets the sequences unpacked, one per row, each
padded to the longest, and its result is packed again; their positions follow from `unpack_info`,
the lengths of the sequences in order, and sequences may cross rows. Heads that answer per sequence
take its first token, or sum over its tokens, wherever it is.

Trade-offs: in mask mode scores across neighbors are computed and discarded, and a NaN spreads
within its row; in repack mode it stays in its sequence, and attention pays for padding. Masked
scores are lowered by a finite number, so that a row of padding gives numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from onnx import NodeProto, TensorProto, helper

from packhorse.errors import CheckpointError, InputError
from packhorse.onnxpack import patterns, scales
from packhorse.onnxpack.facts import KEY, Kind, Mode, PackedModelFacts, name_heads
from packhorse.onnxpack.graph import SHAPE_OPS, EditableGraph, node_error
from packhorse.onnxpack.layout import PackedLayout
from packhorse.onnxpack.patterns import AttentionNodes, EmbeddingTables
from packhorse.onnxpack.probe import BATCH, Observation, observe, roles

POSITIONS = "position_ids"
# Reductions over tokens that are supported → must padding be zero for them?
OVER_TOKENS = {"ReduceSum": True, "ReduceMax": False}
PER_SEQUENCE = ("first", "lengths")  # inputs [S]; the others are [R, C]


@dataclass(frozen=True)
class PackingFinding:
    """A part of the graph that packing recognized, and the change that it made."""

    # These names are keys of `packhorse onnx pack --json`.
    what: str  # positions, attention, head, scale or output
    where: str  # name of the node or value
    done: str  # the change


def rewrite(
    graph: EditableGraph, mode: Mode, shape: tuple[int, int] | None, stated: Mapping[str, Kind]
) -> tuple[PackedModelFacts, list[PackingFinding]]:
    """Change the graph in place; returns the facts of the packed model and what was changed.

    stated: kinds of outputs that the user states.
    """
    if any(entry.key == KEY for entry in graph.model.metadata_props):
        raise InputError("the model is packed already; pack the original instead")
    patterns.refuse_fused(graph)
    input_names = roles(graph.inputs)
    observed = observe(graph, input_names)
    outputs = _output_kinds(graph.outputs, observed, stated)
    tables = patterns.find_embeddings(graph, observed, input_names)
    findings = [_feed_positions(graph, tables, input_names)]
    layout = PackedLayout(graph, mode, input_names)
    unpacked: set[str] = set()
    if mode != "positions":
        attentions = patterns.find_attentions(
            graph, observed, tables.words, input_names.get("mask")
        )
        for table in tables.constant:
            # Exporters slice these zeros from a table of fixed length, which would limit a row's.
            graph.set_input(table.node, 1, graph.op("Sub", input_names["ids"], input_names["ids"]))
        findings += _pack(graph, observed, attentions, layout, unpacked)
    for source in scales.quantize_per_sequence(graph, observed, layout, unpacked):
        findings.append(PackingFinding("scale", source, "chosen per sequence, not per batch"))
    for name, kind in outputs.items():
        findings.append(PackingFinding("output", name, f"one per {kind}"))
    used = graph.used()
    widths = {name: (observed.widths(name) or [1])[-1] for name in outputs}
    facts = PackedModelFacts(
        mode=mode,
        shape=shape,
        inputs={role: name for role, name in input_names.items() if name in used},
        outputs=outputs,
        heads=name_heads(outputs, widths, tables.words.shape),
        vocab_size=tables.words.shape[0],
        max_positions=tables.positions.shape[0] - tables.offset,
        padding=tables.offset - 1 if tables.counted else None,
    )
    _declare(graph, observed, facts)
    return facts, findings


def _output_kinds(
    names: list[str], observed: Observation, stated: Mapping[str, Kind]
) -> dict[str, Kind]:
    for name, kind in stated.items():
        if name not in names:
            raise InputError(f"there is no output {name!r}; there are: {', '.join(names)}")
        if kind not in get_args(Kind):
            raise InputError(f"output {name!r} is stated as {kind!r}; say token or sequence")
    return {name: _output_kind(name, observed, stated.get(name)) for name in names}


def _output_kind(name: str, observed: Observation, stated: Kind | None) -> Kind:
    """Per token if the token axis follows the batch axis or is merged with it."""
    axes = observed.axes.get(name, ())
    flat = axes and axes[0].batch and axes[0].token and axes[0].size == 1
    shown: Kind | None = None
    if observed.per_token(name) or flat:
        shown = "token"
    elif axes[:1] == (BATCH,) and not observed.has_tokens(name):
        shown = "sequence"
    if shown and stated and shown != stated:
        raise InputError(f"the graph shows that {name!r} is per {shown}, not per {stated}")
    if kind := shown or stated:
        return kind
    raise CheckpointError(
        f"output {name!r} is neither [rows, tokens, …] nor [rows, …]; "
        f"say what it is with --output {name}=token or {name}=sequence"
    )


def _feed_positions(
    graph: EditableGraph, tables: EmbeddingTables, input_names: dict[str, str]
) -> PackingFinding:
    """Look positions up by an input instead of by their index in the row."""
    node = tables.positions.node
    if "positions" in input_names:
        return PackingFinding(
            "positions", _name(node), f"{input_names['positions']} is an input already"
        )
    indices = graph.add_input(POSITIONS)
    input_names["positions"] = indices
    if tables.offset:
        indices = graph.op("Add", indices, graph.constant(tables.offset))
    graph.set_input(node, 1, indices)
    start = f", 0 being row {tables.offset}" if tables.offset else ""
    return PackingFinding("positions", _name(node), f"looked up by the input {POSITIONS}{start}")


def _name(node: NodeProto) -> str:
    return node.name or node.output[0]


def _pack(
    graph: EditableGraph,
    observed: Observation,
    attentions: list[AttentionNodes],
    layout: PackedLayout,
    unpacked: set[str],
) -> Iterator[PackingFinding]:
    """Keep sequences apart; values that hold one sequence per row are added to `unpacked`."""
    _give_heads_a_mask(graph, observed, layout)
    for attention in attentions:
        _drop_masks(graph, attention)
    for node, value in patterns.find_poolings(graph, observed):
        yield PackingFinding("head", _name(node), _pool(graph, observed, node, value, layout))
    for attention in attentions:
        change = "keeps sequences apart"
        if layout.mode == "repack":
            unpacked |= _unpack(graph, observed, attention, layout)
            change = "works on unpacked sequences"
        _shift(graph, observed, attention, layout)
        masks = ", ".join(_name(mask.node) for mask in attention.masks)
        change += f" (its mask came by {masks})" if masks else ""
        yield PackingFinding("attention", _name(attention.node), change)


def _give_heads_a_mask(graph: EditableGraph, observed: Observation, layout: PackedLayout) -> None:
    """Let readers of the old mask read 1 for a token and 0 for padding, as before."""
    name = layout.input_names.get("mask")
    if name is None:
        return
    readers = list(graph.readers[name])
    if layout.mode == "repack":
        del layout.input_names["mask"]
    kind = helper.np_dtype_to_tensor_dtype(observed.values[name].dtype)
    graph.replace(name, graph.op("Cast", layout.real, to=kind), among=readers)


def _drop_masks(graph: EditableGraph, attention: AttentionNodes) -> None:
    """Remove an attention's own mask; `_shift` adds the new one."""
    for node, scores in attention.masks:
        graph.replace(node.output[0], scores)
        graph.remove(node)
    if attention.node.op_type == "Attention" and len(attention.node.input) > 3:
        graph.set_input(attention.node, 3, "")


def _shift(
    graph: EditableGraph, observed: Observation, attention: AttentionNodes, layout: PackedLayout
) -> None:
    """Lower the scores of tokens that a token may not attend to."""
    node = attention.node
    if node.op_type == "Softmax":
        scores = node.input[0]  # its dtype may be wider than that of queries and keys
        shift = layout.shift(observed.values[scores].dtype)
        graph.set_input(node, 0, graph.op("Add", scores, shift))
        return
    if len(node.input) == 3:
        node.input.append("")
    graph.set_input(node, 3, layout.shift_per_query(observed.values[attention.sources[0]].dtype))


def _pool(
    graph: EditableGraph, observed: Observation, node: NodeProto, value: str, layout: PackedLayout
) -> str:
    """Let a head that answers per sequence find its tokens; returns what was changed."""
    if not observed.per_token(value):
        raise node_error(node, "pools tokens that are not [rows, tokens, …]")
    widths = observed.widths(value)
    result = node.output[0]
    if patterns.takes_first(node, value, observed):
        graph.remove(node)
        shape = graph.constant([-1, *observed.widths(result)])
        graph.op("Reshape", layout.first(value, widths), shape, result=result)
        return "takes each sequence's first token"
    if node.op_type not in OVER_TOKENS:
        raise node_error(
            node,
            "pools a sequence's tokens in a way that packing does not support; it supports "
            f"the first token, {' and '.join(OVER_TOKENS)}",
        )
    unpacked = layout.unpack(value, widths)
    if OVER_TOKENS[node.op_type]:
        unpacked = layout.zeroed(unpacked, widths, observed.values[value].dtype)
    graph.replace(value, unpacked, among=[node])
    return "reduces each sequence's own tokens"


def _unpack(
    graph: EditableGraph, observed: Observation, attention: AttentionNodes, layout: PackedLayout
) -> set[str]:
    """Unpack the inputs of an attention and pack its result; returns the values in between."""
    _drop_biases(graph, observed, attention)
    inside = set()
    readers = (attention.scores, attention.scores, attention.context)
    for reader, value in zip(readers, attention.sources, strict=True):
        reader, cut = _up_to_tokens(graph, observed, reader, value)
        unpacked = layout.unpack(cut, observed.widths(cut))
        graph.replace(cut, unpacked, among=[reader])
        inside.add(unpacked)
    end = _down_to_tokens(graph, observed, attention.context.output[0])
    between = graph.follow(inside, shapes=True, until=[end]) - {end}
    _check_inside(graph, between)
    outside = list(graph.readers[end])
    graph.replace(end, layout.repack(end, observed.widths(end)), among=outside)
    return between


def _drop_biases(graph: EditableGraph, observed: Observation, attention: AttentionNodes) -> None:
    """Remove biases that are zero, as a mask that is no input; refuse others.

    Once sequences are unpacked, a bias for positions in a row would be added at other positions.
    """
    for node, scores in attention.biases:
        added = [name for name in node.input if name != scores and observed.has_tokens(name)]
        zero = not any(observed.values[name].any() for name in added)
        if node.op_type not in ("Add", "Sub") or not zero:
            raise node_error(node, "adds a bias for positions in a row; try --mode mask")
        graph.replace(node.output[0], scores)
        graph.remove(node)


def _up_to_tokens(
    graph: EditableGraph, observed: Observation, reader: NodeProto, value: str
) -> tuple[NodeProto, str]:
    """The nearest value before `value` that is [rows, tokens, …], and the node that reads it."""
    while not observed.per_token(value):
        reader = graph.producer[value]
        sources = [name for name in reader.input if observed.has_tokens(name)]
        if len(sources) != 1:
            raise node_error(reader, "mixes values on their way into an attention; try --mode mask")
        value = sources[0]
    return reader, value


def _down_to_tokens(graph: EditableGraph, observed: Observation, value: str) -> str:
    """The nearest value after `value` that is [rows, tokens, …]."""
    while not observed.per_token(value):
        readers = [node for node in graph.readers[value] if node.op_type not in SHAPE_OPS]
        if len(readers) != 1:
            raise node_error(graph.producer[value], "has no single way out of an attention")
        value = readers[0].output[0]
    return value


def _check_inside(graph: EditableGraph, inside: set[str]) -> None:
    """Raise if a value in packed rows is combined with unpacked ones."""
    for node in graph.nodes:
        if inside.isdisjoint(node.input):
            continue
        for name in filter(None, node.input):
            if name not in inside and not graph.is_constant(name):
                raise node_error(node, f"needs {name!r} inside an attention; try --mode mask")


def _declare(graph: EditableGraph, observed: Observation, facts: PackedModelFacts) -> None:
    """Declare inputs, outputs and metadata of the new model."""
    proto = graph.model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in proto.input}
    rows, capacity = facts.shape or ("rows", "capacity")
    sequences = "rows" if facts.mode == "positions" else "sequences"
    inputs = [
        helper.make_tensor_value_info(
            name,
            types.get(name, TensorProto.INT64),
            [sequences] if role in PER_SEQUENCE else [rows, capacity],
        )
        for role, name in facts.inputs.items()
    ]
    outputs = []
    for name, kind in facts.outputs.items():
        shape: list[int | str | None] = [None for _ in observed.axes[name]]
        if observed.per_token(name):
            shape = [rows, capacity, *observed.widths(name)]
        elif kind == "sequence":
            shape = [sequences, *observed.widths(name)]
        dtype = helper.np_dtype_to_tensor_dtype(observed.values[name].dtype)
        outputs.append(helper.make_tensor_value_info(name, dtype, shape))
    graph.finish()
    del proto.input[:]
    del proto.output[:]
    proto.input.extend(inputs)
    proto.output.extend(outputs)
    graph.model.ir_version = max(
        graph.model.ir_version, 4
    )  # since 4 initializers need not be inputs
    graph.model.metadata_props.add(key=KEY, value=facts.dump())
