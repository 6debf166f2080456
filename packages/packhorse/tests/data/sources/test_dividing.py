"""What a document of plain text is: by an option, or guessed; bytes that are no UTF-8."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from packhorse.data.sources.chunking import chunks
from packhorse.data.sources.documents import ReadTally, read
from packhorse.data.sources.files import HEADER_BYTES, describe_guess, find
from packhorse.errors import InputError

pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

PARAGRAPHS = [f"Paragraph {i} has one line.\nAnd another one." for i in range(40)]
TEXT = "\n\n".join(PARAGRAPHS) + "\n"


def texts_of(path: Path, size: int = 1 << 22, **options: str | bool) -> tuple[list[str], ReadTally]:
    texts: list[str] = []
    total = ReadTally()
    for chunk in chunks(find([path], **options), size):  # pyright: ignore[reportArgumentType]
        documents, tally = read(chunk)
        texts += [" ".join(document.sentences) for document in documents]
        total += tally
    return texts, total


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("size", [1, 100, 1 << 22])
def test_documents_end_where_they_are_said_to(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    paragraphs = [flat(paragraph) for paragraph in PARAGRAPHS]
    assert texts_of(tmp_path / "a.txt", size, documents="blank-lines")[0] == paragraphs
    lines = [line for line in TEXT.split("\n") if line]
    assert texts_of(tmp_path / "a.txt", size, documents="lines")[0] == lines
    (tmp_path / "b.txt").write_text("<|end|>".join(PARAGRAPHS))
    assert texts_of(tmp_path / "b.txt", size, separator="<|end|>")[0] == paragraphs
    (tmp_path / "c.txt").write_text("\r\n \t\r\n\r\n".join(PARAGRAPHS))
    assert texts_of(tmp_path / "c.txt", size, documents="blank-lines")[0] == paragraphs


def test_a_file_is_a_document_if_it_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" = Title = \n\n" + TEXT)
    assert len(texts_of(tmp_path / "a.txt", documents="file")[0]) == 1


LONG = "A line of some length. " * 40
GUESSES = {
    "file": ("short.txt", TEXT, "at most 1 MiB"),
    "titles": ("wiki.txt", " = One = \n\nText.\n\n = Two = \n\nText.\n", "titles"),
    "blank-lines": ("long.txt", "\n\n".join([LONG] * (HEADER_BYTES // 800)), "with blank lines"),
    "lines": ("rows.txt", "\n".join([LONG] * (HEADER_BYTES // 800)), "without blank lines"),
    "<|endoftext|>": ("gpt.txt", "One.<|endoftext|>Two.", "end at <|endoftext|>"),
}


@pytest.mark.parametrize("guess", GUESSES)
def test_what_is_not_said_is_guessed_and_told(tmp_path: Path, guess: str) -> None:
    name, text, told = GUESSES[guess]
    (tmp_path / name).write_text(text)
    (source,) = find([tmp_path / name])
    assert (source.documents or source.separator) == guess
    assert told in describe_guess(source) and "guessed" in describe_guess(source)
    (said,) = find([tmp_path / name], documents="lines")
    assert said.documents == "lines" and not describe_guess(said)


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="pass one of them"):
        find([tmp_path / "a.txt"], documents="lines", separator="x")
    with pytest.raises(InputError, match="separator is empty"):
        find([tmp_path / "a.txt"], separator="")
    with pytest.raises(InputError, match="use one of file, titles"):
        find([tmp_path / "a.txt"], documents="paragraphs")
    with pytest.raises(InputError, match="and there is none"):
        find([tmp_path / "a.jsonl"], documents="lines")


# Bytes that are no UTF-8 -------------------------------------------------------------------------

BAD = b"caf\xe9 and more."


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "part-0", "wiki_00", "a.xml"])
def test_a_bad_byte_costs_its_document_or_is_repaired(tmp_path: Path, name: str) -> None:
    """Repaired as Python does: each bad sequence becomes U+FFFD."""
    forms = {
        "a.txt": (b"%s", b"\n", b"", b""),
        "a.jsonl": (b'{"text": "%s"}', b"\n", b"", b""),
        "a.json": (b'{"text": "%s"}', b",", b"[", b"]"),
        "part-0": (b"%s", b"\n\n", b"", b""),
        "wiki_00": (b'<doc title="t">\nt\n\n%s\n</doc>', b"\n", b"", b""),
        "a.xml": (
            b"<page><title>t</title><ns>0</ns><revision><text>%s</text></revision></page>",
            b"\n",
            b"<mediawiki>",
            b"</mediawiki>",
        ),
    }
    form, between, head, foot = forms[name]
    documents = [b"Good one.", BAD, b"Good two."]
    (tmp_path / name).write_bytes(head + between.join(form % text for text in documents) + foot)
    options: dict[str, str | bool] = {"documents": "lines"} if name == "a.txt" else {}
    texts, tally = texts_of(tmp_path / name, **options)
    assert texts == ["Good one.", "Good two."]
    (bad,) = tally.bad
    assert bad.reason.startswith("not UTF-8") and tally.repaired == 0
    texts, tally = texts_of(tmp_path / name, repair=True, **options)
    assert texts == ["Good one.", BAD.decode(errors="replace"), "Good two."]
    assert tally.repaired == 1 and not tally.bad


# Tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50, 1 << 22])
@pytest.mark.parametrize("value_type", ["string", "large_string"])
def test_dictionary_columns_of_parquet(tmp_path: Path, value_type: str, size: int) -> None:
    texts = [None if i % 9 == 8 else f"Text {i % 4} of few." for i in range(60)]
    column = pa.array(texts, getattr(pa, value_type)()).dictionary_encode()
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": column}), path, row_group_size=25)
    assert pa.types.is_dictionary(parquet.ParquetFile(path).schema_arrow.field("text").type)
    result, tally = texts_of(path, size)
    assert result == [text for text in parquet.read_table(path)["text"].to_pylist() if text]
    assert tally.empty == texts.count(None) and not tally.bad
    datasets = pytest.importorskip("datasets", reason="no datasets: pip install 'packhorse[hf]'")
    loaded = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert [text for text in loaded["text"] if text] == result


def test_a_dictionary_of_numbers_is_no_text(tmp_path: Path) -> None:
    """The control: numbers in a dictionary are no text."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array([1, 2]).dictionary_encode()}), path)
    with pytest.raises(InputError, match="is not text but int64"):
        find([path])
