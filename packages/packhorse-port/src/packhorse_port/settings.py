"""How `options` stores a group of settings: by name, checked, frozen once used.

A setting is stored under the name of PopTorch's attribute, read as `options.device_iterations`, and
written only through its method. One without effect here is an empty method with `@ignored`: it
takes PopTorch's arguments, stores them, and logs once why they have no effect. All groups of one
`Options` share one `OptionsUse`: the first loader or model that uses the options freezes them all,
because what was built from them would not follow a change.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from packhorse.errors import PackhorseError
from packhorse_port.notices import UsageError, line_prefix, log_once

Method = TypeVar("Method", bound=Callable[..., Any])


class OptionsError(PackhorseError, AttributeError):
    """A setting that does not exist, or that can no longer be changed."""


class Ignored(NamedTuple):
    """A setting without effect: the name it is stored under, its default, the reason."""

    name: str
    default: Any
    reason: str


@dataclass
class OptionsUse:
    """What used the options first, and at which line; empty while they may still change."""

    owner: str = ""
    line: str = ""


def ignored(name: str, default: Any, reason: str) -> Callable[[Method], Method]:
    """Decorate an empty method: it stores its arguments as `name` and logs `reason` once.

    Setting the default is not logged. `method.setting` describes the setting to those who list
    them.
    """

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def accept(self: Settings, *args: Any, **kwargs: Any) -> Settings:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            values = dict(list(bound.arguments.items())[1:])
            value = next(iter(values.values())) if len(values) == 1 else values
            self._set(method.__name__, **{name: value})
            if value != default:
                log_once(method.__name__, f"{method.__name__} has no effect: {reason}")
            return self

        accept.setting = Ignored(name, default, reason)  # pyright: ignore[reportAttributeAccessIssue]
        return accept  # pyright: ignore[reportReturnType]

    return decorate


class Settings:
    """Abstract: one group, `Options` itself or `Options.Training` and its like."""

    DEFAULTS: ClassVar[dict[str, Any]]

    def __init__(self, use: OptionsUse) -> None:
        self.__dict__.update(_use=use, _values=self._fresh())

    @classmethod
    def _fresh(cls) -> dict[str, Any]:
        values = copy.deepcopy(cls.DEFAULTS)
        for method in vars(cls).values():
            if isinstance(setting := getattr(method, "setting", None), Ignored):
                values[setting.name] = copy.deepcopy(setting.default)
        return values

    def _set(self, method: str, **values: Any) -> Self:
        """Store values; raises if the options are in use."""
        if self._use.owner:
            shown = ", ".join(repr(value) for value in values.values())
            raise OptionsError(
                f"{line_prefix()}these options can no longer change: {self._use.owner} took them"
                f"{' at ' + self._use.line if self._use.line else ''}. Set {method}({shown}) before"
                " that line, or write `opts = opts.clone()` first and pass the copy on"
            )
        self._values.update(values)
        return self

    def exists(self, option: str) -> bool:
        """Whether there is a setting with this name."""
        return option in self._values

    def toDict(self) -> dict[str, Any]:
        """The group's settings as plain values."""
        return {name: plain(value) for name, value in self._values.items()}

    def _restore(self, values: dict[str, Any]) -> None:
        for name, default in self._values.items():
            if name in values:
                is_enum = isinstance(default, Enum)
                self._values[name] = type(default)(values[name]) if is_enum else values[name]

    def _changed(self) -> dict[str, Any]:
        fresh = self._fresh()
        return {name: value for name, value in self._values.items() if value != fresh[name]}

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise OptionsError(
            f"{line_prefix()}{type(self).__name__} has no {name!r}; {self._nearest(name)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(type(self), name, None)):
            raise OptionsError(
                f"{line_prefix()}{name} is set by calling it: write .{name}({value!r}), not"
                f" .{name} = {value!r}"
            )
        hint = self._nearest(name) if name not in self._values else "call the method that sets it"
        raise OptionsError(
            f"{line_prefix()}{type(self).__name__}.{name} cannot be assigned; {hint}"
        )

    def _nearest(self, name: str) -> str:
        names = (*dir(type(self)), *self._values)
        lower = {known.lower(): known for known in names if not known.startswith("__")}
        near = get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
        return f"the nearest it has is {lower[near[0]]!r}" if near else "there is nothing similar"


def plain(value: Any) -> Any:
    """A setting as a plain value for JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if hasattr(value, "toDict"):
        return value.toDict()
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """`value` as an integer of at least `least`; raises if it is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{line_prefix()}{name} takes a whole number, not {value!r}")
    if value < least:
        raise UsageError(f"{line_prefix()}{name} must be at least {least}, got {value}")
    return value.__index__()


def check_member(name: str, value: Any, kind: type[Enum]) -> Any:
    """`value` if it is a member of the enumeration; raises if it is not."""
    if not isinstance(value, kind):
        choices = ", ".join(f"poptorch.{kind.__name__}.{choice.name}" for choice in kind)
        raise UsageError(f"{line_prefix()}{name} takes one of {choices}; not {value!r}")
    return value
