"""Texts with a label for each word: CoNLL's columns, or lists of words in a table.

A file named .conll, .bio, .iob or .txt has a word a line, its label last, and a blank line between
sentences (CoNLL 2003; lines with -DOCSTART- and comments with # in front of a blank are left out,
where # is no word with a label). Of .conllu (Universal Dependencies) the parts of speech are read.
Any table has a list of words (`tokens` or `words`) and one of labels (`ner_tags`, `tags` or
`labels`), as `datasets` saves them, whose class names are used. Labels are in order of name or
number.

A word is one or more tokens. Its label belongs to the first of them; the others are not learned
from, as in transformers' examples. The text of a sentence is its words with blanks between them, so
that a model is trained on what it will read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.data.tables import TableSource, name_of, open_source, read_rows
from packhorse.errors import InputError
from packhorse.tokens.tokenizer import Encoding

WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "label", "pos_tags")
CONLL = (".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt")
UNLABELED = -100  # tokens without a label, as in torch


@dataclass(frozen=True, slots=True)
class TaggedTexts:
    """Sentences as words, with the number of each word's label."""

    words: list[list[str]]
    tags: list[list[int]]
    labels: tuple[str, ...]

    @property
    def texts(self) -> list[str]:
        """The sentences as texts."""
        return [" ".join(words) for words in self.words]


def read_tagged(
    source: TableSource, columns: Sequence[str] = (), labels: Sequence[str] = ()
) -> TaggedTexts:
    """Read sentences. columns: of words and labels. labels: those of a model or a training set."""
    name = name_of(source)
    is_conll = isinstance(source, str | Path) and Path(source).suffix.lower() in CONLL
    source = source if is_conll else open_source(source)
    rows = _conll_rows(Path(str(source))) if is_conll else _table_rows(source, columns, name)
    words: list[list[str]] = []
    named: list[tuple[str, list[Any]]] = []
    for place, sentence, tags in rows:
        if len(sentence) != len(tags):
            raise InputError(f"{place}: {len(sentence)} words and {len(tags)} labels")
        for word in sentence:
            if not isinstance(word, str) or not word or word.split() != [word]:
                raise InputError(f"{place}: {word!r:.40} is no word; words have no blanks in them")
        for tag in tags:
            if type(tag) is not int and not (isinstance(tag, str) and tag.strip()):
                raise InputError(f"{place}: {tag!r:.40} is no label; labels are names or numbers")
        if sentence:
            words.append(sentence)
            named.append((place, tags))
    if not words:
        raise InputError(f"{name or 'the dataset'} holds no sentences")
    classes = _class_names(source, columns)
    every = {tag for _, tags in named for tag in tags}
    numbers = sorted(every) if all(type(tag) is int for tag in every) else ()
    known = tuple(labels) or classes or tuple(map(str, numbers)) or tuple(sorted(map(str, every)))
    if len(known) < 2:
        raise InputError(f"too few labels to tell apart in {name or 'the dataset'}: {known}")
    number = {label: i for i, label in enumerate(known)}
    numbered = [[_number(tag, number, classes, place) for tag in tags] for place, tags in named]
    return TaggedTexts(words, numbered, known)


def _number(tag: Any, number: dict[str, int], classes: Sequence[str], place: str) -> int:
    if type(tag) is int and classes and 0 <= tag < len(classes):
        tag = classes[tag]
    if str(tag) not in number:
        raise InputError(f"{place}: label {tag!r:.40} is none of {', '.join(number)}")
    return number[str(tag)]


def _table_rows(
    source: TableSource, columns: Sequence[str], name: str
) -> Iterator[tuple[str, list[str], list[Any]]]:
    def choose(available: Sequence[str], place: str) -> list[str]:
        return list(_columns(available, columns, place))

    for row in read_rows(source, choose, name=name):
        words_in, tags_in = _columns(list(row.cells), columns, row.place)
        words: Any = row.cells[words_in]
        tags: Any = row.cells[tags_in]
        if isinstance(words, str) and isinstance(tags, str):  # in a csv: blanks between
            words, tags = words.split(), tags.split()
        for column, cell in ((words_in, words), (tags_in, tags)):
            if not isinstance(cell, list | tuple) and not hasattr(cell, "tolist"):
                raise InputError(f"{row.place}: column {column!r} is no list: {cell!r:.40}")
        numbers: list[Any] = tags.tolist() if hasattr(tags, "tolist") else list(tags)
        yield row.place, list(words), numbers


