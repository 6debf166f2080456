"""JSON arrays are read as `json` and `datasets` read them, in any pieces, without a byte moved."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from packhorse.data.sources.chunking import chunks
from packhorse.data.sources.documents import Document, read
from packhorse.data.sources.files import find
from packhorse.data.sources.json_array import as_lines

pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

VALUES = [
    {"text": 'A "quoted" word, a \\ and [brackets], {braces}.', "tags": ["a,b", {"c": [1, 2]}]},
    {"text": 'Line\nend and \\\\" more', "n": None},
    "a bare string, with a comma",
    {"text": "Ünïcödé 漢字 \u2028 end"},
    {},
]
FORMS = {
    "compact": json.dumps(VALUES, separators=(",", ":")),
    "indented": json.dumps(VALUES, indent=2),
    "windows": json.dumps(VALUES, indent=1).replace("\n", "\r\n"),
    "unescaped": json.dumps(VALUES, ensure_ascii=False),
}


def lines_of(data: bytes, size: int) -> tuple[bytes, list[str]]:
    pieces = [(data[i : i + size], "") for i in range(0, len(data), size)]
    outcome = list(as_lines(iter(pieces)))
    return b"".join(text for text, _ in outcome), [problem for _, problem in outcome if problem]


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("form", FORMS)
def test_each_line_is_an_element_at_its_place(form: str, size: int) -> None:
    data = FORMS[form].encode()
    text, problems = lines_of(data, size)
    assert [json.loads(line) for line in text.split(b"\n") if line.strip()] == VALUES
    assert not problems and len(text) == len(data)
    assert all(a == b or b in b"\n " for a, b in zip(data, text, strict=True))


def test_random_values_in_random_pieces() -> None:
    rng = random.Random(0)
    marks = ['"', "\\", "[", "]", "{", "}", ",", "\n", "a", " "]
    for _ in range(200):
        values = [
            {"".join(rng.choices(marks, k=3)): ["".join(rng.choices(marks, k=rng.randrange(9)))]}
            for _ in range(rng.randrange(6))
        ]
        data = json.dumps(values, indent=rng.choice([None, 1])).encode()
        text, problems = lines_of(data, rng.randrange(1, 9))
        assert [json.loads(line) for line in text.split(b"\n") if line.strip()] == values
        assert not problems


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_an_array_that_is_cut_or_followed_by_more(size: int) -> None:
    data = b'[{"text": "One."}, {"text": "Two."}'
    assert lines_of(data, size)[1] == ["the JSON array is cut: it has no closing bracket"]
    for behind in (b" x", b"[1]"):
        text, problems = lines_of(data + b"]" + behind, size)
        assert "behind the JSON array" in problems[0]
        assert text.count(b"\n") == 1
    assert lines_of(data + b"]  \n ", size)[1] == []


@pytest.mark.parametrize("size", [1, 300, 1 << 22])
def test_a_file_gives_the_rows_of_datasets(tmp_path: Path, size: int) -> None:
    datasets = pytest.importorskip("datasets", reason="no datasets: pip install 'packhorse[hf]'")
    rows = [{"id": i, "text": f'Row {i} has a "text", of [{i}] words.'} for i in range(100)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, indent=1))
    loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"))
    documents: list[Document] = []
    for chunk in chunks(find([path]), size):
        more, tally = read(chunk)
        documents += more
        assert not tally.bad
    assert [" ".join(doc.sentences) for doc in documents] == loaded["train"]["text"]


def test_a_bad_element_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(
        b'[{"text": "One."},\n {"text": nothing},\n {"text": "Three \xff."}, {"text": "Four."}]'
    )
    (chunk,) = chunks(find([path]))
    documents, tally = read(chunk)
    assert [document.sentences for document in documents] == [["One."], ["Four."]]
    assert "byte 18: not JSON" in f"{tally.bad[0].place}: {tally.bad[0].reason}"
    assert "not UTF-8" in tally.bad[1].reason
