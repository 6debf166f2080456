"""`packhorse port`: what it lists, what it writes, and whose flags are whose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packhorse_port.command import prepare_tokens

GOOD = "import poptorch\n\nopts = poptorch.Options()\nopts.syncPattern(poptorch.SyncPattern.Full)\n"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in this file may run a script: it would take this process over."""

    def refuse(path: str, command: list[str], environment: dict[str, str]) -> None:
        raise AssertionError(f"would become {command}")

    monkeypatch.setattr(os, "execve", refuse)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(GOOD)
    return path


def test_check_lists_every_line(cli, script: Path) -> None:
    result = cli("port", "--check", script, "--json")
    assert result.code == 0 and result.document["runs"] and result.document["script"] == str(script)
    assert result.document["counts"] == {"as is": 0, "emulated": 3, "ignored": 1, "fails": 0}
    ignored = next(item for item in result.document["findings"] if item["kind"] == "ignored")
    assert ignored["line"] == 4 and ignored["source"].startswith("opts.syncPattern")
    assert "one device waits for no other" in result.out and "0 fails" in result.err


def test_check_ends_with_1_where_something_will_fail(cli, script: Path) -> None:
    script.write_text(GOOD + "opts.deviceIteration(2)\n")
    result = cli("port", "--check", script)
    assert result.code == 1
    assert "the nearest is Options.deviceIterations" in result.out
    assert result.err.splitlines()[-1] == f"packhorse: {script}: 1 thing will fail"


def test_patch_writes_and_tells_what_is_left(cli, script: Path, tmp_path: Path) -> None:
    script.write_text(GOOD + "y = poptorch.custom_op([x], 'Cube', 'c', 1)\n")
    out = tmp_path / "plain.py"
    result = cli("port", "--patch", out, script, "--json")
    assert result.code == 0 and f"written: {out}" in result.err
    assert [remaining["line"] for remaining in result.document["left"]] == [5]
    assert f"{script}:5: not translated" in result.err
    assert out.read_text().splitlines()[-1].startswith("y = ") and "Options" not in out.read_text()


def test_patch_replaces_a_file_only_where_asked(cli, script: Path, tmp_path: Path) -> None:
    out, link = tmp_path / "plain.py", tmp_path / "link.py"
    out.write_text("mine")
    refused = cli("port", "--patch", out, script)
    assert refused.code == 2 and out.read_text() == "mine"
    message = f"{out} is there already; choose another name, or pass --overwrite"
    assert refused.err.splitlines() == [f"packhorse: {message}"]
    assert cli("port", "--patch", out, script, "--overwrite").code == 0
    assert "mine" not in out.read_text()
    link.symlink_to(script)
    for same in (script, link):
        for requested in ([], ["--overwrite"]):
            refused = cli("port", "--patch", same, script, *requested)
            assert refused.code == 2 and "would overwrite the script" in refused.err
    assert script.read_text() == GOOD


def test_check_and_patch_know_the_version(cli, script: Path, tmp_path: Path) -> None:
    script.write_text("import poptorch\nprint(poptorch.__version__)\n")
    result = cli("port", "--check", "--patch", tmp_path / "plain.py", script, "--json")
    assert result.code == 0 and result.document["left"] == []
    assert (tmp_path / "plain.py").read_text() == 'print("3.3.0")\n'


def test_wrong_use_is_one_line(cli, script: Path, tmp_path: Path) -> None:
    for words, part in (
        (["--check", tmp_path / "none.py"], "cannot be read"),
        (["--check", script, "three"], "leave out three"),
        (["--check", script, "--epochs", "3"], "--epochs"),
        (["--nope", script], "--nope"),
        (["--overwrite", script], "for --patch only"),
        ([], "SCRIPT"),
    ):
        result = cli("port", *words)
        assert result.code == 2 and part in result.err and len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        ("port a.py --json", "port -- a.py --json"),
        ("port --quiet a.py --check", "port --quiet -- a.py --check"),
        ("port - -x", "port -- - -x"),
        ("port --check a.py --json", "port --check a.py --json"),
        ("port --patch b.py a.py --json", "port --patch b.py a.py --json"),
        ("port --json --patch=b.py a.py", "port --json --patch=b.py a.py"),
        ("port -- a.py -x", "port -- a.py -x"),
        ("port --help", "port --help"),
    ],
)
def test_what_follows_the_script_is_the_scripts(words: str, whose: str) -> None:
    assert prepare_tokens(words.split()) == whose.split()
