"""JSON arrays as JSON Lines: each element of the outermost array on a line of its own.

No byte moves, so places in the lines are places in the file: a comma between two elements becomes a
line end; line ends within an element and the outer brackets become spaces. The array is not parsed,
only strings and brackets are looked at, and in any pieces: an array of any length takes no memory,
and an element that is no JSON is found by the reader of the lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packhorse.data.sources.unpacking import Pieces

_STRUCTURE = re.compile(rb'["\[\]{},]')
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)  # from behind its first quote
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")


@dataclass(slots=True)
class _Scan:
    """Where in the array the text read so far ends."""

    depth: int = 0
    in_string: bool = False
    ended: bool = False


def as_lines(pieces: Pieces) -> Pieces:
    """The text of one JSON array, as lines; text behind the array is a problem."""
    scan = _Scan()
    held = b""  # a backslash whose character has not arrived
    for piece, problem in pieces:
        if problem:
            yield b"", problem
            continue
        text = held + piece
        end = 0
        if not scan.ended:
            lines = bytearray(text.translate(_LINE_ENDS_TO_SPACES))
            end = _mark_elements(text, lines, scan)
            yield bytes(lines[:end]), ""
        held = text[end:]
        if scan.ended:
            if held.strip():
                yield b"", f"{len(held)} bytes or more stand behind the JSON array"
                return
            held = b""
    if held:
        yield held, ""
    if not scan.ended:
        yield b"", "the JSON array is cut: it has no closing bracket"


def _mark_elements(text: bytes, lines: bytearray, scan: _Scan) -> int:
    """Write a line end for each comma between elements; return how much of the text was read."""
    position = 0
    while position < len(text):
        if scan.in_string:
            string = _STRING.match(text, position)
            if string is None or not string[1]:
                return string.end() if string else position
            position = string.end()
            scan.in_string = False
        mark = _STRUCTURE.search(text, position)
        if mark is None:
            break
        position = mark.end()
        character = mark[0]
        outermost = scan.depth == (0 if character in b"[{" else 1)
        if outermost and character != b'"':
            lines[position - 1] = ord("\n" if character == b"," else " ")
        if character == b'"':
            scan.in_string = True
        elif character in b"[{":
            scan.depth += 1
        elif character in b"]}":
            scan.depth -= 1
            if scan.depth == 0:
                scan.ended = True
                return position
    return len(text)
