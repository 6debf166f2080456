"""Rewrite a BERT-family graph so that it takes packed rows.

Three modes. *positions*: position ids become an input, nothing else changes. *mask*: a row holds
several sequences, and the mask, which held 1 for a token and 0 for padding, holds the number of the
token's sequence (any that differ within a row; 0 is padding still): tokens of the same number see
each other. A padded batch is thus the case of one sequence a row. *repack*: everything that works
token by token gets the packed rows, attention gets the sequences unpacked side by side, each padded
to the longest, and its result is packed again; where they lie follows from `unpack_info`, the
lengths of the sequences in their order, and sequences may cross rows. Heads that answer once a
sequence take its first token, or sum over its tokens, wherever it lies.

Trade-offs: in mask mode scores are computed across neighbours and thrown away, and a NaN spreads
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
from packhorse.onnxpack.facts import KEY, Facts, Kind, Mode, name_heads
from packhorse.onnxpack.graph import ASK_SHAPE, Graph, refuse
from packhorse.onnxpack.layout import Layout
from packhorse.onnxpack.patterns import Attention, Embeddings
from packhorse.onnxpack.probe import BATCH, Observed, observe, roles

POSITIONS = "position_ids"
OVER_TOKENS = {"ReduceSum": True, "ReduceMax": False}  # must what is no token be zero?
PER_SEQUENCE = ("first", "lengths")  # inputs [S]; the others are [R, C]


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and what was done about it."""

    what: str
    where: str
    done: str


def rewrite(
    graph: Graph, mode: Mode, shape: tuple[int, int] | None, stated: Mapping[str, Kind]
) -> tuple[Facts, list[Finding]]:
    """Change the graph in place; what it is now, and what was found on the way."""
    if any(entry.key == KEY for entry in graph.model.metadata_props):
        raise InputError("the model is packed already; take the one it was made of")
    patterns.refuse_fused(graph)
    called = roles(graph.inputs)
    seen = observe(graph, called)
    outputs = _kinds(graph.outputs, seen, stated)
    tables = patterns.find_embeddings(graph, seen, called)
    findings = [_feed_positions(graph, tables, called)]
    layout = Layout(graph, mode, called)
    unpacked: set[str] = set()
    if mode != "positions":
        attentions = patterns.find_attentions(graph, seen, tables.words, called.get("mask"))
        for table in tables.idle:
            # Zeros that are cut from a table of fixed length would limit the length of a row.
            graph.set_input(table.node, 1, graph.op("Sub", called["ids"], called["ids"]))
        findings += _pack(graph, seen, attentions, layout, unpacked)
    for source in scales.isolate(graph, seen, layout, unpacked):
        findings.append(Finding("scale", source, "chosen per sequence, not per batch"))
    findings += [Finding("output", name, f"one a {kind}") for name, kind in outputs.items()]
    used = graph.used()
    widths = {name: (seen.widths(name) or [1])[-1] for name in outputs}
    facts = Facts(
        mode=mode,
        shape=shape,
        inputs={role: name for role, name in called.items() if name in used},
        outputs=outputs,
        heads=name_heads(outputs, widths, tables.words.shape),
        vocab_size=tables.words.shape[0],
        max_positions=tables.positions.shape[0] - tables.offset,
        padding=tables.offset - 1 if tables.counted else None,
    )
    _declare(graph, seen, facts)
    return facts, findings


def _kinds(names: list[str], seen: Observed, stated: Mapping[str, Kind]) -> dict[str, Kind]:
    for name, kind in stated.items():
        if name not in names:
            raise InputError(f"there is no output {name!r}; there are: {', '.join(names)}")
        if kind not in get_args(Kind):
            raise InputError(f"output {name!r} is stated as {kind!r}; say token or sequence")
    return {name: _kind(name, seen, stated.get(name)) for name in names}


