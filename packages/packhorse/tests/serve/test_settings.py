"""Where settings come from, what is refused, and that the page about limits names them all."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse.serve.keys import is_private
from packhorse.serve.settings import PREFIX, ServeSettings, resolve
from packhorse.settings import setting_fields

LIMITS = Path(__file__).resolve().parents[4] / "docs" / "limits.md"


def test_later_goes_before_earlier(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nhost = "localhost"\nmax_batch_inputs = 5\n')
    environment = {f"{PREFIX}PORT": "2", f"{PREFIX}MAX_BATCH_INPUTS": "6", "HOME": "/"}
    settings = resolve(file, environment, {"port": 3})
    assert (settings.port, settings.max_batch_inputs, settings.host) == (3, 6, "localhost")
    assert settings.max_body_bytes == ServeSettings().max_body_bytes


def test_kinds_of_the_environment() -> None:
    variables = {"INSECURE": "yes", "MODEL": "a=x, b", "IDLE_SECONDS": "1.5", "DTYPE": "bf16"}
    settings = resolve(None, {PREFIX + name: value for name, value in variables.items()})
    assert settings.insecure is True
    assert settings.model == ("a=x", "b")
    assert settings.idle_seconds == 1.5
    assert settings.dtype == "bf16"


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"model": ["a=x", 'say "\\né\x7f\n'], "cors_origin": ["https://a.org"], "dtype": "fp16"},
        {"engine": "ray", "replicas": 2, "batch_wait_ms": 1e-7, "idle_seconds": 1e17},
        {"graphs": True, "host": "0.0.0.0", "insecure": True, "ray_address": "", "port": 0},
    ],
)
def test_what_is_written_is_read_back(flags: dict, tmp_path: Path) -> None:
    environment = {"PACKHORSE_API_KEY": "sesame"}
    settings = resolve(None, environment, flags)
    (file := tmp_path / "serve.toml").write_text(settings.toml(), "utf-8")
    assert resolve(file, environment) == settings
    assert "sesame" not in settings.toml() and "keys" not in tomllib.loads(settings.toml())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_bodies": 1}, "max_body_bytes"),
        ({"port": "80"}, "a whole number"),
        ({"port": 70000}, "65535"),
        ({"port": -1}, "0 or more"),
        ({"max_batch_inputs": 0}, "1 or more"),
        ({"receive_seconds": float("nan")}, "or more"),
        ({"dtype": "int3"}, "'fp32'"),
        ({"model": []}, "no model"),
        ({"keys": ["a"]}, "no setting 'keys'"),
        ({"host": "0.0.0.0"}, "--insecure"),
    ],
)
def test_refused(flags: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(flags=flags)


@pytest.mark.parametrize("text", ["port = ", "[limits]\nport = 1\n", "port = true\n"])
def test_bad_files_are_refused(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "serve.toml").write_text(text)
    with pytest.raises(InputError, match=r"serve\.toml"):
        resolve(file)


def test_keys_come_from_environment_and_file(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("# rotated in May\nfirst\n\nsecond\n")
    file.chmod(0o600)
    settings = resolve(None, {"PACKHORSE_API_KEY": "third,first"}, {"api_key_file": str(file)})
    assert settings.keys == ("first", "second", "third")
    assert "first" not in repr(settings)


@pytest.mark.parametrize("text", ["", "# none\n", "two words\n", "naïve\n"])
def test_bad_keys_are_refused_and_not_told(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text(text)
    file.chmod(0o600)
    with pytest.raises(InputError, match="API key") as refused:
        resolve(flags={"api_key_file": str(file)})
    assert "words" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o660, 0o666, 0o610])
def test_a_key_file_that_others_may_use_is_refused(mode: int, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("sesame\n")
    file.chmod(mode)
    with pytest.raises(InputError, match=rf"\(mode {mode:o}\); chmod 600") as refused:
        resolve(flags={"api_key_file": str(file)})
    assert "sesame" not in str(refused.value)


ME, ROOT, ANOTHER = 1000, 0, 1001


@pytest.mark.parametrize(
    ("owner", "mode", "taken"),
    [
        (ME, 0o400, True),
        (ME, 0o600, True),
        (ME, 0o640, False),
        (ROOT, 0o440, True),
        (ROOT, 0o640, True),
        (ROOT, 0o444, False),
        (ROOT, 0o660, False),
        (ANOTHER, 0o600, False),
    ],
)
def test_whose_a_key_file_may_be(owner: int, mode: int, taken: bool) -> None:
    """The rule is PostgreSQL's for ssl_key_file."""
    assert is_private(owner, 0o100000 | mode, ME) is taken


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_local_addresses_need_no_key(host: str) -> None:
    assert resolve(flags={"host": host}).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.9", "example.org"])
def test_other_hosts_need_a_key_or_insecure(host: str) -> None:
    with pytest.raises(InputError, match="PACKHORSE_API_KEY"):
        resolve(flags={"host": host})
    assert resolve(flags={"host": host, "insecure": True}).insecure
    assert resolve(None, {"PACKHORSE_API_KEY": "k"}, {"host": host}).keys == ("k",)


def test_every_setting_is_documented() -> None:
    text = LIMITS.read_text("utf-8")
    for name in setting_fields(ServeSettings):
        begin = f"| `--{name.replace('_', '-')}` | `{PREFIX}{name.upper()}` |"
        assert begin in text, f"{name} has no line in docs/limits.md"


def test_the_documented_defaults_are_true() -> None:
    rows = {}
    for row in LIMITS.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if cells[0].startswith("`--"):
            rows[cells[0].strip("`").removeprefix("--").replace("-", "_")] = cells[2]
    for setting in fields(ServeSettings):
        is_number = isinstance(setting.default, int | float)
        if setting.metadata and is_number and not isinstance(setting.default, bool):
            assert float(rows[setting.name].replace(",", "")) == setting.default, setting.name
