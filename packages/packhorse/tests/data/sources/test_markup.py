"""Wikitext becomes prose, and the fast way gives what the parser alone gives."""

from __future__ import annotations

import bz2
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.data.sources import wiki

CASES = {
    "'''Ants''' are ''social'' [[insect|insects]].": ["Ants are social insects."],
    "[[Bus]]es run.": ["Buses run."],
    "See [[:Category:Ants]] and [[#History]].": ["See Category:Ants and History."],
    "An [[Ant (insect)|]] here.": ["An Ant (insect) here."],
    "A{{cite|{{nested|x}}|y={z}|}} b.": ["A b."],
    "A {{{1|default}}} b.": ["A b."],
    "A{{{{name}} inner}} b.": ["A b."],
    "A.<ref>{{cite}} [[x]]</ref><ref name='x' /> B.": ["A. B."],
    "A<!-- [[gone]] --> b.": ["A b."],
    "Before\n{| class=x\n|-\n| cell {{t}} || [[y]]\n{|\n| inner\n|}\n|}\nAfter": [
        "Before",
        "After",
    ],
    "A <table><tr><td>gone</td></tr></table> b.": ["A b."],
    "== Heading ==\nText.\n=== Another ===\nMore.": ["Text.", "More."],
    "Text.\n* one\n# two\n: three\n; four\nMore.": ["Text.", "More."],
    "A <ul><li>gone</li></ul> b.": ["A b."],
    "[[File:a.jpg|thumb|A [[link]] and [https://example.org/x label] inside]]Text.": ["Text."],
    "[[Category:Ants]] [[fr:Fourmi]] Text [[Image:b.png]].": ["Text."],
    "[[Star Wars: A New Hope]] and [[wikt:ant|ant]].": ["Star Wars: A New Hope and ant."],
    "x <math>\\frac{{a}}{b}</math> y <code>if {{ [[</code> z.": ["x y z."],
    "a <gallery>\nFile:a.jpg|[[b]]\n</gallery> b": ["a b"],
    "Use <nowiki>[[brackets]] {{and}} ''quotes''</nowiki>.": [
        "Use [[brackets]] {{and}} ''quotes''."
    ],
    "A&nbsp;b &amp; c &lt;ref&gt; &#8212; &eacute; &nosuch; d&copy": [
        "A b & c <ref> — é &nosuch; d&copy"
    ],
    "H<sub>2</sub>O and<br />more <small>text</small>.": ["H2O and more text."],
    "<div>One.</div><div>Two.</div>": ["One.", "Two."],
    "At [http://example.org the site], [http://example.org], http://example.org/x.": [
        "At the site,, http://example.org/x."
    ],
    "__NOTOC__Ant ({{IPA|x}}; {{lang|y}}), an insect ( , small).": ["Ant, an insect (small)."],
    "One line\nof a paragraph.\n\nAnother.": ["One line of a paragraph.", "Another."],
    "... !\n\n-- \n\nWords.": ["Words."],
    "5 < 6 and 7 > 6.": ["5 < 6 and 7 > 6."],
    "": [],
}
UNBALANCED = {
    "A {{never closed [[b]].": ["A never closed b."],
    "A [[never closed.": ["A never closed."],
    "A }} b ]] c.": ["A b c."],
    "A{{cite|y={}}} b.": ["A b."],
    "A <!-- never closed [[x]]": ["A"],
    "A <ref>never closed. B.": ["A never closed. B."],
    "A {{t|[[open}} b.": ["A b."],
    "A\n{| open\n| row\n|- \nb": ["A", "b"],
    "A <b>bold <div>b.": ["A bold", "b."],
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("wikitext", CASES)
def test_text_that_remains_of_markup(wikitext: str, fast: bool) -> None:
    assert wiki.paragraphs(wikitext, fast=fast) == CASES[wikitext]


@pytest.mark.parametrize("wikitext", UNBALANCED)
def test_what_is_never_closed_is_text_without_its_bracket(wikitext: str) -> None:
    assert wiki.paragraphs(wikitext) == UNBALANCED[wikitext]


def test_wikiextractors_text_is_tidied_as_a_dumps_is() -> None:
    text = (
        "Ants ( ; ) , or bees (Latin: ), live.]]\n\n()\n"
        "A cent (Unicode &#162) is &#xA2; or &cent; at AT&T.\n"
        'One<ref name="x">gone</ref> <b>line</b>.<br>\n'
    )
    assert wiki.extracted_paragraphs(text) == [
        "Ants, or bees (Latin:), live.",
        "A cent (Unicode ¢) is ¢ or ¢ at AT&T.",
        "One line.",
    ]
    assert wiki.paragraphs("Ants ({{t}}) , a &#162 (Latin: {{t}}).") == ["Ants, a ¢ (Latin:)."]


def test_namespaces_of_another_language_are_hidden() -> None:
    hidden = wiki.HIDDEN | {"datei"}
    assert wiki.paragraphs("[[Datei:a.jpg|mini|Bild]] Text.", hidden) == ["Text."]
    assert wiki.paragraphs("[[Datei:a.jpg|mini|Bild]] Text.") == ["mini|Bild Text."]


VANDALISM = [
    *("{{", "}}", "[[", "]]", "{|\n", "\n|}", "<ref>", "<b>", "<table>", "<a ", "[//a "),
    *("<!--", "{{a|[[b|''c<ref>d</ref>''", "== a\n", "&a;", "(,"),
]


@pytest.mark.parametrize("piece", VANDALISM)
def test_a_vandal_does_not_stop_the_build(piece: str) -> None:
    """Unclosed brackets by the thousand; the parser alone takes minutes for some of these."""
    text = wiki.paragraphs(piece * 5000)
    assert not any("[[" in line or "{{" in line for line in text)


def nested(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    inside = st.lists(children, max_size=3).map(" ".join)
    return st.one_of(
        inside.map(lambda text: f"{{{{t|{text}}}}}"),
        inside.map(lambda text: f"[[Target|{text} x]]"),
        inside.map(lambda text: f"[[File:a.jpg|thumb|{text}]]"),
        inside.map(lambda text: f"<small>{text}</small>"),
        inside.map(lambda text: f"a\n{{|\n| {text}\n|}}\nb"),
    )


words = st.sampled_from(
    ["word", "Two words.", "&nbsp;", "<ref>r {{t}}</ref>", "[//x.org site]", "<br>", "''x''"]
)


@settings(max_examples=150)
@given(st.lists(st.recursive(words, nested, max_leaves=8), max_size=4).map(" ".join))
def test_markup_that_nests_well_reads_alike_both_ways(wikitext: str) -> None:
    assert wiki.paragraphs(wikitext) == wiki.paragraphs(wikitext, fast=False)


@pytest.fixture(scope="module")
def articles(shared_data: Path) -> list[wiki.Page]:
    dump = bz2.decompress(next((shared_data / "wiki").glob("enwiki*.bz2")).read_bytes())
    bodies = [dump[item.begin : item.end] for item in wiki.elements(dump, wiki.PAGE)]
    pages = [wiki.page(body) for body in bodies if body.startswith(b"<page>")]
    assert len(pages) == 206
    return [page for page in pages if not page.skipped]


MARKUP = re.compile(r"\[\[|\]\]|\{\{|\}\}|<ref|</|\|-|&nbsp;|&amp;|'''|^\s*[*#:;|=]", re.MULTILINE)


def test_no_markup_is_left_of_real_articles(articles: list[wiki.Page]) -> None:
    cleaned = "\n".join(line for page in articles for line in wiki.paragraphs(page.wikitext))
    assert len(cleaned) > 2_500_000
    assert MARKUP.findall(cleaned) == []
    raw = "\n".join(page.wikitext for page in articles)
    assert len(MARKUP.findall(raw)) > 100_000, "the pattern finds no markup where there is some"


def test_real_articles_read_alike_both_ways(articles: list[wiki.Page]) -> None:
    few = [page for page in articles if len(page.wikitext) < 60_000][:30]
    assert len(few) == 30
    for page in few:
        fast = wiki.paragraphs(page.wikitext)
        assert fast == wiki.paragraphs(page.wikitext, fast=False), page.title


@pytest.mark.slow
def test_all_real_articles_read_alike_both_ways(articles: list[wiki.Page]) -> None:
    for page in articles:
        fast = wiki.paragraphs(page.wikitext)
        assert fast == wiki.paragraphs(page.wikitext, fast=False), page.title