def _kind(name: str, seen: Observed, stated: Kind | None) -> Kind:
    """Per token where the axis of tokens survives, right after that of the batch or within it."""
    axes = seen.axes.get(name, ())
    found: Kind | None = None
    if seen.per_token(name) or (axes and axes[0].batch and axes[0].token and axes[0].size == 1):
        found = "token"
    elif axes[:1] == (BATCH,) and not seen.has_tokens(name):
        found = "sequence"
    if found and stated and found != stated:
        raise InputError(f"the graph shows that {name!r} is one a {found}, not one a {stated}")
    if kind := found or stated:
        return kind
    raise CheckpointError(
        f"output {name!r} is neither [rows, tokens, …] nor [rows, …]; "
        f"say what it is with --output {name}=token or {name}=sequence"
    )


def _feed_positions(graph: Graph, tables: Embeddings, called: dict[str, str]) -> Finding:
    node = tables.positions.node
    if "positions" in called:
        return Finding("positions", _name(node), f"{called['positions']} is an input already")
    indices = called["positions"] = graph.add_input(POSITIONS)
    if tables.offset:
        indices = graph.op("Add", indices, graph.constant(tables.offset))
    graph.set_input(node, 1, indices)
    start = f", 0 being row {tables.offset}" if tables.offset else ""
    return Finding("positions", _name(node), f"looked up by the input {POSITIONS}{start}")


def _name(node: NodeProto) -> str:
    return node.name or node.output[0]


def _pack(
    graph: Graph,
    seen: Observed,
    attentions: list[Attention],
    layout: Layout,
    unpacked: set[str],
) -> Iterator[Finding]:
    """Keep sequences apart; `unpacked` gets the values that hold one per row."""
    _give_heads_a_mask(graph, seen, layout)
    for attention in attentions:
        _drop_masks(graph, attention)
    for node, value in patterns.find_losses(graph, seen):
        yield Finding("head", _name(node), _collect(graph, seen, node, value, layout))
    for attention in attentions:
        done = "keeps sequences apart"
        if layout.mode == "repack":
            unpacked |= _unpack(graph, seen, attention, layout)
            done = "works on unpacked sequences"
        _shift(graph, seen, attention, layout)
        masks = ", ".join(_name(joint.node) for joint in attention.masks)
        done += f" (its mask came by {masks})" if masks else ""
        yield Finding("attention", _name(attention.node), done)


def _give_heads_a_mask(graph: Graph, seen: Observed, layout: Layout) -> None:
    """What reads the old mask gets 1 for a token and 0 for padding still."""
    name = layout.called.get("mask")
    if name is None:
        return
    readers = list(graph.readers[name])
    if layout.mode == "repack":
        del layout.called["mask"]
    kind = helper.np_dtype_to_tensor_dtype(seen.values[name].dtype)
    graph.replace(name, graph.op("Cast", layout.real, to=kind), among=readers)


def _drop_masks(graph: Graph, attention: Attention) -> None:
    for node, scores in attention.masks:
        graph.replace(node.output[0], scores)
        graph.remove(node)
    if attention.node.op_type == "Attention" and len(attention.node.input) > 3:
        graph.set_input(attention.node, 3, "")


def _shift(graph: Graph, seen: Observed, attention: Attention, layout: Layout) -> None:
    """Lower the scores of what a token may not see."""
    node = attention.node
    if node.op_type == "Softmax":
        scores = node.input[0]  # which may be wider than what they are made of
        shift = layout.shift(seen.values[scores].dtype)
        graph.set_input(node, 0, graph.op("Add", scores, shift))
        return
    if len(node.input) == 3:
        node.input.append("")
    graph.set_input(node, 3, layout.shift_all(seen.values[attention.sources[0]].dtype))


def _collect(graph: Graph, seen: Observed, node: NodeProto, value: str, layout: Layout) -> str:
    """Let a head that answers once a sequence find its tokens; what was done."""
    if not seen.per_token(value):
        raise refuse(node, "answers once a sequence, of tokens that are not [rows, tokens, …]")
    widths, result = seen.widths(value), node.output[0]
    if patterns.takes_first(node, value, seen):
        graph.remove(node)
        shape = graph.constant([-1, *seen.widths(result)])
        graph.op("Reshape", layout.first(value, widths), shape, result=result)
        return "takes each sequence's first token"
    if node.op_type not in OVER_TOKENS:
        raise refuse(
            node,
            "makes one of a sequence's tokens in a way that packing does not know; it knows "
            f"the first token, {' and '.join(OVER_TOKENS)}",
        )
    unpacked = layout.unpack(value, widths)
    if OVER_TOKENS[node.op_type]:
        unpacked = layout.zeroed(unpacked, widths, seen.values[value].dtype)
    graph.replace(value, unpacked, among=[node])
    return "reduces each sequence's own tokens"


