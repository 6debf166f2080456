"""Settings from a file: one line each, as a script writes it, without `options.` before it.

    deviceIterations(10)
    Training.gradientAccumulation(8)
    outputMode(poptorch.OutputMode.EveryN, 5)

PopTorch runs such a file as Python. Here every line is parsed and only calls of settings with plain
values pass (numbers, text, lists, dictionaries, `poptorch`'s enumerations, `torch`'s types and
`TensorLocationSettings`), so that a file of settings cannot do anything but set.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from packhorse.errors import PackhorseError
from packhorse_port import enums
from packhorse_port.notices import place

if TYPE_CHECKING:
    from packhorse_port.settings import Settings


class ConfigFileError(PackhorseError):
    """A file of settings has a line that is not a setting."""


def apply(options: Settings, path: Path) -> None:
    """Every line of the file on `options`, in order; a line that cannot be is named."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigFileError(f"{place()}cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if (text := line.strip()) and not text.startswith("#"):
            try:
                _call(options, ast.parse(text, mode="eval").body)
            except (SyntaxError, PackhorseError, TypeError, ValueError) as error:
                reason = error.msg if isinstance(error, SyntaxError) else error
                raise ConfigFileError(f"{path.name}:{number}: {text!r}: {reason}") from error


def _call(options: Any, node: ast.AST) -> Any:
    """`deviceIterations(1)`, or a chain of such calls; the object the last one returned."""
    if not isinstance(node, ast.Call):
        raise ConfigFileError("a line is a call, as deviceIterations(10)")
    arguments = [_value(each) for each in node.args]
    named = {each.arg: _value(each.value) for each in node.keywords if each.arg}
    return _target(options, node.func)(*arguments, **named)


def _target(options: Any, node: ast.AST) -> Any:
    if isinstance(node, ast.Name):
        return getattr(options, _public(node.id))
    if isinstance(node, ast.Attribute):
        owner = node.value
        owner = _call(options, owner) if isinstance(owner, ast.Call) else _target(options, owner)
        return getattr(owner, _public(node.attr))
    raise ConfigFileError("a line is a call, as deviceIterations(10)")


def _public(name: str) -> str:
    if name.startswith("_") and name != "_Popart":
        raise ConfigFileError(f"{name} is not a setting")
    return name


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Attribute):
        return _named(ast.unparse(node))
    if isinstance(node, ast.Call) and "TensorLocationSettings" in ast.unparse(node.func):
        return _location(node)
    try:
        return ast.literal_eval(ast.unparse(node))
    except ValueError as error:
        raise ConfigFileError(f"{ast.unparse(node)} is not a plain value") from error


def _named(name: str) -> Any:
    """`poptorch.OutputMode.All` or `torch.half`."""
    first, *rest = name.split(".")
    if (
        first == "torch"
        and len(rest) == 1
        and isinstance(getattr(torch, rest[0], None), torch.dtype)
    ):
        return getattr(torch, rest[0])
    if first == "poptorch" and len(rest) == 2:
        kind = getattr(enums, rest[0], None)
        if isinstance(kind, type) and issubclass(kind, enums.Enum) and rest[1] in kind.__members__:
            return kind[rest[1]]
    raise ConfigFileError(f"{name} is neither of poptorch's enumerations nor of torch's types")


def _location(node: ast.Call) -> Any:
    """`poptorch.TensorLocationSettings().useOnChipStorage(False)` and longer chains."""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        method = getattr(_location(node.func.value), _public(node.func.attr))
        return method(*[ast.literal_eval(each) for each in node.args])
    return enums.TensorLocationSettings()
