"""How `options` keeps a group of settings: by name, checked, fixed once used.

A setting is stored under the name of PopTorch's own attribute, read as `options.device_iterations`,
written only through the method that belongs to it. One that has no meaning here is an empty method
with `@ignored`: it takes PopTorch's arguments, keeps them, and says once why nothing follows. All
groups of one `Options` share one `Use`: the first loader or model that takes the options fixes them
all, because what was built from them would not follow a change.
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

from packhorse.errors import InputError, PackhorseError
from packhorse_port.notices import place, say_once

Method = TypeVar("Method", bound=Callable[..., Any])


class OptionsError(PackhorseError, AttributeError):
    """A setting that does not exist, or that can no longer be changed."""


class Ignored(NamedTuple):
    """A setting without effect: where its value is kept, its default, why nothing follows."""

    name: str
    default: Any
    why: str


@dataclass
class Use:
    """Who took the options first, and at which line; empty while they may still change."""

    by: str = ""
    line: str = ""


def ignored(name: str, default: Any, why: str) -> Callable[[Method], Method]:
    """An empty method becomes one that keeps its arguments as `name` and says `why` once.

    Asking for the default is nothing to speak of. `method.setting` is for those who list settings.
    """

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def accept(self: Settings, *args: Any, **kwargs: Any) -> Settings:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            values = dict(list(given.arguments.items())[1:])
            value = next(iter(values.values())) if len(values) == 1 else values
            self._set(method.__name__, **{name: value})
            if value != default:
                say_once(method.__name__, f"{method.__name__} has no effect: {why}")
            return self

        accept.setting = Ignored(name, default, why)  # pyright: ignore[reportAttributeAccessIssue]
        return accept  # pyright: ignore[reportReturnType]

    return decorate


class Settings:
    """Abstract: one group, `Options` itself or `Options.Training` and its like."""

    DEFAULTS: ClassVar[dict[str, Any]]

    def __init__(self, use: Use) -> None:
        self.__dict__.update(_use=use, _values=self._fresh())

    @classmethod
    def _fresh(cls) -> dict[str, Any]:
        values = copy.deepcopy(cls.DEFAULTS)
        for method in vars(cls).values():
            if isinstance(setting := getattr(method, "setting", None), Ignored):
                values[setting.name] = copy.deepcopy(setting.default)
        return values

    def _set(self, method: str, **values: Any) -> Self:
        """Keep the values, unless the options are in use."""
        if self._use.by:
            shown = ", ".join(repr(value) for value in values.values())
            raise OptionsError(
                f"{place()}these options can no longer change: {self._use.by} took them"
                f"{' at ' + self._use.line if self._use.line else ''}. Set {method}({shown}) before"
                " that line, or write `opts = opts.clone()` first and pass the copy on"
            )
        self._values.update(values)
        return self

    def exists(self, option: str) -> bool:
        """Is there a setting stored under this name?"""
        return option in self._values

    def toDict(self) -> dict[str, Any]:
        """The group's settings as plain values."""
        return {name: plain(value) for name, value in self._values.items()}

    def _restore(self, values: dict[str, Any]) -> None:
        for name, default in self._values.items():
            if name in values:
                known = isinstance(default, Enum)
                self._values[name] = type(default)(values[name]) if known else values[name]

    def _changed(self) -> dict[str, Any]:
        fresh = self._fresh()
        return {name: value for name, value in self._values.items() if value != fresh[name]}

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise OptionsError(f"{place()}{type(self).__name__} has no {name!r}; {self._nearest(name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(type(self), name, None)):
            raise OptionsError(
                f"{place()}{name} is set by calling it: write .{name}({value!r}), not"
                f" .{name} = {value!r}"
            )
        how = self._nearest(name) if name not in self._values else "call the method that sets it"
        raise OptionsError(f"{place()}{type(self).__name__}.{name} cannot be assigned; {how}")

    def _nearest(self, name: str) -> str:
        known = [each for each in (*dir(type(self)), *self._values) if not each.startswith("__")]
        lower = {each.lower(): each for each in known}
        near = get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
        return f"the nearest it has is {lower[near[0]]!r}" if near else "and nothing like it"


def plain(value: Any) -> Any:
    """A setting as JSON could hold it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in value]
    if hasattr(value, "toDict"):
        return value.toDict()
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` as an integer that is not below `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{place()}{name} takes a whole number, not {value!r}")
    if value < least:
        raise InputError(f"{place()}{name} must be at least {least}, got {value}")
    return value.__index__()


def member(name: str, value: Any, kind: type[Enum]) -> Any:
    """`value`, which must be one of an enumeration."""
    if not isinstance(value, kind):
        choices = ", ".join(f"poptorch.{kind.__name__}.{each.name}" for each in kind)
        raise InputError(f"{place()}{name} takes one of {choices}; not {value!r}")
    return value
