"""A file that is killed at every possible moment and comes out the same, byte for byte.

The kill is an exception that no one catches, raised at the n-th call that changes the disk, for
every n there is. `tests/cli/test_run.py` does the same to a real process with a real signal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from packhorse.data.output import ResumableFile
from packhorse.errors import InputError

ROWS = 7
CHUNK = 3
VECTORS = {"vector": ["float32"]}
FORMATS = [".npy", ".jsonl", ".parquet"]
MADE = {"model": "m", "chunk": CHUNK}


def rows(ids: Callable[[int], int | str] = int, seed: int = 0) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    return [
        {"id": ids(i), "vector": generator.normal(size=4).astype(np.float32)} for i in range(ROWS)
    ]


def work(path: Path, everything: list[dict[str, Any]], **options: Any) -> None:
    """What a command does: go on where it was left, chunk by chunk, and finish."""
    file = ResumableFile(path, VECTORS, MADE, **options)
    try:
        for start in range(file.consumed, len(everything), CHUNK):
            chunk = everything[start : start + CHUNK]
            file.append(chunk, start + len(chunk))
        file.finish()
    except BaseException:
        for item in file._files:  # a dead process closes its files, and no more
            item.close()
        raise


class Killed(BaseException):
    pass


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Let the n-th call from now on that touches the disk be the last."""
    remaining = [10**9]

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] < 0:
                raise Killed
            return real(*arguments, **more)

        return call

    for owner, names in {
        os: ("fsync",),
        Path: ("replace", "unlink", "touch", "write_text", "open"),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, deadly(getattr(owner, name)))
    yield lambda n: remaining.__setitem__(0, n)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("ids", [int, lambda i: i + 10, lambda i: f"row {i}"])
def test_killed_anywhere(
    suffix: str, ids: Callable[[int], int | str], tmp_path: Path, kill_at: Callable[[int], None]
) -> None:
    everything = rows(ids)
    (whole := tmp_path / "whole").mkdir()
    work(whole / f"a{suffix}", everything)
    expected = contents(whole)
    for moment in range(1000):
        (folder := tmp_path / str(moment)).mkdir()
        path = folder / f"a{suffix}"
        try:
            kill_at(moment)
            work(path, everything)
        except Killed:
            kill_at(10**9)
            if not path.exists():
                _tear(folder)
                work(path, everything)
            got = {name: data for name, data in contents(folder).items() if "partial" not in name}
            assert got == expected, f"killed at call {moment}"
        else:
            assert moment > 20, "the kills never came"
            return
    pytest.fail("it never finished")


def _tear(folder: Path) -> None:
    """Half a chunk that no one vouched for, as a kill in the middle of a write leaves it."""
    for partial in folder.glob("*.partial"):
        with partial.open("ab") as file:
            file.write(b"\x00torn")


