"""Pages and docs are cut out of a file with no byte unaccounted for, and broken ones are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.data.sources import wiki
from packhorse.data.sources.wiki import DOC, OUTSIDE, PAGE, UNCLOSED, WHOLE, Page


def page(text: str = "Text.", title: str = "A", ns: str = "<ns>0</ns>", extra: str = "") -> bytes:
    revision = f"<revision><text>{text}</text></revision>"
    return f"<page><title>{title}</title>{ns}{extra}{revision}</page>".encode()


def states(data: bytes, tag=PAGE) -> list[tuple[str, bytes]]:
    return [(item.state, data[item.begin : item.end]) for item in wiki.elements(data, tag)]


def test_elements_in_order_with_what_is_outside() -> None:
    data = b"<mediawiki>head\n  <page>1</page>\n  <page>2</page> stray <page>3</page>\n</mediawiki>"
    assert states(data) == [
        (OUTSIDE, b"<mediawiki>head\n  "),
        (WHOLE, b"<page>1</page>"),
        (WHOLE, b"<page>2</page>"),
        (OUTSIDE, b" stray "),
        (WHOLE, b"<page>3</page>"),
        (OUTSIDE, b"\n</mediawiki>"),
    ]


def test_elements_that_are_not_closed_and_ends_without_a_beginning() -> None:
    assert states(b"<page>1<page>2</page>x</page><page>3") == [
        (UNCLOSED, b"<page>1"),
        (WHOLE, b"<page>2</page>"),
        (OUTSIDE, b"x</page>"),
        (UNCLOSED, b"<page>3"),
    ]


@given(
    st.lists(st.sampled_from([b"<page>", b"</page>", b" ", b"x", b"</mediawiki>"])).map(b"".join)
)
def test_every_byte_but_blanks_is_accounted_for_once(data: bytes) -> None:
    at = 0
    for item in wiki.elements(data, PAGE):
        assert item.begin >= at and not data[at : item.begin].strip()
        at = item.end
    assert not data[at:].strip()


def test_docs_begin_and_end_with_a_line() -> None:
    doc = b'<doc id="1" url="u" title="A > B &amp; C">\nA > B & C\n\nSee <doc > here.\n\n</doc>'
    assert [state for state, _ in states(doc + b"\n" + doc + b"\n", DOC)] == [WHOLE, WHOLE]
    assert wiki.extracted(doc) == ("A > B & C", "\nSee <doc > here.\n\n")


@pytest.mark.parametrize("first", ["Ants & bees", " Ants &amp; bees\r"])
def test_a_first_line_goes_only_if_it_is_the_title(first: str) -> None:
    tag = '<doc id="1" title="Ants &amp; bees">\n'
    assert wiki.extracted(f"{tag}{first}\n\nText.\n</doc>".encode())[1] == "\nText.\n"
    for text in ("Ants & bees live.\nMore.\n", "One line.\n", "One line, no end.", ""):
        assert wiki.extracted(f"{tag}{text}</doc>".encode())[1] == text


def test_a_page_is_its_title_and_text() -> None:
    assert wiki.page(page("a &amp; &lt;b&gt; &amp;nbsp; é", "T &amp; U")) == Page(
        "T & U", "a & <b> &nbsp; é"
    )
    revisions = b"<page><title>A</title><ns>0</ns><revision><text>old</text></revision>"
    assert wiki.page(revisions + b"<revision><text>new</text></revision></page>").wikitext == "new"
    assert wiki.page(page().replace(b"<text>Text.</text>", b"<text deleted='deleted' />")) == Page(
        "A", ""
    )


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (page(extra='<redirect title="B" />'), wiki.REDIRECT),
        (page("#REDIRECT [[B]]"), wiki.REDIRECT),
        (page(" #redirect[[B]]"), wiki.REDIRECT),
        (page("#Redirecting traffic"), ""),
        (page(ns="<ns>1</ns>"), wiki.NOT_AN_ARTICLE),
        (page().replace(b"<text>", b"<model>css</model><text>"), wiki.NOT_AN_ARTICLE),
        (page().replace(b"<text>", b"<model>wikitext</model><text>"), ""),
    ],
)
def test_what_is_no_article(element: bytes, reason: str) -> None:
    assert wiki.page(element).skipped == reason


BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (page("\xe9").replace("\xe9".encode(), b"\xe9"), "not UTF-8"),
        (page("a & b"), "not XML"),
        (page("a \x01 b"), "not XML"),
        (page("<b>"), "not XML"),
        (page("&nbsp;"), "not XML"),
        (page(ns=""), "no <ns>"),
        (b"<page>" + BOMB + page("&b;")[6:], "not XML"),
    ],
)
def test_broken_pages_say_why(element: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        wiki.page(element)


def test_namespaces_are_named_by_the_header() -> None:
    header = (
        b'<namespace key="6" case="first-letter">Datei</namespace>'
        b'<namespace key="14" case="first-letter">K&amp;K</namespace>'
        b'<namespace key="4" case="first-letter">Wikipedia</namespace>'
    )
    hidden = wiki.hidden_namespaces(header)
    assert {"file", "category", "datei", "k&k"} <= hidden
    assert "wikipedia" not in hidden
