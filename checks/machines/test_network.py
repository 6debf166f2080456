"""With a model that is there, no command opens a socket to the outside.

Run by each lane of `make test-machines`; the lane `network` has none to open one to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.checkpoint.hub import PATTERNS, _remember
from packhorse.reports import random_model

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        "PACKHORSE_TEST_LANE" not in os.environ, reason="make test-machines runs it"
    ),
]
ALONE = ("--beside", "none")
CLEANING = ("--documents", "lines", "--dedup", "near", "--report-languages")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Every address that Python is asked to look up or to connect to, unless it is this machine's own.
PROGRAM = """
import json, sys
outside = []

def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
    elif event == "socket.getaddrinfo":
        address = arguments[:2]
    else:
        return
    host = address[0] if isinstance(address, tuple) else ""
    if host not in ("", None, "localhost", "127.0.0.1", "::1"):
        outside.append([event, str(address)])

sys.addaudithook(watch)
from packhorse.cli import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print()
print(json.dumps({"codes": codes, "outside": outside}))
"""


def run(*commands: tuple[object, ...], **environment: str) -> dict:
    words = json.dumps([[str(word) for word in command] for command in commands])
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1]) | {"stderr": completed.stderr}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HF_HOME that holds one model, as huggingface_hub lays it out."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    random_model.write("tiny", repository / "snapshots" / COMMIT)
    return home


def test_no_command_opens_a_socket_to_the_outside(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("py3langid", reason="no py3langid: pip install 'packhorse[clean]'")
    cache = tmp_path / "cache"
    monkeypatch.setenv("PACKHORSE_CACHE", str(cache))
    snapshot = hub / "hub" / "models--someone--tiny" / "snapshots" / COMMIT
    _remember(snapshot, PATTERNS)  # as after it was fetched: tests/checkpoint/test_hub.py
    texts = tmp_path / "texts.txt"
    texts.write_text("w1 w2 w3\nw4\n" * 20)
    many = tmp_path / "many.txt"
    many.write_text("".join(f"w{n} w{n + 1} w{n + 2}\n" for n in range(30)))
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("score\tsentence1\tsentence2\n" + "1.5\tw1 w2\tw3\n4.0\tw4\tw4 w5\n" * 9)
    result = run(
        ("run", "w1 w2", "--model", "someone/tiny", "--json"),
        ("inspect", "someone/tiny"),
        ("convert", "someone/tiny", tmp_path / "tf1", "--to", "tf1"),
        ("waste", texts, "--model", "someone/tiny"),
        ("verify", "someone/tiny", "someone/tiny"),
        ("prove", "someone/tiny", "--dtype", "fp32", "--kernel", "reference", "--packs", "1"),
        ("quantize", "someone/tiny", tmp_path / "int8", "--calibrate", many, "--allow-loss"),
        ("data", "build", texts, tmp_path / "corpus", "--tokenizer", "someone/tiny"),
        ("data", "build", texts, tmp_path / "other", "--tokenizer", "someone/tiny", *CLEANING),
        ("evaluate", "--task", "sts", "--model", "someone/tiny", "--input", pairs, *ALONE),
        ("monitor", "--json"),
        ("doctor",),
        HF_HOME=str(hub),
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT="http://192.0.2.1:9",
        PACKHORSE_CACHE=str(cache),
    )
    assert result["codes"] == [0] * 12, result["stderr"]
    assert result["outside"] == []


def test_the_watch_sees_what_goes_out(tmp_path: Path) -> None:
    """The control: a model that is not there is asked for, at an address that answers nothing."""
    result = run(
        ("run", "w1 w2", "--model", "someone/tiny"),
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT="http://192.0.2.1:9",
        HF_HUB_ETAG_TIMEOUT="1",
        HF_HUB_DOWNLOAD_TIMEOUT="1",
    )
    assert result["codes"] == [2]
    assert any("192.0.2.1" in address for _, address in result["outside"])
