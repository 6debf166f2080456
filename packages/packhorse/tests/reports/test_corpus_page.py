"""The page of a corpus shows what was counted, escapes what strangers wrote and loads nothing."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

import pytest

from packhorse.data.corpus.building import BuildOptions, build
from packhorse.data.packed import statistics
from packhorse.data.packed.masking import Recipe
from packhorse.reports.corpus_page import corpus_page
from packhorse.tokens import Tokenizer

from ..data import corpora

pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

LABELS = {"documents": "documents", "near_duplicates": "near duplicates"}


class Page(html.parser.HTMLParser):
    """Its tags and text; unclosed tags are an error."""

    VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    corpora.write_vocabulary(tmp_path / "vocab.txt")
    source = corpora.write_source(tmp_path / "source", corpora.documents(40), "jsonl")
    options = BuildOptions(
        (source,), tmp_path / "out", tmp_path / "vocab.txt", Recipe(max_length=64), workers=1
    )
    build(options)
    return tmp_path / "out"


def test_a_page_shows_counts_lengths_and_samples(corpus: Path) -> None:
    counted = statistics.count("train", corpus / "train", 3)
    samples = statistics.samples(corpus / "train", Tokenizer.load(corpus / "tokenizer"), 4, 0)
    page = Page(corpus_page("out", [(counted, samples)], LABELS))
    assert not page.open and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href", "onclick"} & page.attributes
    assert "Documents by characters" in page.text and "Duplicates" not in page.text
    assert all(sample.text in page.text for sample in samples) and len(samples) == 4
    assert f"{counted.manifest.sequences:,}" in page.text


def test_what_strangers_wrote_is_escaped(corpus: Path) -> None:
    path = corpus / "train" / "manifest.json"
    manifest = json.loads(path.read_text())
    bad = "<script>alert(1)</script>"
    manifest["config"]["found"] |= {"duplicate_samples": [[bad, bad]], "languages": {bad: 3}}
    path.write_text(json.dumps(manifest))
    counted = statistics.count("train", corpus / "train", 3)
    sample = statistics.Sample(1, 2, None, bad)
    page = Page(corpus_page(bad, [(counted, [sample])], LABELS))
    assert "script" not in page.tags and not page.open
    assert page.text.count(bad) == 6
