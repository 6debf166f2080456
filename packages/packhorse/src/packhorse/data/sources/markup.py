"""Wikitext to plain paragraphs: what a reader of the article would read as prose.

    paragraphs("'''Ants''' are [[insect|insects]].{{cn}}")   # ["Ants are insects."]

Gone are templates, tables, references, headings, comments, images and categories, formulas and
code. Lists are gone too: BERT was trained on passages of text alone (Devlin et al. 2018, section
3.1), and a list item is seldom a sentence. A link leaves its label, an entity its character. What a
template would have written is lost; parentheses that held nothing else go with it.

mwparserfromhell knows all of the markup but reads 1 to 2 MB/s, slowest where templates and links
nest. Those brackets can be matched in one pass over the text, as MediaWiki's own preprocessor does
it, so `_without_brackets` takes them out first and the parser sees the rest: several times faster.
The parser alone (`fast=False`) is the reference the tests compare with. Where the two differ,
brackets do not match; then MediaWiki's rule holds: a bracket that is never closed is text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from packhorse.errors import MissingExtra

# Links into these namespaces show a picture or file the page away; a dump may name them once more
# in its own language (`wiki.hidden_namespaces`).
HIDDEN = frozenset({"file", "image", "media", "category"})
# Tags that go with all they hold: some hold no wikitext and must stay unread, some hold lists,
# tables and headings; of the latter a part may stand alone.
_UNPARSED = (
    "ce|chem|code|gallery|graph|hiero|imagemap|indicator|inputbox|mapframe|maplink|math|nowiki|pre"
    "|ref|score|source|syntaxhighlight|templatedata|templatestyles|timeline"
)
_HOLDERS = "dl|h1|h2|h3|h4|h5|h6|ol|references|style|table|ul"
_PARTS = "caption|dd|dt|li|td|th|tr"
GONE = frozenset(f"{_UNPARSED}|{_HOLDERS}|{_PARTS}".split("|")) - {"nowiki"}
BLOCKS = frozenset({"blockquote", "center", "div", "hr", "p", "poem"})
DEEPEST = 100  # brackets in brackets; those further in are taken for unclosed
_BREAK = "\x1e"  # between paragraphs, but within a line of a list; no XML can hold it

# Each branch begins with a plain character: that lets the matcher skip all others quickly. Of three
# brackets the first closes a link to another site: [[File:a.jpg|[http://b.org c]]].
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
# A browser needs no semicolon behind a number.
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
    """A bracket that waits for its end, and the text found since."""

    kind: str  # "template", "link", "table", the name of a tag, or "" for the article
    opening: str = ""
    text: list[str] = field(default_factory=list)


def paragraphs(wikitext: str, hidden: Collection[str] = HIDDEN, *, fast: bool = True) -> list[str]:
    """The prose of an article; `fast` takes brackets out before the parser sees them.

    hidden: the namespaces, in lower case, whose links show nothing in the text. ValueError says
    what is broken.
    """
    try:
        import mwparserfromhell
    except ImportError as error:
        raise MissingExtra("mwparserfromhell", "data") from error

    if fast:
        wikitext = _without_simple_tags(_without_brackets(wikitext, hidden))
    try:
        # Bold and italic quotes go by a pattern below: the parser is slow to find how they nest.
        nodes = mwparserfromhell.parse(wikitext, skip_style_tags=True).nodes
        return _tidied(_shown(nodes, hidden))
    except (RecursionError, mwparserfromhell.parser.ParserError) as error:
        raise ValueError(f"markup that cannot be parsed: {error}") from error


def extracted_paragraphs(text: str) -> list[str]:
    """The prose of WikiExtractor's text, a paragraph a line, without the markup it overlooks."""
    if "<" in text:
        text = re.sub(r"(?is)<ref\b[^<>]*/>|<ref\b.*?(?:</ref>|\n|$)", "", text)
    return _prose(text.split("\n"))


def _without_brackets(wikitext: str, hidden: Collection[str]) -> str:
    """Templates, tables, comments and tags that go cut out, links replaced by their labels."""
    wikitext = "\n" + wikitext  # a table begins after a line end
    stack, at, unclosed = [_Open("")], 0, set[str]()
    while found := _BRACKETS.search(wikitext, at):
        stack[-1].text.append(wikitext[at : found.start()])
        at = found.end()
        match found.lastgroup:
            case "comment":
                end = wikitext.find("-->", at)
                at = end + 3 if end >= 0 else len(wikitext)
            case "unparsed":
                text, at = _unparsed(wikitext, found, unclosed)
                stack[-1].text.append(text)
            case "filled":
                _close_braces(stack, found[0])
            case "linked":
                _close_link(stack, hidden)
            case "laid":
                _close(stack, "table")
                stack[-1].text.append("\n")  # a paragraph does not go on behind a table
            case "held":
                _close(stack, found["held"].lower())
            case kind:
                _open(stack, found["holder"].lower() if found["holder"] else str(kind), found[0])
    while len(stack) > 1:
        _give_up(stack)
    return "".join(stack[0].text) + wikitext[at:]


