"""Settings as a file of TOML that can be read again; `tomllib` reads it."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import fields
from typing import Any


def shown(settings: Any, names: Container[str]) -> str:
    """The fields of these names, by the group and with the help that their metadata hold."""
    lines, group = [], None
    for each in fields(settings):
        if each.name not in names:
            continue
        if each.metadata["group"] != group:
            group = each.metadata["group"]
            lines += ["", f"# {group}"]
        value = getattr(settings, each.name)
        said = f"# {each.name}" if value is None else f"{each.name} = {_value(value)}"
        lines.append(f"{said:<32}  # {each.metadata['help']}")
    return "\n".join(lines[1:]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    # JSON's values are TOML's, but for one character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
