"""Said once, with the script's line, kept for the summary."""

from __future__ import annotations

import logging
import threading

import pytest

from packhorse_port import notices


@pytest.fixture(autouse=True)
def fresh() -> None:
    notices.reset()


def test_once_per_key(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        notices.log_once("a", "a has no effect")
        notices.log_once("b", "b has none either")
    assert [(item.key, item.text) for item in notices.logged()] == [
        ("a", "a has no effect"),
        ("b", "b has none either"),
    ]
    assert len(caplog.records) == 2
    assert caplog.records[0].getMessage().endswith(": a has no effect")
    notices.reset()
    notices.log_once("a", "a has no effect")
    assert len(caplog.records) == 3


def test_a_notice_below_the_log_level_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        notices.log_once("a", "a detail", level=logging.INFO)
    assert not caplog.records and notices.logged()


def test_the_line_is_the_scripts(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n\nimport torch\nnotices.log_once('k', 'text')\n")
    exec(compile(script.read_text(), str(script), "exec"), {"notices": notices, "__name__": "x"})
    assert notices.logged()[0].line == "train.py:4"


def test_a_notice_of_many_threads_is_logged_once() -> None:
    threads = [
        threading.Thread(target=notices.log_once, args=("same", f"text {i}")) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(notices.logged()) == 1