def _unparsed(wikitext: str, found: re.Match[str], unclosed: set[str]) -> tuple[str, int]:
    """What stays of an unparsed tag, and where the text goes on.

    unclosed: names of tags that have no end in the rest of the text; each is looked for once.
    """
    name, after = found["unparsed"].lower(), found.end()
    if found[0].endswith("/>") or name in unclosed:
        return "", after
    closing = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(wikitext, after)
    if not closing:
        unclosed.add(name)
        return "", after
    text = _literal(wikitext[after : closing.start()]) if name == "nowiki" else ""
    return text, closing.end()


def _literal(text: str) -> str:
    """Text that is not markup, written so that none of it is taken for some."""
    return re.sub(r"['\[\]{}<>|*#:;=_]", lambda found: f"&#{ord(found[0])};", text)


def _open(stack: list[_Open], kind: str, opening: str) -> None:
    if len(stack) <= DEEPEST and not opening.endswith("/>"):
        stack.append(_Open(kind, opening))


def _waits(stack: list[_Open], kind: str) -> bool:
    return any(waiting.kind == kind for waiting in stack)


def _close(stack: list[_Open], kind: str) -> None:
    """The nearest bracket of that kind goes, with all inside."""
    if _waits(stack, kind):
        while stack.pop().kind != kind:
            pass


def _close_braces(stack: list[_Open], closing: str) -> None:
    """Braces come in runs: `{{{{a}} b}}` is one template in another."""
    while len(closing) >= 2 and _waits(stack, "template"):
        while stack[-1].kind != "template":
            stack.pop()
        opening = stack[-1].opening
        ended = min(len(opening), len(closing))
        closing = closing[ended:]
        _close(stack, "template")
        if len(opening) - ended >= 2:
            stack.append(_Open("template", opening[ended:]))


def _close_link(stack: list[_Open], hidden: Collection[str]) -> None:
    """The innermost bracket, if it is a link, shows its text."""
    if stack[-1].kind == "link":
        target, bar, label = "".join(stack.pop().text).partition("|")
        stack[-1].text.append(_link_text(target, label if bar else None, hidden))


def _give_up(stack: list[_Open]) -> None:
    """The innermost bracket is never closed: what it holds is text."""
    waiting = stack.pop()
    # A table's rows go as lines do, and so does this one.
    stack[-1].text += [waiting.opening if waiting.kind == "table" else "", *waiting.text]


def _without_simple_tags(wikitext: str) -> str:
    """Tags whose content stays, links to other sites, and lists, none of which nests."""
    wikitext = _TAG.sub(_tag_alone, wikitext).replace("<", "&lt;")
    return _LISTED_OR_TABLE.sub("", _LABELLED.sub(r"\1", wikitext))


def _tag_alone(tag: re.Match[str]) -> str:
    name = tag[1].lower()
    return _BREAK if name in BLOCKS else " " if name == "br" else ""


def _link_text(target: str, label: str | None, hidden: Collection[str]) -> str:
    """What an article shows of [[target|label]]."""
    target = target.strip()
    prefix = target.partition(":")[0].strip().lower() if ":" in target else ""
    if prefix in hidden or (label is None and _LANGUAGE.match(target)):
        return ""
    return label or target.lstrip(":#")


def _shown(nodes: Iterable[Any], hidden: Collection[str]) -> str:
    """The text of parsed nodes; templates, arguments and comments have none."""
    return "".join(_node_text(node, hidden) for node in nodes)


def _node_text(node: Any, hidden: Collection[str]) -> str:
    match type(node).__name__:
        case "Text":
            return node.value
        case "HTMLEntity":
            return str(node)  # made a character at the end, when it can no longer be markup
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
        return node.wiki_markup  # begins a line of a list, which goes as a line
    if name in GONE:
        return ""
    if name == "nowiki":
        return _literal(str(node.contents))
    if name == "br":
        return " "
    inside = _shown(node.contents.nodes, hidden) if node.contents is not None else ""
    return f"{_BREAK}{inside}{_BREAK}" if name in BLOCKS else inside


def _tidied(text: str) -> list[str]:
    """Paragraphs without what is left of markup; a single line end is no more than a space."""
    text = _LISTED_OR_TABLE.sub("", text).replace(_BREAK, "\n\n")
    return _prose(_BLANK_LINE.split(text))


def _prose(blocks: Iterable[str]) -> list[str]:
    """Blocks of text a line each: no tags or brackets, characters for entities, no gaps."""
    bare = (_STYLE_OR_SWITCH.sub("", _TAG.sub("", block)) for block in blocks)
    lines = (_closed_up(" ".join(_unescaped(block).split())) for block in bare)
    return [line for line in lines if any(map(str.isalnum, line))]


def _closed_up(line: str) -> str:
    """Without the gaps that templates leave: `Ants ( ; ) , they` is `Ants, they`."""
    line = _OPENING_COMMAS.sub("", _EMPTY_PARENTHESES.sub("", line))
    return _SPACE_BEFORE.sub("", line).strip()


def _unescaped(text: str) -> str:
    return _ENTITY.sub(lambda found: html.unescape(found[0]), text) if "&" in text else text
