"""BERT's pretraining examples in plain Python, token by token, as the reference code makes them.

`bench data` measures the fast path of `packhorse.data` against this module, and tests compare their
results. It follows the definition (Devlin et al. 2018; MLPerf's reference data) literally: text is
cleaned character by character, words are matched piece by piece against the vocabulary, segments
grow and shrink token by token, positions are shuffled and taken one by one, and packs are joined
list by list. Nothing is made slower than the definition requires.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from packhorse.data.packed.masking import Recipe

LONGEST_WORD = 100  # characters; longer ones are unknown
CLS = "[CLS]"
SEP = "[SEP]"
MASK = "[MASK]"
UNKNOWN = "[UNK]"

Tokens = list[str]
Tokenize = Callable[[list[str]], list[Tokens]]  # the sentences of a document


@dataclass(frozen=True, slots=True)
class ListExample:
    """One sequence."""

    tokens: Tokens
    types: list[int]
    random_next: bool
    masked_at: list[int]
    masked: Tokens


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences in one row, each list filled up with zeros."""

    ids: list[int]
    types: list[int]
    positions: list[int]
    members: list[int]  # which of the row's sequences a token belongs to, from 1
    masked_at: list[int]
    masked_ids: list[int]
    next_labels: list[int]


def word_pieces(vocabulary: dict[str, int], lower: bool = True) -> Tokenize:
    """BERT's tokenizer in Python alone."""

    def tokenize(document: list[str]) -> list[Tokens]:
        return [
            [piece for word in _words(text, lower) for piece in _pieces(word, vocabulary)]
            for text in document
        ]

    return tokenize


def _words(text: str, lower: bool) -> Iterable[str]:
    for word in _with_cjk_apart(_cleaned(text)).split():
        yield from _at_punctuation(_without_accents(word.lower()) if lower else word)


def _cleaned(text: str) -> str:
    characters = []
    for char in text:
        category = unicodedata.category(char)
        if char in "\t\n\r" or category == "Zs":
            characters.append(" ")
        elif char not in "\0\ufffd" and category[0] != "C":
            characters.append(char)
    return "".join(characters)


def _with_cjk_apart(text: str) -> str:
    characters = []
    for char in text:
        if _is_cjk(ord(char)):
            characters += (" ", char, " ")
        else:
            characters.append(char)
    return "".join(characters)


def _without_accents(word: str) -> str:
    pieces = []
    for char in unicodedata.normalize("NFD", word):
        if unicodedata.category(char) != "Mn":
            pieces.append(char)
    return "".join(pieces)


def _is_cjk(code: int) -> bool:
    return (
        0x4E00 <= code <= 0x9FFF
        or 0x3400 <= code <= 0x4DBF
        or 0x20000 <= code <= 0x2A6DF
        or 0x2A700 <= code <= 0x2B73F
        or 0x2B740 <= code <= 0x2B81F
        or 0x2B820 <= code <= 0x2CEAF
        or 0xF900 <= code <= 0xFAFF
        or 0x2F800 <= code <= 0x2FA1F
    )


def _at_punctuation(word: str) -> list[str]:
    parts: list[str] = []
    inside = False
    for char in word:
        if _is_punctuation(char):
            parts.append(char)
            inside = False
        elif inside:
            parts[-1] += char
        else:
            parts.append(char)
            inside = True
    return parts


def _is_punctuation(char: str) -> bool:
    code = ord(char)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(char)[0] == "P"


def _pieces(word: str, vocabulary: dict[str, int]) -> Tokens:
    """The longest piece that fits, again and again; a word that cannot be made up is unknown."""
    if len(word) > LONGEST_WORD:
        return [UNKNOWN]
    pieces: Tokens = []
    begin = 0
    while begin < len(word):
        prefix = "##" if begin else ""
        for end in range(len(word), begin, -1):
            piece = prefix + word[begin:end]
            if piece in vocabulary:
                pieces.append(piece)
                begin = end
                break
        else:
            return [UNKNOWN]
    return pieces


def tokenized(documents: Iterable[list[str]], tokenize: Tokenize) -> list[list[Tokens]]:
    """The tokens of each sentence of each document; empty sentences and documents are left out."""
    all_tokens = [[tokens for tokens in tokenize(document) if tokens] for document in documents]
    return [document for document in all_tokens if document]


