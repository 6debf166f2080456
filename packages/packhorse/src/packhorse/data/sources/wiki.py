"""MediaWiki dumps and WikiExtractor's output: pages, and their markup as plain paragraphs.

    page(element)                                            # a <page> of a dump
    paragraphs("'''Ants''' are [[insect|insects]].{{cn}}")   # ["Ants are insects."]

Both kinds of file are long rows of elements, `<page>…</page>` and `<doc …>…</doc>`. In a
well-formed file their tags occur nowhere else (text writes `<` as an entity), so elements are found
by their tags and each page is parsed by itself. Compared to one parser over the whole file (mwxml,
or iterparse) this can begin anywhere, a broken page affects only itself, and no document type is
ever in force, so no entity can be defined that expands without end. `elements` accounts for every
byte: bytes outside of elements are reported too, and the caller decides whether they may be there.

`paragraphs` keeps what a reader of the article would read as prose. It removes templates, tables,
references, headings, comments, images and categories, formulas and code. Lists are removed too:
BERT was trained on passages of text alone (Devlin et al. 2018, section 3.1), and a list item is
seldom a sentence. A link leaves its label, an entity its character. What a template would have
written is lost; parentheses that held nothing else are removed with it.

mwparserfromhell knows all of the markup but reads 1 to 2 MB/s, slowest where templates and links
nest. Those brackets can be matched in one pass over the text, as MediaWiki's own preprocessor does
it, so `_without_brackets` removes them first and the parser sees the rest: several times faster.
The parser alone (`fast=False`) is the reference that the tests compare with. Where the two differ,
brackets do not match; then MediaWiki's rule applies: a bracket that is never closed is text.

Follows the export format 0.6 to 0.11 (mediawiki.org/xml) and WikiExtractor's plain output.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from packhorse.errors import MissingExtra

PAGE = re.compile(rb"<(?P<end>/?)page>")
DOC = re.compile(rb"^<(?:doc [^\n]*|(?P<end>/)doc)>[ \t\r]*$", re.MULTILINE)

# States of an element.
WHOLE = "whole"
UNCLOSED = "unclosed"
OUTSIDE = "outside"
# Reasons to skip a page.
REDIRECT = "redirect"
NOT_AN_ARTICLE = "not an article"

_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)
_HIDDEN_KEYS = re.compile(rb'<namespace key="(?:-2|6|14)"[^>]*>([^<]+)<')
_TITLE = re.compile(r'title="(.*)"')


@dataclass(frozen=True, slots=True)
class Element:
    """Bytes `begin` to `end`: a whole element, one that is not closed, or bytes outside of any."""

    begin: int
    end: int
    state: str


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the dump; `skipped` is the reason if it is no article."""

    title: str
    wikitext: str
    skipped: str = ""


def elements(data: bytes, tag: re.Pattern[bytes]) -> Iterator[Element]:
    """All of `data` except white space, in order; `tag` is PAGE or DOC."""
    opened = None  # position of a start tag that waits for its end
    outside = 0  # position after the last end tag
    for match in tag.finditer(data):
        is_end = bool(match["end"])
        if opened is not None and is_end:
            yield Element(opened, match.end(), WHOLE)
        elif opened is not None:
            yield Element(opened, match.start(), UNCLOSED)
        elif data[outside : match.start()].strip() or is_end:
            yield Element(outside, match.end() if is_end else match.start(), OUTSIDE)
        if is_end:
            opened = None
            outside = match.end()
        else:
            opened = match.start()
    if opened is not None:
        yield Element(opened, len(data), UNCLOSED)
    elif data[outside:].strip():
        yield Element(outside, len(data), OUTSIDE)


