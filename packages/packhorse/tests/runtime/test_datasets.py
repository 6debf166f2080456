"""What `datasets` gives, taken where a list of texts is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import packhorse
from packhorse.errors import InputError

TEXTS = ["who saw the horse", "ann", "the horse saw ann"]


@pytest.fixture(scope="module")
def table() -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")
    return datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1, 0]})


def test_a_column_and_a_table_are_its_texts(make_encoder, table: Any) -> None:
    encoder = make_encoder()
    want = encoder.embed(TEXTS).tobytes()
    stream = table.to_iterable_dataset()
    for source in (table["text"], table, stream, stream["text"], iter(TEXTS)):
        assert encoder.embed(source).tobytes() == want, type(source)
    assert encoder.embed(table.with_format("numpy")["text"]).tobytes() == want
    for source in (table["text"], table, stream["text"]):
        assert encoder.encode(source, prompt="").tobytes() == want, type(source)


def test_every_task_takes_them(make_encoder, table: Any) -> None:
    encoder = make_encoder("classify")
    assert encoder.classify(table) == encoder.classify(TEXTS)
    encodings, want = (encoder.tokenize(texts) for texts in (table["text"], TEXTS))
    assert [encoding.ids.tolist() for encoding in encodings] == [
        encoding.ids.tolist() for encoding in want
    ]
    reranker = make_encoder("rerank")
    assert reranker.rerank("ann", table["text"]) == reranker.rerank("ann", TEXTS)
    assert reranker.rerank("ann", table) == reranker.rerank("ann", TEXTS)


def test_a_table_must_have_one_column_of_texts(make_encoder, table: Any) -> None:
    encoder = make_encoder()
    with pytest.raises(InputError, match=r'pass dataset\["…"\] of: \'text\', \'title\''):
        encoder.embed(table.add_column("title", TEXTS))
    with pytest.raises(InputError, match="of: none"):
        encoder.embed(table.select_columns(["label"]))


class Frame:
    """As pandas has it: it gives its columns' names, one by one."""

    columns = ("text",)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


@pytest.mark.parametrize(
    "wrong", [Frame(), {"text": TEXTS}, None, 7], ids=["frame", "map", "none", "number"]
)
def test_what_is_no_list_of_texts_is_refused(make_encoder, wrong: Any) -> None:
    encoder = make_encoder()
    message = r'pass one column of it: table\["…"\]|texts are a list of texts, not'
    with pytest.raises(InputError, match=message):
        encoder.embed(wrong)
    with packhorse.PackRunner(encoder, timeout=0) as runner:
        with pytest.raises(InputError, match=message):
            runner.run(wrong)
        assert len(runner.run(iter(TEXTS))) == len(TEXTS)
    with pytest.raises(InputError, match=r"PackRunner\(packhorse.load\('name'\)\)"):
        packhorse.PackRunner("name")  # pyright: ignore[reportArgumentType]
