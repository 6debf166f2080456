"""Write settings as TOML that `tomllib` can read again."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import fields
from typing import Any


def to_toml(settings: Any, names: Container[str]) -> str:
    """The fields with these names as TOML, grouped and commented by the fields' metadata."""
    lines: list[str] = []
    group = None
    for field in fields(settings):
        if field.name not in names:
            continue
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            lines += ["", f"# {group}"]
        value = getattr(settings, field.name)
        # TOML has no null: a value that is not set becomes a comment.
        setting = f"# {field.name}" if value is None else f"{field.name} = {_value(value)}"
        lines.append(f"{setting:<32}  # {field.metadata['help']}")
    return "\n".join(lines[1:]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    # JSON values are TOML values, except for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