def make(
    documents: list[list[Tokens]], vocabulary: dict[str, int], recipe: Recipe, seed: int
) -> list[ListExample]:
    """All examples of these documents, shuffled."""
    rng = random.Random(seed)
    words = list(vocabulary)
    examples = [
        example
        for _ in range(recipe.duplicates)
        for number in range(len(documents))
        for example in _of_document(documents, number, recipe, words, rng)
    ]
    rng.shuffle(examples)
    return examples


def _of_document(
    documents: list[list[Tokens]], number: int, recipe: Recipe, words: Tokens, rng: random.Random
) -> Iterable[ListExample]:
    document = documents[number]
    room = recipe.max_length - 3
    target = rng.randint(2, room) if rng.random() < recipe.short_probability else room
    chunk: list[Tokens] = []
    length = 0
    following = 0  # index of the next sentence
    while following < len(document):
        chunk.append(document[following])
        length += len(document[following])
        following += 1
        if following < len(document) and length < target:
            continue
        split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        first = [token for sentence in chunk[:split] for token in sentence]
        is_random = len(chunk) == 1 or rng.random() < 0.5
        if is_random:
            second = _from_another(documents, number, target - len(first), rng)
            following -= len(chunk) - split  # the rest of the chunk begins the next example
        else:
            second = [token for sentence in chunk[split:] for token in sentence]
        truncate(first, second, room, rng)
        yield _example(first, second, is_random, recipe, words, rng)
        chunk = []
        length = 0


def _from_another(
    documents: list[list[Tokens]], number: int, need: int, rng: random.Random
) -> Tokens:
    """At least `need` tokens of another document, if it has as many, from a random sentence on."""
    chosen = number
    while chosen == number and len(documents) > 1:
        chosen = rng.randint(0, len(documents) - 1)
    tokens: Tokens = []
    for sentence in documents[chosen][rng.randint(0, len(documents[chosen]) - 1) :]:
        tokens.extend(sentence)
        if len(tokens) >= need:
            break
    return tokens


def truncate(first: Tokens, second: Tokens, room: int, rng: random.Random) -> None:
    """Drop tokens of the longer segment, from its front or its back, until both fit."""
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()


def _example(
    first: Tokens,
    second: Tokens,
    is_random: bool,
    recipe: Recipe,
    words: Tokens,
    rng: random.Random,
) -> ListExample:
    tokens = [CLS, *first, SEP, *second, SEP]
    types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    masked_at, masked = mask(tokens, recipe, words, rng)
    return ListExample(tokens, types, is_random, masked_at, masked)


def mask(
    tokens: Tokens, recipe: Recipe, words: Tokens, rng: random.Random
) -> tuple[list[int], Tokens]:
    """Mask tokens in place; returns their indices in order, and the original tokens."""
    groups: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if recipe.whole_words and token.startswith("##") and tokens[place - 1] not in (CLS, SEP):
            groups[-1].append(place)
        else:
            groups.append([place])
    rng.shuffle(groups)
    count = max(1, round(len(tokens) * recipe.mask_probability))
    count = min(count, recipe.max_predictions or count)
    taken: list[tuple[int, str]] = []
    for group in groups:
        if len(taken) >= count:
            break
        if len(taken) + len(group) > count:
            continue
        for place in group:
            taken.append((place, tokens[place]))
            if rng.random() < 0.8:
                tokens[place] = MASK
            elif rng.random() < 0.5:
                tokens[place] = words[rng.randint(0, len(words) - 1)]
    taken.sort()
    return [place for place, _ in taken], [token for _, token in taken]


def lay(
    examples: Sequence[ListExample],
    packs: Iterable[Sequence[int]],
    vocabulary: dict[str, int],
    capacity: int,
) -> list[Pack]:
    """Rows of `capacity` tokens; `packs` are indices into `examples`."""
    rows = []
    for pack in packs:
        row = Pack([], [], [], [], [], [], [])
        for member, index in enumerate(pack, 1):
            example = examples[index]
            row.masked_at.extend(len(row.ids) + place for place in example.masked_at)
            row.masked_ids.extend(vocabulary[token] for token in example.masked)
            row.ids.extend(vocabulary[token] for token in example.tokens)
            row.types.extend(example.types)
            row.positions.extend(range(len(example.tokens)))
            row.members.extend([member] * len(example.tokens))
            row.next_labels.append(int(example.random_next))
        for values in (row.ids, row.types, row.positions, row.members):
            values.extend([0] * (capacity - len(values)))
        rows.append(row)
    return rows
