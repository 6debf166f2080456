"""What a script uses of TensorFlow's IPU modules, read from its syntax, for `port --check`.

A name is what an import bound (`ipu.config.IPUConfig`), a setting of a variable that holds an
`IPUConfig`, or a method that only a model of an IPU has, whatever the variable is called. The table
in `names` says what becomes of it. Needs no TensorFlow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from packhorse_port.names import Name, nearest
from packhorse_port.origins import Origins, assignments, dotted
from packhorse_port.tensorflow import config, options
from packhorse_port.tensorflow.names import FAILS, NAMES

PREFIXES = {"tensorflow.python.ipu": "ipu", "tensorflow.keras.ipu": "keras.ipu"}
METHODS = {name.partition(".")[2]: name for name in NAMES if name.startswith("Model.")}
ENUMS = {
    each.__name__: [member.name for member in each]
    for room in (config, options)
    for each in vars(room).values()
    if isinstance(each, type) and issubclass(each, Enum) and each is not Enum
}


class Use(NamedTuple):
    """One name in one line, and what becomes of it."""

    line: int
    name: str
    known: Name


def short(path: str) -> str:
    """`ipu.config` of `tensorflow.python.ipu.config`; nothing of what is none of the IPU's."""
    for full, home in {**PREFIXES, "keras.ipu": "keras.ipu"}.items():
        if path == full or path.startswith(f"{full}."):
            return home + path.removeprefix(full)
    return ""


def known(name: str) -> Name:
    """What the table says of a name, by the longest part of it that the table has."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        found = ".".join(parts[:end])
        rest = parts[end:]
        if found in FAILS or (found in NAMES and not rest):
            return NAMES[found]
        if rest and parts[end - 1] in ENUMS:
            return _member(parts[end - 1], rest[0], NAMES.get(found))
        if found in NAMES and found.startswith("IPUConfig."):
            return NAMES[found]  # a method of the setting's own value
    group = f"{name}."
    if any(each.startswith(group) for each in NAMES):
        return Name("emulated", "a group of settings")
    return Name("fails", f"there is no such name{nearest(name, NAMES)}")


def _member(enum: str, name: str, known: Name | None) -> Name:
    if name in ENUMS[enum] or name == "parse" or name == "from_bool":
        return known or Name("emulated", "a value")
    return Name("fails", f"{enum} has {', '.join(ENUMS[enum])}")


def uses(tree: ast.AST, origins: Origins) -> Iterator[Use]:
    """Every use, outermost first: `ipu.config.IPUConfig` is one, not three."""
    held = {
        name
        for name, value in assignments(tree)
        if isinstance(value, ast.Call) and short(origins.path(value.func)) == "ipu.config.IPUConfig"
    }
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute) and (name := _name(node, origins, held)):
            yield Use(getattr(node, "end_lineno", None) or node.lineno, name, known(name))
            while isinstance(node, ast.Attribute):
                node = node.value
        waiting += ast.iter_child_nodes(node)


def _name(node: ast.Attribute, origins: Origins, held: set[str]) -> str:
    if name := short(origins.path(node)):
        return name
    if node.attr in METHODS:
        return METHODS[node.attr]
    whole = dotted(node)
    for variable in held:
        if whole.startswith(f"{variable}."):
            return "IPUConfig." + whole.removeprefix(f"{variable}.")
    return ""
