"""Which GELU a model computes: chosen by the user, read from its graph, or from its configuration.

There are two forms: the exact one, by erf, and the approximation of Hendrycks and Gimpel (2016),
0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Their results differ in the fourth digit.
`hidden_act: gelu` means the exact form in transformers. In Google's configurations it means
whatever the code computed: erf until February 2019, tanh since. A TensorFlow graph shows which: it
has Erf nodes (Erfc in newer TensorFlow), or a Tanh with the constant 0.044715 before it; the
pooler's Tanh has no such constant. A checkpoint without a graph is read as transformers reads it,
with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from packhorse.checkpoint import files
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.names.families import ACTIVATIONS, family_of
from packhorse.checkpoint.tensorflow import graphdef
from packhorse.checkpoint.tensorflow.graphdef import GraphNode
from packhorse.errors import CheckpointError, InputError

Form = Literal["erf", "tanh"]
HIDDEN_ACT = {"erf": "gelu", "tanh": "gelu_new"}  # form → its name in transformers' hidden_act
FORMS = {"gelu": "erf", "gelu_tanh": "tanh"}  # our name of an activation → its form

# Grappler's names of a GELU that it fused into the product before it.
FUSED = {b"GeluExact": "erf", b"GeluApproximate": "tanh"}
COEFFICIENT = 0.044715
TOLERANCE = 0.01  # relative: bfloat16 keeps 8 bits of the coefficient
STEPS = 6  # nodes from a Tanh back to the constant at most; there are 4 in Google's code
META_LIMIT = 1 << 30  # bytes of a .meta that are read; BERT-Large's training graph has some 20 MB

AMBIGUOUS = (
    "{key} is 'gelu' and no graph (.meta) shows which GELU that is: it is read as the exact one, "
    "as transformers does. Google's code computed that until February 2019, and an approximation "
    "by tanh since; if the model was trained with the later code, pass --gelu tanh (gelu='tanh'), "
    "else --gelu erf"
)


class GeluWarning(UserWarning):
    """Nothing shows which GELU a TensorFlow checkpoint was trained with."""


@dataclass(frozen=True)
class Gelu:
    """The form of a model's GELU and the reason for choosing it; empty for other activations."""

    form: str = ""
    reason: str = ""


def choose(
    raw: dict[str, Any], contents: Contents, requested: str | None
) -> tuple[dict[str, Any], Gelu]:
    """Return the configuration with the form of GELU written into it; warn if it is a guess."""
    if requested not in (None, *get_args(Form)):
        raise InputError(f"--gelu (gelu=) is {requested!r}; it is erf or tanh")
    family = family_of(raw)
    key = family.config.get("activation", "hidden_act")
    activation = raw.get(key, family.defaults.get("activation", "gelu"))
    configured = FORMS.get(ACTIVATIONS.get(activation, "")) if isinstance(activation, str) else None
    if configured is None:
        if requested:
            raise InputError(
                f"--gelu (gelu=) chooses a form of GELU, but the configuration says "
                f"{key} {activation!r}"
            )
        return raw, Gelu()
    default = str(family.defaults.get("activation", "gelu"))
    gelu = _decide(raw, key, default, contents, requested)
    if not gelu.reason:
        # stacklevel: choose ← loading._canonical ← loading.load ← its caller
        warnings.warn(AMBIGUOUS.format(key=key), GeluWarning, stacklevel=4)
        gelu = Gelu(gelu.form, "transformers reads it so; no graph shows it")
    if gelu.form != configured:
        raw = {**raw, key: HIDDEN_ACT[gelu.form]}
    return raw, gelu


