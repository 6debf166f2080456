"""What a client's script needs: the inputs, a decorator for its methods, and a file of results.

It runs in the client's environment, without Packhorse: `script.py INPUTS.json RESULTS.json`. Each
method is called once; its value, or the error that the client raised, is written under its name.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Texts and names of models, as `test_clients.py` wrote them.
inputs: Any = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
_methods: dict[str, Callable[[], Any]] = {}


def method(name: str, kind: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function under the client's method that it calls.

    `kind` says what the value is compared with; `test_clients.py` reads it from the source.
    """

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _methods[name] = function
        return function

    return register


def run() -> None:
    """Call every method and write the results."""
    results = {name: _call(function) for name, function in _methods.items()}
    Path(sys.argv[2]).write_text(json.dumps(results), "utf-8")


def _call(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": _plain(function())}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:600]}


def _plain(value: Any) -> Any:
    """Arrays as lists, at any depth, and numpy's numbers as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value
