"""A script's text under edit, by the places that its syntax tree names.

Pieces are replaced in one pass at the end, so that every place is one of the text as it was; what
nobody touches keeps its layout and its comments. Places count bytes, as `ast` does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

Node = ast.expr | ast.stmt | ast.keyword


class Left(Exception):
    """Why something cannot be translated: one reason, or several."""


class Text:
    """The text, and the pieces of it that are to be replaced."""

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.lines = self.source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.pieces: list[tuple[int, int, str]] = []

    def begin(self, node: Node) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Node) -> int:
        return self.starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def replace(self, begin: int, end: int, text: str) -> None:
        self.pieces.append((begin, end, text))

    def insert(self, place: int, text: str) -> None:
        self.pieces.append((place, place, text))

    def instead_of(self, node: Node, text: str) -> None:
        self.replace(self.begin(node), self.end(node), text)

    def around(self, node: Node, before: str, after: str) -> None:
        self.insert(self.begin(node), before)
        self.insert(self.end(node), after)

    def above(self, line: int, text: str) -> None:
        """A line of its own before a line, as far to the right."""
        old = self.lines[line - 1]
        indent = old[: len(old) - len(old.lstrip())].decode()
        self.insert(self.starts[line - 1], f"{indent}{text}\n")

    def delete(self, node: ast.stmt, alone: bool) -> None:
        """A statement with its lines; where a block or a line would be left empty, `pass`."""
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before = self.lines[first][: node.col_offset]
        after = self.lines[last][node.end_col_offset :].strip()
        shares = before.strip() or (after and not after.startswith(b"#"))
        if shares or (alone and before):
            self.instead_of(node, "pass")
        else:
            self.replace(self.starts[first], self.starts[last + 1], "")

    def result(self) -> str:
        done, place = b"", 0
        for begin, end, text in sorted(self.pieces, key=lambda piece: piece[:2]):
            done += self.source[place:begin] + text.encode()
            place = end
        return (done + self.source[place:]).decode()


class Slot(NamedTuple):
    """One argument of a call: its name, by keyword or by position; how it is written; its value."""

    name: str | None
    node: ast.expr | ast.keyword
    value: ast.expr


class Slots:
    """The arguments of a call while they are dropped, named and added to."""

    def __init__(self, text: Text, call: ast.Call, names: tuple[str, ...]) -> None:
        if any(isinstance(each, ast.Starred) for each in call.args):
            raise Left("its arguments are not written out")
        self.text, self.call = text, call
        by_place = [*names, *[None] * len(call.args)]
        slots = [Slot(name, each, each) for name, each in zip(by_place, call.args, strict=False)]
        slots += [Slot(word.arg, word, word.value) for word in call.keywords]
        self.slots = sorted(slots, key=lambda slot: text.begin(slot.node))
        self.dropped: set[str | None] = set()
        self.added: list[str] = []

    def value(self, name: str) -> ast.expr | None:
        return next((slot.value for slot in self.slots if slot.name == name), None)

    def drop(self, *names: str) -> None:
        self.dropped |= set(names)

    def add(self, text: str) -> None:
        self.added.append(text)

    def name_positional(self, but: str) -> None:
        """Arguments by position get their names, except the one that both calls have first."""
        for slot in self.kept():
            if slot.node is slot.value and slot.name not in (but, None):
                self.text.insert(self.text.begin(slot.node), f"{slot.name}=")

    def first(self, name: str, before: str = "") -> None:
        """The argument `name` goes without its name, behind `before`."""
        slot = next(iter(self.kept()), None)
        if slot is None or slot.name != name:
            raise Left(f"write the {name} first")
        self.text.replace(self.text.begin(slot.node), self.text.begin(slot.value), before)

    def times(self, value: ast.expr, factor: str) -> None:
        plain = isinstance(value, ast.Name | ast.Attribute | ast.Constant | ast.Call)
        opening, closing = ("", "") if plain else ("(", ")")
        self.text.around(value, opening, f"{closing} * {factor}")

    def kept(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.name not in self.dropped or slot.name is None]

    def done(self) -> list[ast.AST]:
        """Write what was dropped and added; the values that stay, still to be translated."""
        kept, text = self.kept(), self.text
        added = ", ".join(self.added)
        if not kept:
            begin, end = text.end(self.call.func) + 1, text.end(self.call) - 1
            text.replace(begin, end, added)
            return []
        last = text.end(kept[-1].node)
        text.insert(last, f", {added}" if added else "")
        for slot, following in self._pairs():
            if slot not in kept and text.begin(slot.node) < last and following:
                text.replace(text.begin(slot.node), text.begin(following.node), "")
        if (end := text.end(self.slots[-1].node)) > last:
            text.replace(last, end, "")
        return [slot.value for slot in kept]

    def _pairs(self) -> Iterator[tuple[Slot, Slot | None]]:
        return zip(self.slots, [*self.slots[1:], None], strict=True)