def _decide(
    raw: Mapping[str, Any], key: str, default: str, contents: Contents, requested: str | None
) -> Gelu:
    """The form and its reason; the reason is empty where the form is only a guess."""
    in_graph = contents.gelu
    graph = contents.graph.name if contents.graph else "its graph"
    if requested:
        against = f", although {graph} computes it by {' and '.join(sorted(in_graph))}"
        return Gelu(
            requested, "--gelu (gelu=) says so" + (against if in_graph - {requested} else "")
        )
    if len(in_graph) > 1:
        raise CheckpointError(
            f"{graph} computes GELU in both forms, by erf and by tanh; say which of them the "
            f"layers use: --gelu erf or --gelu tanh (gelu=)"
        )
    if in_graph:
        return Gelu(next(iter(in_graph)), f"the nodes of {graph} compute it so")
    activation = raw.get(key)
    form = FORMS[ACTIVATIONS[activation or default]]
    # transformers writes a model_type into its configurations; Google's have none.
    unambiguous = form == "tanh" or (activation and "model_type" in raw)
    if contents.format in ("tf1", "frozen") and not unambiguous:
        return Gelu(form)
    unsaid = "BERT's is" if default == "gelu" else f"the family's is {default}"
    reason = f"the configuration says {key} {activation!r}" if activation else unsaid
    return Gelu(form, reason)


def forms_in_meta(prefix: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """The forms in the graph beside a checkpoint (PREFIX.meta), and a note if it is damaged."""
    name = f"{prefix.name}.meta"
    if not files.exists(prefix.parent, name):
        return frozenset(), ()
    try:
        with files.open_file(prefix.parent, name) as file:
            data = memoryview(file.read(META_LIMIT))
            graph = graphdef.single(data, (0, len(data)), {2}).get(2)  # MetaGraphDef.graph_def
            if graph is None:
                raise CheckpointError("it is no graph of a checkpoint")
            nodes = graphdef.nodes(data, graph.begin, graph.end)
            return forms_in_nodes(data, nodes, file), ()
    except (CheckpointError, OSError) as error:
        return frozenset(), (f"{name} is not read, so it does not tell which GELU it is: {error}",)


def forms_in_nodes(data: memoryview, nodes: dict[str, GraphNode], file: BinaryIO) -> frozenset[str]:
    """The forms ("erf", "tanh") that these nodes of `file` compute; empty if none does."""
    forms: set[str] = set()
    is_coefficient: dict[str, bool] = {}  # by constant: a graph's layers may share one
    for node in nodes.values():
        if node.op in ("Erf", "Erfc"):
            forms.add("erf")
        elif node.op.startswith("_Fused"):
            begin, end = graphdef.attributes(data, node).get("fused_ops", (node.end, node.end))
            names = bytes(data[begin:end])
            forms |= {form for name, form in FUSED.items() if name in names}
        elif node.op == "Tanh" and "tanh" not in forms:
            ancestors = _ancestors(node, nodes)
            for ancestor in ancestors:
                if ancestor.op == "Const" and ancestor.name not in is_coefficient:
                    is_coefficient[ancestor.name] = _is_coefficient(data, ancestor, file)
            if any(is_coefficient.get(ancestor.name) for ancestor in ancestors):
                forms.add("tanh")
    return frozenset(forms)


def _ancestors(node: GraphNode, nodes: dict[str, GraphNode]) -> list[GraphNode]:
    """The node, and those that lead to it in at most STEPS steps."""
    reached = {node.name: node}
    level = [node]
    for _ in range(STEPS):
        sources = {source for node in level for source in node.sources}
        level = [nodes[name] for name in sources if name in nodes and name not in reached]
        reached |= {node.name: node for node in level}
    return list(reached.values())


def _is_coefficient(data: memoryview, node: GraphNode, file: BinaryIO) -> bool:
    attributes = graphdef.attributes(data, node)
    dtype = graphdef.dtype_of(data, attributes.get("dtype"))
    if dtype not in graphdef.FLOATS or "value" not in attributes:
        return False
    stored = graphdef.stored(data, attributes["value"], dtype)
    if stored.shape:
        return False
    return abs(float(graphdef.read(file, stored)) / COEFFICIENT - 1) < TOLERANCE
