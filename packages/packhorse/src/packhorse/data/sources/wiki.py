"""The pages of a MediaWiki dump, and the articles of WikiExtractor's output, as they lie in a file.

Both are long rows of elements, `<page>…</page>` and `<doc …>…</doc>`. In a well-formed file their
tags occur nowhere else (text writes `<` as an entity), so elements are found by their tags and each
page is parsed for itself. Against one parser over the whole file (mwxml, or iterparse) this can
begin anywhere, a broken page spoils nothing but itself, and no document type is ever in force, so
no entity can be defined and expand without end. `elements` accounts for every byte: what lies
outside an element is given too, and whoever reads says whether it may be there.

Follows the export format 0.6 to 0.11 (mediawiki.org/xml) and WikiExtractor's plain output.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from packhorse.data.sources.markup import HIDDEN

PAGE = re.compile(rb"<(?P<end>/?)page>")
DOC = re.compile(rb"^<(?:doc [^\n]*|(?P<end>/)doc)>[ \t\r]*$", re.MULTILINE)

WHOLE, UNCLOSED, OUTSIDE = "whole", "unclosed", "outside"
REDIRECT, NOT_AN_ARTICLE = "redirect", "not an article"

_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)
_HIDDEN_KEYS = re.compile(rb'<namespace key="(?:-2|6|14)"[^>]*>([^<]+)<')
_TITLE = re.compile(r'title="(.*)"')


@dataclass(frozen=True, slots=True)
class Element:
    """Bytes `begin` to `end`: one whole element, one that is not closed, or what is outside."""

    begin: int
    end: int
    state: str


@dataclass(frozen=True, slots=True)
class Page:
    """A page as the dump has it; `skipped` says why it is no article, if it is none."""

    title: str
    wikitext: str
    skipped: str = ""


def elements(data: bytes, tag: re.Pattern[bytes]) -> Iterator[Element]:
    """All of `data` but blank space, in order; `tag` is PAGE or DOC."""
    opened, at = None, 0
    for found in tag.finditer(data):
        if opened is not None and found["end"]:
            yield Element(opened, found.end(), WHOLE)
        elif opened is not None:
            yield Element(opened, found.start(), UNCLOSED)
        elif data[at : found.start()].strip() or found["end"]:
            yield Element(at, found.end() if found["end"] else found.start(), OUTSIDE)
        opened, at = (None, found.end()) if found["end"] else (found.start(), at)
    if opened is not None:
        yield Element(opened, len(data), UNCLOSED)
    elif data[at:].strip():
        yield Element(at, len(data), OUTSIDE)


def page(element: bytes) -> Page:
    """A `<page>` of the dump; of several revisions the last. ValueError says what is broken."""
    try:
        root = ElementTree.fromstring(element.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from error
    title, namespace = root.findtext("title", ""), root.findtext("ns")
    if namespace is None:
        raise ValueError("no <ns>: an export before version 0.6 does not say what is an article")
    wikitext = root.findtext("revision[last()]/text") or ""
    if root.find("redirect") is not None or _REDIRECT.match(wikitext):
        return Page(title, "", REDIRECT)
    model = root.findtext("revision[last()]/model") or "wikitext"
    if namespace.strip() != "0" or model != "wikitext":
        return Page(title, "", NOT_AN_ARTICLE)
    return Page(title, wikitext)


def hidden_namespaces(header: bytes) -> frozenset[str]:
    """Whose links show nothing, in English and as the dump's header names them, in lower case."""
    names = (name.decode("utf-8", "replace") for name in _HIDDEN_KEYS.findall(header))
    return HIDDEN | {html.unescape(name).strip().lower() for name in names}


def extracted(element: bytes) -> tuple[str, str]:
    """Title and text of a `<doc>`; a first line that repeats the title goes, as in MLPerf's
    clean-up. ValueError says what is broken."""
    try:
        tag, _, rest = element.decode("utf-8").partition("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    found = _TITLE.search(tag)
    title, text = html.unescape(found[1]) if found else "", rest.rpartition("</doc>")[0]
    first, _, others = text.partition("\n")
    return title, others if html.unescape(first).strip() == title.strip() else text
