"""Settings of a program from a TOML file, environment variables and command-line flags.

    @dataclass(frozen=True, slots=True)
    class DaemonSettings:
        port: int = setting(8080, "Network", "Port to listen on.", maximum=65535)

        def __post_init__(self) -> None:
            check_bounds(self)

    resolve(DaemonSettings, [
        *from_toml(Path("daemon.toml")),                  # port = 9000
        *from_environment(os.environ, "DAEMON_"),         # DAEMON_PORT=9001
        *from_flags({"port": 9002}),                      # --port 9002
    ]).settings

The settings are one flat, frozen dataclass: its annotations are the types, its `Literal`s the
choices, and the metadata that `setting` attaches hold the group, the help text, the bounds and
further names of the flag. Files, environment, command line and printed TOML all follow from that
one place. Later sources override earlier ones. An unknown name is refused with the nearest known
one, a wrong value with the source it came from.

None as a default means "not set"; users cannot pass it. A field without `setting` metadata cannot
be set from outside at all (API keys, for instance).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from packhorse.errors import InputError

S = TypeVar("S")

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")
COMMENT_COLUMN = 32  # of help texts in printed TOML
# Names of the variables that Kubernetes sets for a Service, and for each port of it.
SERVICE_NAME = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?$"
)
SERVICE_PORT = re.compile(r"_PORT$")  # of these only values such as tcp://203.0.113.7:8080
TYPE_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    minimum: float = 0,
    maximum: float = math.inf,
    below: float = math.inf,
    flags: tuple[str, ...] = (),
    negative: str = "",
) -> Any:
    """A dataclass field that users can set.

    minimum, maximum and below bound numbers; `below` is exclusive. flags: further names on the
    command line, such as "-m", beside the one that follows from the field's name. negative: the
    flag that turns a switch off, for one that is neither on nor off if it is not set.
    """
    metadata = {
        "group": group,
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "below": below,
        "flags": flags,
        "negative": negative,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class SettingField:
    """One field of a settings dataclass, as `setting` described it."""

    name: str
    type: Any  # without None
    group: str
    help: str
    minimum: float
    maximum: float
    below: float
    flags: tuple[str, ...]
    negative: str

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def item_type(self) -> Any:
        """The type of one item of a list; None for a setting that is no list."""
        return get_args(self.type)[0] if get_origin(self.type) is tuple else None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values it can have; empty where that is not a closed set."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def expected(self) -> str:
        """What a value must be, for messages."""
        if self.choices:
            return f"it can be {', '.join(map(repr, self.choices))}"
        if self.item_type is not None:
            kinds = {float: "numbers", int: "whole numbers"}
            return f"it must be a list of {kinds.get(self.item_type, 'strings')}"
        return f"it must be {TYPE_NAMES[self.type]}{self._bounds()}"

    def _bounds(self) -> str:
        if self.type not in (int, float) or self.minimum == -math.inf:
            return ""
        bounds = f", {self.minimum:g} or more"
        if self.maximum < math.inf:
            bounds += f" and at most {self.maximum:g}"
        if self.below < math.inf:
            bounds += f" and below {self.below:g}"
        return bounds

    def in_bounds(self, value: Any) -> bool:
        """Does a value of the right type respect the bounds?"""
        if self.type not in (int, float):
            return True
        return math.isfinite(value) and self.minimum <= value <= self.maximum and value < self.below

    def convert(self, value: Any, source: str) -> Any:
        """A value from TOML, JSON or a flag as the setting's type; errors name the source."""
        if self.item_type is not None:
            items = value if isinstance(value, list | tuple) else [value]
            if all(_has_type(item, self.item_type) for item in items):
                return tuple(map(self.item_type, items))
        elif self.choices:
            if value in self.choices:
                return value
        elif _has_type(value, self.type) and self.in_bounds(value):
            return self.type(value)
        raise InputError(f"{source}: {self.name} is {value!r:.80}; {self.expected()}")

    def parse(self, text: str) -> Any:
        """The value that an environment variable's text stands for; lists have commas.

        Text that cannot be parsed is returned as it is, for `convert` to refuse.
        """
        if self.item_type is None:
            return _parse_scalar(text, self.type)
        items = [item.strip() for item in text.split(",")]
        return [_parse_scalar(item, self.item_type) for item in items if item]


def _has_type(value: Any, type_: type) -> bool:
    # `type`, not isinstance: True is no number here.
    if type_ is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is type_