def test_what_is_not_vouched_for_would_be_wrong(tmp_path: Path) -> None:
    """The control: were the torn end not cut off, it would be in the file."""
    path = tmp_path / "a.jsonl"
    file = ResumableFile(path, VECTORS, MADE)
    file.append(rows()[:CHUNK], CHUNK)
    file.close()
    _tear(tmp_path)
    state = json.loads((tmp_path / "a.jsonl.partial.json").read_text())
    state["sizes"] = [(tmp_path / "a.jsonl.partial").stat().st_size]
    (tmp_path / "a.jsonl.partial.json").write_text(json.dumps(state))
    work(path, rows())
    with pytest.raises(ValueError):
        [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stale", [False, True])
def test_killed_while_replacing(
    stale: bool, tmp_path: Path, kill_at: Callable[[int], None]
) -> None:
    """An old file stays until the new one is there; never old vectors beside new ids.

    stale: the old one was itself killed after it had its name, before its state was removed.
    """
    path, companion = tmp_path / "a.npy", tmp_path / "a.npy.ids.jsonl"
    work(path, rows(lambda i: f"old {i}"))
    old, new = contents(tmp_path), rows(lambda i: f"new {i}", seed=1)
    work(path, new, overwrite=True)
    expected = contents(tmp_path)
    if stale:
        remaining = {"made_by": MADE, "rows": ROWS, "consumed": ROWS, "numbered": False}
        remaining |= {"head": 128, "sizes": [len(data) for data in old.values()]}
        old["a.npy.partial.json"] = json.dumps(remaining).encode()
    for moment in range(1000):
        for name, data in old.items():
            (tmp_path / name).write_bytes(data)
        try:
            kill_at(moment)
            work(path, new, overwrite=True)
        except Killed:
            kill_at(10**9)
            if path.exists():
                assert path.read_bytes() in (old["a.npy"], expected["a.npy"])
                assert ("old" in companion.read_text()) == (path.read_bytes() == old["a.npy"])
            work(path, new, overwrite=True)
            assert contents(tmp_path) == expected
        else:
            return


@pytest.mark.parametrize("suffix", FORMATS)
def test_values_come_back(suffix: str, tmp_path: Path) -> None:
    everything, path = rows(lambda i: f"é{i}"), tmp_path / f"a{suffix}"
    work(path, everything)
    if suffix == ".npy":
        vectors = list(np.load(path))
        ids = [json.loads(line) for line in Path(f"{path}.ids.jsonl").read_text().splitlines()]
    else:
        lines = (
            parquet.read_table(path).to_pylist()
            if suffix == ".parquet"
            else [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        )
        vectors, ids = [row["vector"] for row in lines], [row["id"] for row in lines]
    assert ids == [row["id"] for row in everything]
    assert np.array_equal(
        np.array(vectors, np.float32), np.stack([r["vector"] for r in everything])
    )


def test_row_numbers_need_no_ids_beside(tmp_path: Path) -> None:
    work(tmp_path / "a.npy", rows())
    assert list(contents(tmp_path)) == ["a.npy"]
    work(tmp_path / "a.npy", rows(lambda i: i + 1), overwrite=True)
    assert sorted(contents(tmp_path)) == ["a.npy", "a.npy.ids.jsonl"]
    work(tmp_path / "a.npy", rows(), overwrite=True)
    assert list(contents(tmp_path)) == ["a.npy"], "ids of a file that is gone"


def begun(path: Path) -> Path:
    file = ResumableFile(path, VECTORS, MADE)
    file.append(rows()[:CHUNK], CHUNK)
    file.close()
    return path


def test_work_of_another_making_is_not_continued(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.npy")
    with pytest.raises(InputError, match=r"another model \('m', now 'n'\); pass --overwrite"):
        ResumableFile(path, VECTORS, {**MADE, "model": "n"})
    with pytest.raises(InputError, match="another prompt"):
        ResumableFile(path, VECTORS, {**MADE, "prompt": "p"})
    file = ResumableFile(path, VECTORS, MADE)
    assert file.consumed == CHUNK, "refusing does no harm"
    file.close()


def test_overwrite_begins_again(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.npy")
    file = ResumableFile(path, VECTORS, {**MADE, "model": "n"}, overwrite=True)
    assert file.consumed == file.rows == 0
    file.close()
    assert contents(tmp_path) == {}, "nothing was done, nothing is left"


@pytest.mark.parametrize("damage", ["{", "[]", '{"rows": 3}'])
def test_a_damaged_state(damage: str, tmp_path: Path) -> None:
    path = begun(tmp_path / "a.npy")
    Path(f"{path}.partial.json").write_text(damage)
    with pytest.raises(InputError, match="is damaged; pass --overwrite"):
        ResumableFile(path, VECTORS, MADE)
    work(path, rows(), overwrite=True)
    assert np.load(path).shape == (ROWS, 4)


def test_a_partial_file_that_lost_rows(tmp_path: Path) -> None:
    path = begun(tmp_path / "a.npy")
    os.truncate(f"{path}.partial", 100)
    with pytest.raises(InputError, match="shorter than it was left"):
        ResumableFile(path, VECTORS, MADE)


def test_a_whole_file_is_in_the_way(tmp_path: Path) -> None:
    work(tmp_path / "a.npy", rows())
    with pytest.raises(InputError, match="exists already; pass --overwrite"):
        ResumableFile(tmp_path / "a.npy", VECTORS, MADE)
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        ResumableFile(tmp_path / "folder.npy", VECTORS, MADE, overwrite=True)


def test_two_at_once(tmp_path: Path) -> None:
    file = ResumableFile(tmp_path / "a.npy", VECTORS, MADE)
    file.append(rows()[:CHUNK], CHUNK)
    with pytest.raises(InputError, match="being written by another process"):
        ResumableFile(tmp_path / "a.npy", VECTORS, MADE, overwrite=True)
    file.append(rows()[CHUNK:], ROWS)
    file.finish()
    assert np.load(tmp_path / "a.npy").shape == (ROWS, 4)


def test_what_the_disk_refuses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: No such file"):
        ResumableFile(tmp_path / "no" / "a.npy", VECTORS, MADE)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_without_rows(suffix: str, tmp_path: Path, kill_at: Callable[[int], None]) -> None:
    """It is there, of the right kind, wherever it was killed on the way."""
    for moment in range(1000):
        (folder := tmp_path / str(moment)).mkdir()
        path = folder / f"a{suffix}"
        try:
            kill_at(moment)
            work(path, [], metadata={"dimensions": 4})
        except Killed:
            kill_at(10**9)
            if not path.exists():
                work(path, [], metadata={"dimensions": 4})
        else:
            assert moment > 10, "the kills never came"
            break
        if suffix == ".npy":
            assert np.load(path).shape == (0, 4) and np.load(path).dtype == np.float32
        elif suffix == ".jsonl":
            assert path.read_bytes() == b""
        else:
            table = parquet.read_table(path)
            assert (len(table), table.column_names) == (0, ["id", "vector"])


def test_parquet_ids_are_of_one_kind(tmp_path: Path) -> None:
    mixed = rows(lambda i: i if i < CHUNK else f"row {i}")
    with pytest.raises(InputError, match=r"'row 3' is not a whole number.*write \.jsonl"):
        work(tmp_path / "a.parquet", mixed)
    second = rows(lambda i: f"row {i}" if i < CHUNK else i)
    work(tmp_path / "b.parquet", second)
    assert parquet.read_table(tmp_path / "b.parquet")["id"].to_pylist()[CHUNK:] == list("3456")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_of_the_name_used_for_rewriting_is_not_taken_for_the_rows(
    suffix: str, tmp_path: Path
) -> None:
    clean, crowded = tmp_path / f"clean{suffix}", tmp_path / f"crowded{suffix}"
    Path(f"{crowded}.whole").write_text("left by somebody else")
    work(clean, rows())
    work(crowded, rows())
    assert crowded.read_bytes() == clean.read_bytes()
