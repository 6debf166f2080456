"""Lines of API keys, and reading them again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse.serve.keys import ApiKey, KeyReloader, api_keys, find_key, parse_keys


def write(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def describe(keys: tuple[ApiKey, ...]) -> list[tuple[str, bool]]:
    return [(key.name, key.bulk) for key in keys]


def test_lines_of_all_kinds(tmp_path: Path) -> None:
    text = (
        "# ours\nplain\nsearch: s3cret\n  nightly:\t77c0   bulk\nsearch: newer interactive\na:b\n"
    )
    keys = parse_keys(api_keys(str(write(tmp_path / "keys", text)), "web: w, last"))
    names = ["key1", "search", "nightly", "search", "key5", "web", "key7"]
    assert describe(keys) == [(name, name == "nightly") for name in names]
    for secret, name in [("s3cret", "search"), ("newer", "search"), ("a:b", "key5"), ("w", "web")]:
        key = find_key(keys, secret.encode())
        assert key is not None and key.name == name
    for wrong in (b"", b"search", b"b", b"s3cret ", b"77c0 bulk", b"search: s3cret"):
        assert find_key(keys, wrong) is None
    assert not any("s3cret" in repr(key) for key in keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two words", "API key 1 has blanks"),
        ("good\nname: key slow", "API key 2 has blanks"),
        ("name: key bulk more", "API key 1 has blanks"),
        ("search:", "API key 1 is a name without a key"),
        ("good\nsearch: ", "API key 2 is a name without a key"),
        ("na/me: s3cret", "name of API key 1"),
        ("key3: s3cret", "name of API key 1"),
        ("none: s3cret", "name of API key 1"),
        ("a: s3cret\nb: s3cret", "API key 2 is listed before"),
        ("a: s3cret\na: s3cret bulk", "API key 2 is listed before"),
        ("a: s3cret\na: other bulk", "API key 2 has the name"),
        ("naïve: schlüssel", "name of API key 1"),
        ("name: schlüssel", "API key 1 cannot be sent"),
    ],
)
def test_lines_that_make_no_sense(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as refused:
        api_keys(str(write(tmp_path / "keys", text)), "")
    assert "s3cret" not in str(refused.value)


def test_a_signal_has_the_file_read_again(tmp_path: Path, caplog) -> None:
    file = write(tmp_path / "keys", "a: first\n")
    used: list[tuple[str, ...]] = []
    reloader = KeyReloader(str(file), ("c: kept",), used.append)
    before = signal.getsignal(signal.SIGHUP)

    async def signals() -> None:
        loop = asyncio.get_running_loop()
        reloader.listen(loop)
        assert used == [("a: early", "c: kept")], "the signal came before there was a loop"
        for text, mode in [("b: second\n", 0o600), ("", 0o600), ("c d\n", 0o600), ("e\n", 0o644)]:
            write(file, text, mode)
            reads = len(caplog.records)
            os.kill(os.getpid(), signal.SIGHUP)
            while len(caplog.records) == reads:
                await asyncio.sleep(0.001)
        loop.remove_signal_handler(signal.SIGHUP)

    try:
        with caplog.at_level(logging.INFO, "packhorse.serve.keys"):
            reloader.wait()
            write(file, "a: early\n")
            os.kill(os.getpid(), signal.SIGHUP)
            asyncio.run(signals())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert used[1:] == [("b: second", "c: kept")], "what cannot be used changes nothing"
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "INFO", "ERROR", "ERROR", "ERROR"]
    assert all("second" not in record.getMessage() for record in caplog.records)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_without_a_file_the_signal_keeps_its_meaning() -> None:
    before = signal.getsignal(signal.SIGHUP)
    KeyReloader("", ("kept",)).wait()
    assert signal.getsignal(signal.SIGHUP) is before