def _parse_scalar(text: str, type_: Any) -> Any:
    if type_ is bool:
        word = text.strip().lower()
        if word in TRUE_WORDS:
            return True
        return False if word in FALSE_WORDS else text
    if type_ in (int, float):
        try:
            return type_(text)
        except ValueError:
            return text
    return text


@cache
def setting_fields(settings: type) -> dict[str, SettingField]:
    """The fields of a settings dataclass that users can set, by name, in order."""
    hints = get_type_hints(settings)
    return {
        item.name: SettingField(item.name, _without_none(hints[item.name]), **item.metadata)
        for item in fields(settings)
        if "group" in item.metadata
    }


def _without_none(hint: Any) -> Any:
    return get_args(hint)[0] if type(None) in get_args(hint) else hint


def check_bounds(settings: Any) -> None:
    """Refuse numbers out of bounds; for `__post_init__`, where no source is known."""
    for spec in setting_fields(type(settings)).values():
        value = getattr(settings, spec.name)
        if value is not None and not spec.in_bounds(value):
            raise InputError(f"{spec.name} is {value!r}; {spec.expected()}")


class SettingValue(NamedTuple):
    """A value for a setting, and where it came from."""

    name: str
    value: Any
    source: str  # a file, an environment variable or a flag, for messages
    is_text: bool = False  # `value` is the text of an environment variable, still to be parsed


def from_toml(file: Path) -> list[SettingValue]:
    """The settings in a TOML file."""
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not TOML: {error}") from error
    for name, value in values.items():
        if isinstance(value, dict):
            raise InputError(
                f"{file} has a section [{name}]; settings have no sections, write its keys without"
            )
    return from_mapping(values, str(file))


def from_mapping(values: Mapping[str, Any], source: str) -> list[SettingValue]:
    """Settings by name, all from one source."""
    return [SettingValue(name, value, source) for name, value in values.items()]


def from_environment(environment: Mapping[str, str], prefix: str) -> list[SettingValue]:
    """The settings in environment variables that begin with the prefix.

    Variables that Kubernetes sets for a Service (`service_variables`) are none of them.
    """
    ignored = service_variables(environment, prefix)
    return [
        SettingValue(variable.removeprefix(prefix).lower(), text, variable, is_text=True)
        for variable, text in environment.items()
        if variable.startswith(prefix) and variable not in ignored
    ]


def service_variables(environment: Mapping[str, str], prefix: str) -> list[str]:
    """The variables with this prefix that Kubernetes sets in every container for a Service.

    For a Service "packhorse-serve" those begin with PACKHORSE_SERVE_: one is PACKHORSE_SERVE_PORT
    with the value tcp://203.0.113.7:8080. No setting has a name or a value of that shape.
    """
    return [
        variable
        for variable, text in environment.items()
        if variable.startswith(prefix)
        and (SERVICE_NAME.search(variable) or (SERVICE_PORT.search(variable) and "://" in text))
    ]


def from_flags(flags: Mapping[str, Any]) -> list[SettingValue]:
    """The settings that were passed on the command line."""
    return [
        SettingValue(name, value, f"--{name.replace('_', '-')}") for name, value in flags.items()
    ]


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """Settings, and how they came about."""

    settings: S
    sources: dict[str, str]  # by name; a setting that is not here has its default
    notes: tuple[str, ...] = ()  # what a user should know about how a file was read


def resolve(
    settings: type[S], overrides: Iterable[SettingValue], notes: tuple[str, ...] = ()
) -> Resolved[S]:
    """The settings dataclass with these values over its defaults; later values win."""
    known = setting_fields(settings)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value, source, is_text in overrides:
        if name not in known:
            raise InputError(f"{source}: there is no setting {name!r}{did_you_mean(name, known)}")
        spec = known[name]
        values[name] = spec.convert(spec.parse(value) if is_text else value, source)
        sources[name] = source
    return Resolved(settings(**values), sources, notes)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, if any is near."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_toml(settings: Any) -> str:
    """The settings as a TOML file that `from_toml` reads back, with help texts as comments."""
    lines: list[str] = []
    group = None
    for spec in setting_fields(type(settings)).values():
        if spec.group != group:
            group = spec.group
            lines += ["", f"# {group}"]
        value = getattr(settings, spec.name)
        # TOML has no null, so what is not set appears as a comment.
        line = f"# {spec.name}" if value is None else f"{spec.name} = {_toml_value(value)}"
        lines.append(f"{line:<{COMMENT_COLUMN}}  # {spec.help}")
    return "\n".join(lines[1:]) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON's values are TOML's, but for one character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