def _unpack(graph: Graph, seen: Observed, attention: Attention, layout: Layout) -> set[str]:
    """Cut the attention out of the rows: unpacked before, packed again after; what is between."""
    _drop_biases(graph, seen, attention)
    inside = set()
    readers = (attention.scores, attention.scores, attention.context)
    for reader, value in zip(readers, attention.sources, strict=True):
        reader, cut = _up_to_tokens(graph, seen, reader, value)
        unpacked = layout.unpack(cut, seen.widths(cut))
        graph.replace(cut, unpacked, among=[reader])
        inside.add(unpacked)
    end = _down_to_tokens(graph, seen, attention.context.output[0])
    between = graph.follow(inside, shapes=True, until=[end]) - {end}
    _check_inside(graph, between)
    outside = list(graph.readers[end])
    graph.replace(end, layout.repack(end, seen.widths(end)), among=outside)
    return between


def _drop_biases(graph: Graph, seen: Observed, attention: Attention) -> None:
    """Nothing may depend on places in a row; a shift by zero (a mask that is no input) does not."""
    for node, scores in attention.biases:
        others = [name for name in node.input if name != scores and seen.has_tokens(name)]
        zero = not any(seen.values[name].any() for name in others)
        if node.op_type not in ("Add", "Sub") or not zero:
            raise refuse(node, "gives scores a shift for places in a row; try --mode mask")
        graph.replace(node.output[0], scores)
        graph.remove(node)


def _up_to_tokens(
    graph: Graph, seen: Observed, reader: NodeProto, value: str
) -> tuple[NodeProto, str]:
    """The nearest value before `value` that is [rows, tokens, …], and who reads it."""
    while not seen.per_token(value):
        reader = graph.maker[value]
        sources = [name for name in reader.input if seen.has_tokens(name)]
        if len(sources) != 1:
            raise refuse(reader, "mixes values on their way into an attention; try --mode mask")
        value = sources[0]
    return reader, value


def _down_to_tokens(graph: Graph, seen: Observed, value: str) -> str:
    """The nearest value after `value` that is [rows, tokens, …]."""
    while not seen.per_token(value):
        readers = [node for node in graph.readers[value] if node.op_type not in ASK_SHAPE]
        if len(readers) != 1:
            raise refuse(graph.maker[value], "has no single way out of an attention")
        value = readers[0].output[0]
    return value


def _check_inside(graph: Graph, inside: set[str]) -> None:
    """What is computed of unpacked values must not need any that is laid in rows."""
    for node in graph.nodes:
        if inside.isdisjoint(node.input):
            continue
        for name in filter(None, node.input):
            if name not in inside and not graph.is_constant(name):
                raise refuse(node, f"needs {name!r} inside an attention; try --mode mask")


def _declare(graph: Graph, seen: Observed, facts: Facts) -> None:
    """Inputs, outputs and metadata of the new model."""
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
        shape: list[int | str | None] = [None for _ in seen.axes[name]]
        if seen.per_token(name):
            shape = [rows, capacity, *seen.widths(name)]
        elif kind == "sequence":
            shape = [sequences, *seen.widths(name)]
        dtype = helper.np_dtype_to_tensor_dtype(seen.values[name].dtype)
        outputs.append(helper.make_tensor_value_info(name, dtype, shape))
    graph.finish()
    del proto.input[:], proto.output[:]
    proto.input.extend(inputs)
    proto.output.extend(outputs)
    graph.model.ir_version = max(graph.model.ir_version, 4)  # initializers need not be inputs
    graph.model.metadata_props.add(key=KEY, value=facts.dump())