def page(element: bytes) -> Page:
    """Parse a `<page>` of the dump, its last revision. Raises ValueError with what is broken."""
    try:
        root = ElementTree.fromstring(element.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from error
    title = root.findtext("title", "")
    namespace = root.findtext("ns")
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
    """Namespaces whose links show no text: English names and those of the header, in lower case."""
    names = (name.decode("utf-8", "replace") for name in _HIDDEN_KEYS.findall(header))
    return HIDDEN | {html.unescape(name).strip().lower() for name in names}


def extracted(element: bytes) -> tuple[str, str]:
    """Title and text of a `<doc>`; a first line that repeats the title is dropped, as in MLPerf.

    Raises ValueError with what is broken.
    """
    try:
        tag, _, rest = element.decode("utf-8").partition("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    match = _TITLE.search(tag)
    title = html.unescape(match[1]) if match else ""
    text = rest.rpartition("</doc>")[0]
    first_line, _, following = text.partition("\n")
    repeats_title = html.unescape(first_line).strip() == title.strip()
    return title, following if repeats_title else text


# Links into these namespaces show a picture or categorize the page; a dump may name them once more
# in its own language (`hidden_namespaces`).
HIDDEN = frozenset({"file", "image", "media", "category"})
# Tags that are removed with their content: some hold no wikitext and must not be parsed, some hold
# lists, tables and headings; parts of the latter may stand alone.
_UNPARSED = (
    "ce|chem|code|gallery|graph|hiero|imagemap|indicator|inputbox|mapframe|maplink|math|nowiki|pre"
    "|ref|score|source|syntaxhighlight|templatedata|templatestyles|timeline"
)
_HOLDERS = "dl|h1|h2|h3|h4|h5|h6|ol|references|style|table|ul"
_PARTS = "caption|dd|dt|li|td|th|tr"
REMOVED = frozenset(f"{_UNPARSED}|{_HOLDERS}|{_PARTS}".split("|")) - {"nowiki"}
BLOCKS = frozenset({"blockquote", "center", "div", "hr", "p", "poem"})
DEEPEST = 100  # levels of nested brackets; deeper ones are treated as unclosed
_BREAK = "\x1e"  # ends a paragraph within a line; XML cannot contain this character

# Each branch begins with a plain character: the matcher then skips all others quickly. Of three
# closing brackets the first closes a link to another site: [[File:a.jpg|[http://b.org c]]].
_BRACKETS = re.compile(
    rf"<(?:(?P<comment>!--)|(?P<unparsed>{_UNPARSED})\b[^<>]*>"
    rf"|(?P<holder>{_HOLDERS})\b[^<>]*>|/(?P<held>{_HOLDERS})\s*>)"
    r"|\{(?P<template>\{+)|\}(?P<filled>\}+)|\[(?P<link>\[)|\](?P<linked>\])(?!\](?:\]\]){0,9}(?!\]))"
    r"|\n(?:(?P<table>[ \t:]*\{\|)|(?P<laid>[ \t]*\|\}(?!\})))",
    re.IGNORECASE,
)
_TAG = re.compile(r"</?([a-z][a-z0-9]*)(?:\s[^<>]*)?/?>", re.IGNORECASE)
# An address ends at a space; the bracket of one that is not closed on its line is text.
_LABELLED = re.compile(
    r"\[(?:https?|ftp)://[^\s\[\]<>\"]*[ \t]*([^\]\n]{0,1000}+)\]|\[(?=(?:https?|ftp)://)"
)
# Like browsers, accept a number without a semicolon.
_ENTITY = re.compile(r"&(?:#\d{1,7};?|#x[\da-f]{1,6};?|\w+;)", re.IGNORECASE)
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z-]+)?:")  # [[fr:Fourmi]], the article elsewhere
_STYLE_OR_SWITCH = re.compile(r"'{2,}|__[A-Z]+__|\{\{+|\}\}+|\[\[|\]\]")
_LISTED_OR_TABLE = re.compile(r"^[ \t]*(?:[*#:;|]|\{\|).*", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n\s*\n")
_EMPTY_PARENTHESES = re.compile(r" ?\([\s,;:]*\)")
_OPENING_COMMAS = re.compile(r"(?<=\()[\s,;:]+")
_SPACE_BEFORE = re.compile(r" +(?=[,)]|[.;:](?: |$))")


@dataclass(slots=True)
class _Open:
    """A bracket that waits for its end, and the text since then."""

    kind: str  # "template", "link", "table", the name of a tag, or "" for the article
    opening: str = ""
    text: list[str] = field(default_factory=list)


def paragraphs(wikitext: str, hidden: Collection[str] = HIDDEN, *, fast: bool = True) -> list[str]:
    """The prose of an article; `fast` removes brackets before the parser sees them.

    hidden: namespaces, in lower case, whose links show no text. Raises ValueError with what is
    broken.
    """
    try:
        import mwparserfromhell
    except ImportError as error:
        raise MissingExtra("mwparserfromhell", "data") from error

    if fast:
        wikitext = _without_simple_tags(_without_brackets(wikitext, hidden))
    try:
        # Bold and italic quotes are removed by a pattern below: the parser is slow to nest them.
        nodes = mwparserfromhell.parse(wikitext, skip_style_tags=True).nodes
        return _tidied(_shown(nodes, hidden))
    except (RecursionError, mwparserfromhell.parser.ParserError) as error:
        raise ValueError(f"markup that cannot be parsed: {error}") from error


def extracted_paragraphs(text: str) -> list[str]:
    """The prose of WikiExtractor's text, one paragraph per line, without markup it overlooked."""
    if "<" in text:
        text = re.sub(r"(?is)<ref\b[^<>]*/>|<ref\b.*?(?:</ref>|\n|$)", "", text)
    return _prose(text.split("\n"))


def _without_brackets(wikitext: str, hidden: Collection[str]) -> str:
    """Remove templates, tables, comments and some tags; replace links by their labels."""
    wikitext = "\n" + wikitext  # a table begins after a line end
    stack = [_Open("")]
    position = 0
    unclosed: set[str] = set()
    while bracket := _BRACKETS.search(wikitext, position):
        stack[-1].text.append(wikitext[position : bracket.start()])
        position = bracket.end()
        match bracket.lastgroup:
            case "comment":
                end = wikitext.find("-->", position)
                position = end + 3 if end >= 0 else len(wikitext)
            case "unparsed":
                text, position = _unparsed(wikitext, bracket, unclosed)
                stack[-1].text.append(text)
            case "filled":
                _close_braces(stack, bracket[0])
            case "linked":
                _close_link(stack, hidden)
            case "laid":
                _close(stack, "table")
                stack[-1].text.append("\n")  # a table ends the paragraph
            case "held":
                _close(stack, bracket["held"].lower())
            case kind:
                holder = bracket["holder"]
                _open(stack, holder.lower() if holder else str(kind), bracket[0])
    while len(stack) > 1:
        _keep_as_text(stack)
    return "".join(stack[0].text) + wikitext[position:]


def _unparsed(wikitext: str, tag: re.Match[str], unclosed: set[str]) -> tuple[str, int]:
    """The text that remains of an unparsed tag, and the position after it.

    unclosed: names of tags that have no end in the rest of the text, so that each is searched once.
    """
    name = tag["unparsed"].lower()
    after = tag.end()
    if tag[0].endswith("/>") or name in unclosed:
        return "", after
    closing = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(wikitext, after)
    if not closing:
        unclosed.add(name)
        return "", after
    text = _literal(wikitext[after : closing.start()]) if name == "nowiki" else ""
    return text, closing.end()


def _literal(text: str) -> str:
    """Escape text, so that none of it is read as markup."""
    return re.sub(r"['\[\]{}<>|*#:;=_]", lambda match: f"&#{ord(match[0])};", text)


def _open(stack: list[_Open], kind: str, opening: str) -> None:
    if len(stack) <= DEEPEST and not opening.endswith("/>"):
        stack.append(_Open(kind, opening))


def _is_open(stack: list[_Open], kind: str) -> bool:
    return any(bracket.kind == kind for bracket in stack)


def _close(stack: list[_Open], kind: str) -> None:
    """Remove the innermost bracket of that kind, with everything inside."""
    if _is_open(stack, kind):
        while stack.pop().kind != kind:
            pass


def _close_braces(stack: list[_Open], closing: str) -> None:
    """Braces come in runs: `{{{{a}} b}}` is one template in another."""
    while len(closing) >= 2 and _is_open(stack, "template"):
        while stack[-1].kind != "template":
            stack.pop()
        opening = stack[-1].opening
        matched = min(len(opening), len(closing))
        closing = closing[matched:]
        _close(stack, "template")
        if len(opening) - matched >= 2:
            stack.append(_Open("template", opening[matched:]))


def _close_link(stack: list[_Open], hidden: Collection[str]) -> None:
    """Replace the innermost bracket by its text, if it is a link."""
    if stack[-1].kind == "link":
        target, bar, label = "".join(stack.pop().text).partition("|")
        stack[-1].text.append(_link_text(target, label if bar else None, hidden))


def _keep_as_text(stack: list[_Open]) -> None:
    """Turn the innermost bracket, which is never closed, into text."""
    unclosed = stack.pop()
    if unclosed.kind == "table":  # its lines are removed later, like those of any table
        stack[-1].text.append(unclosed.opening)
    stack[-1].text += unclosed.text


def _without_simple_tags(wikitext: str) -> str:
    """Remove what does not nest: tags around text, links to other sites, lines of lists."""
    wikitext = _TAG.sub(_tag_alone, wikitext).replace("<", "&lt;")
    return _LISTED_OR_TABLE.sub("", _LABELLED.sub(r"\1", wikitext))


def _tag_alone(tag: re.Match[str]) -> str:
    name = tag[1].lower()
    return _BREAK if name in BLOCKS else " " if name == "br" else ""


def _link_text(target: str, label: str | None, hidden: Collection[str]) -> str:
    """The text that an article shows for [[target|label]]."""
    target = target.strip()
    prefix = target.partition(":")[0].strip().lower() if ":" in target else ""
    if prefix in hidden or (label is None and _LANGUAGE.match(target)):
        return ""
    return label or target.lstrip(":#")


def _shown(nodes: Iterable[Any], hidden: Collection[str]) -> str:
    """The text of parsed nodes; templates, arguments and comments show none."""
    return "".join(_node_text(node, hidden) for node in nodes)


def _node_text(node: Any, hidden: Collection[str]) -> str:
    match type(node).__name__:
        case "Text":
            return node.value
        case "HTMLEntity":
            return str(node)  # becomes a character at the end, when it can no longer be markup
        case "Heading":
            return "\n\n"
        case "Wikilink":
            label = _shown(node.text.nodes, hidden) if node.text is not None else None
            return _link_text(_shown(node.title.nodes, hidden), label, hidden)
        case "ExternalLink":
            if node.title is not None:
                return _shown(node.title.nodes, hidden)
            return "" if node.brackets else str(node.url)
        case "Tag":
            return _tag_text(node, hidden)
    return ""


def _tag_text(node: Any, hidden: Collection[str]) -> str:
    name = str(node.tag).strip().lower()
    if node.wiki_markup in ("*", "#", ":", ";"):
        return node.wiki_markup  # begins a line of a list, which is removed as a line
    if name in REMOVED:
        return ""
    if name == "nowiki":
        return _literal(str(node.contents))
    if name == "br":
        return " "
    inside = _shown(node.contents.nodes, hidden) if node.contents is not None else ""
    return f"{_BREAK}{inside}{_BREAK}" if name in BLOCKS else inside


def _tidied(text: str) -> list[str]:
    """Paragraphs without remains of markup; a single line end counts as a space."""
    text = _LISTED_OR_TABLE.sub("", text).replace(_BREAK, "\n\n")
    return _prose(_BLANK_LINE.split(text))


def _prose(blocks: Iterable[str]) -> list[str]:
    """Each block on one line: no tags or brackets, characters for entities, no gaps."""
    bare = (_STYLE_OR_SWITCH.sub("", _TAG.sub("", block)) for block in blocks)
    lines = (_closed_up(" ".join(_unescaped(block).split())) for block in bare)
    return [line for line in lines if any(map(str.isalnum, line))]


def _closed_up(line: str) -> str:
    """Close the gaps that templates leave: `Ants ( ; ) , they` becomes `Ants, they`."""
    line = _OPENING_COMMAS.sub("", _EMPTY_PARENTHESES.sub("", line))
    return _SPACE_BEFORE.sub("", line).strip()


def _unescaped(text: str) -> str:
    return _ENTITY.sub(lambda match: html.unescape(match[0]), text) if "&" in text else text