def _columns(available: Sequence[str], named: Sequence[str], place: str) -> tuple[str, str]:
    chosen = list(named) or [
        next((name for name in known if name in available), "") for known in (WORDS, TAGS)
    ]
    if len(chosen) != 2 or not set(chosen) <= set(available):
        raise InputError(
            f"{place}: words and their labels are two columns, such as tokens and ner_tags; name "
            f"them (text): {', '.join(map(repr, available)) or 'none'}"
        )
    return chosen[0], chosen[1]


def _class_names(source: Any, columns: Sequence[str]) -> tuple[str, ...]:
    """The names of the labels, if a `Dataset` has them."""
    features = getattr(source, "features", None) or {}
    name = columns[1] if columns else next((name for name in TAGS if name in features), "")
    feature = features.get(name)
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _conll_rows(path: Path) -> Iterator[tuple[str, list[str], list[Any]]]:
    words: list[str] = []
    tags: list[Any] = []
    begin = 1
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read: {reason}") from error
    is_conllu = path.suffix.lower() == ".conllu"
    # A # with the label of another word is a word, not the beginning of a comment.
    every = {line.split()[-1] for line in lines if line.strip() and not line.startswith("# ")}
    for number, line in enumerate([*lines, ""], 1):
        cells = line.split("\t") if is_conllu and line.strip() else line.split()
        if not cells or cells[0] == "-DOCSTART-":
            yield f"{path}, line {begin}", words, tags
            words, tags, begin = [], [], number + 1
        elif line.startswith("# ") and (is_conllu or cells[-1] not in every):
            continue
        elif is_conllu:
            if len(cells) != 10:
                raise InputError(
                    f"{path}, line {number}: {len(cells)} cells; .conllu has 10, by tabs"
                )
            if cells[0].isdigit():  # else a word that is several, or one that is not written
                words.append(cells[1].replace(" ", "\u00a0"))
                tags.append(cells[3])
        elif len(cells) < 2:
            raise InputError(
                f"{path}, line {number}: {line!r:.40} has no label; it is the last cell"
            )
        else:
            words.append(cells[0])
            tags.append(cells[-1])


def token_targets(words: Sequence[str], tags: Sequence[int], encoding: Encoding) -> np.ndarray:
    """The label of each token of the words' text: that of the word which begins there, else none.

    A word that has no token of its own, because the tokenizer drops it, is not learned from.
    """
    starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])
    # By its last character: the first of a token may be the blank before the word.
    begins, ends = encoding.offsets.T
    word_of = np.searchsorted(starts, ends - 1, "right") - 1
    # Of a word's tokens the first; a special token has no place in the text.
    targets = np.full(len(encoding), UNLABELED, np.int64)
    seen = -1
    for token in np.flatnonzero(~np.asarray(encoding.special, bool)).tolist():
        word = int(word_of[token])
        if word != seen and ends[token] > begins[token]:
            targets[token] = tags[word]
            seen = word
    return targets


# The measure -------------------------------------------------------------------------------------


def entities(labels: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first and last word of each entity, as conlleval reads prefixes B, I, E, S and O.

    An entity that begins with I is one, as in seqeval without its strict mode.
    """
    found: set[tuple[str, int, int]] = set()
    before, kind_before, begin = "O", "", 0
    for number, label in enumerate([*labels, "O"]):
        prefix, kind = label[0], label[1:].split("-", 1)[-1] or "_"
        changes = kind != kind_before
        ended = before in "ES" or (before in "BI" and prefix in "BSO")
        if ended or (before not in "O." and changes):
            found.add((kind_before, begin, number - 1))
        starts = prefix in "BS" or (before in "ESO" and prefix in "EI")
        if starts or (prefix not in "O." and changes):
            begin = number
        before, kind_before = prefix, kind
    return found


def entity_scores(
    truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Precision, recall and F1 of whole entities over all sentences, as seqeval's (micro)."""
    right = guessed = true = 0
    for expected, actual in zip(truth, predicted, strict=True):
        in_truth, in_prediction = entities(expected), entities(actual)
        right += len(in_truth & in_prediction)
        guessed += len(in_prediction)
        true += len(in_truth)
    precision = right / guessed if guessed else 0.0
    recall = right / true if true else 0.0
    total = precision + recall
    f1 = 2 * precision * recall / total if total else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
