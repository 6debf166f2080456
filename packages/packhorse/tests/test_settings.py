"""The resolver of settings: where a value came from, which source wins, and what is refused."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from packhorse.errors import InputError
from packhorse.settings import (
    check_bounds,
    from_environment,
    from_flags,
    from_mapping,
    from_toml,
    resolve,
    setting,
    setting_fields,
    to_toml,
)


@dataclass(frozen=True, slots=True)
class Daemon:
    """Every type that a setting can have."""

    name: str = setting("d", "General", "Name of the daemon.", flags=("-n",))
    port: int = setting(80, "Network", "Port.", maximum=65535)
    rate: float = setting(0.5, "Network", "Share of requests.", below=1)
    offset: float = setting(0.0, "Network", "May be negative.", minimum=-float("inf"))
    hosts: tuple[str, ...] = setting((), "Network", "Host names.")
    scale: tuple[float, ...] = setting((), "Network", "Two numbers.")
    level: Literal["low", "high"] | None = setting(None, "Logs", "Level.")
    quiet: bool | None = setting(None, "Logs", "No logs.")
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_bounds(self)


def test_the_last_source_wins_and_is_known(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text('name = "a"\nport = 1\nrate = 0\n')
    resolved = resolve(
        Daemon,
        [
            *from_toml(file),
            *from_environment({"DAEMON_PORT": "2", "DAEMON_RATE": "0.25", "HOME": "/"}, "DAEMON_"),
            *from_flags({"rate": 0.75}),
        ],
    )
    assert resolved.settings == Daemon(name="a", port=2, rate=0.75)
    assert resolved.sources == {"name": str(file), "port": "DAEMON_PORT", "rate": "--rate"}


def test_the_environment_has_every_type() -> None:
    variables = {"NAME": " x", "PORT": "7", "RATE": "1e-3", "OFFSET": "-1", "HOSTS": "a, b,"}
    variables |= {"SCALE": "0,5", "LEVEL": "high", "QUIET": "Off"}
    settings = resolve(Daemon, from_environment(variables, "")).settings
    assert settings == Daemon(" x", 7, 1e-3, -1.0, ("a", "b"), (0.0, 5.0), "high", False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prot": 1}, "there is no setting 'prot'; did you mean 'port'?"),
        ({"secret": "x"}, "there is no setting 'secret'"),
        ({"port": True}, "port is True; it must be a whole number, 0 or more and at most 65535"),
        ({"port": 65536}, "port is 65536; it must be a whole number"),
        ({"rate": 1.0}, "rate is 1.0; it must be a number, 0 or more and below 1"),
        ({"rate": float("nan")}, "rate is nan; it must be a number"),
        ({"offset": float("inf")}, "offset is inf; it must be a number"),
        ({"hosts": [1]}, r"hosts is \[1\]; it must be a list of strings"),
        ({"scale": "ab"}, "scale is 'ab'; it must be a list of numbers"),
        ({"level": "medium"}, "level is 'medium'; it can be 'low', 'high'"),
        ({"quiet": 1}, "quiet is 1; it must be true or false"),
        ({"name": None}, "name is None; it must be a string"),
    ],
)
def test_what_is_wrong_is_named_with_its_source(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^the file: {message}"):
        resolve(Daemon, from_mapping(values, "the file"))


def test_bounds_hold_without_a_source_too() -> None:
    with pytest.raises(InputError, match=r"^port is -1; it must be a whole number, 0 or more"):
        Daemon(port=-1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("port = = 1", "is not TOML"), ("[network]\nport = 1", r"has a section \[network\]")],
)
def test_a_file_that_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=rf"daemon\.toml {message}"):
        from_toml(file)
    with pytest.raises(InputError, match="cannot be read"):
        from_toml(tmp_path / "nowhere.toml")


def test_printed_settings_are_read_back(tmp_path: Path) -> None:
    settings = Daemon('a "b" \\ \n\x7fé', 1, 1e-20, hosts=("x", "y"), scale=(0.0, 5.0), secret="s")
    file = tmp_path / "daemon.toml"
    file.write_text(to_toml(settings), "utf-8")
    assert tomllib.loads(to_toml(settings)).keys() == setting_fields(Daemon).keys() - {
        "level",
        "quiet",
    }
    assert "\n# level  " in to_toml(settings) and "# Host names." in to_toml(settings)
    read_back = resolve(Daemon, from_toml(file)).settings
    assert read_back == Daemon(settings.name, 1, 1e-20, hosts=("x", "y"), scale=(0.0, 5.0))
