"""Text and pairs of texts to token ids and back, for any `tokenizer.json` or an old `vocab.txt`.

The `tokenizers` library splits the text, in parallel and without the GIL; around it: special tokens
laid by the file's own template, truncation that is always reported, overlapping windows, offsets
that are code points of the original text.

Trade-offs. (1) A text that cannot fit is cut *before* it is tokenized: to as many words as there
is room for tokens (and 8 more) within 8 characters a token; only where that gave too few tokens
(long words, runs of blanks) again within 32, then 128. So 2 MB cost no more than their budget and
ordinary text comes out as if tokenized whole. After a cut inside a word (scripts without blanks)
the last 128 characters' tokens are dropped: they might differ in the whole text. What then ends
short of `max_length` says `truncated`. (2) A template is read off an encoded probe rather than
parsed: so any kind of post-processor will do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final, get_args

import numpy as np

from packhorse.errors import CheckpointError, InputError
from packhorse.tokens.files import blaming, find, open_library, parse_object, role_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

Text = str | tuple[str, str]
OnLong = Literal["truncate", "truncate_left", "only_second", "error"]
ON_LONG = get_args(OnLong)

CHARS_PER_TOKEN = (8, 32, 128)  # the budgets a long text is tried with, one after the other
SPARE_CHARS, SPARE_WORDS = 512, 8  # on top: a tiny max_length must not end within the first words
DISTRUST = 128  # more than the longest word of WordPiece: tokens nearer to a cut may be wrong
BLANKS = " \t\r\n"  # not \s: BERT deletes some of those (\x1c), which joins the words around
NO_LIMIT = 1 << 60
SURROGATE = re.compile(r"[\ud800-\udfff]")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """One sequence: what the tokenizer made of a text, a pair, or one window of them."""

    ids: np.ndarray  # int32 [n]
    types: np.ndarray  # uint8 [n]: the template's; BERT gives the second text 1, all else 0
    offsets: np.ndarray  # int32 [n, 2]: code points of the ORIGINAL text; (0, 0) where special
    special: np.ndarray  # bool [n]: put there by the template
    spans: tuple[slice, ...]  # where the tokens of each text lie: one slice, or two for a pair
    truncated: int = 0  # tokens known to be lost, at least 1 where anything was; 0: nothing lost
    start: int = 0  # windows only: how many tokens of the windowed text come before this one's
    prompt_length: int = 0  # leading tokens that pooling leaves out

    def __len__(self) -> int:
        return len(self.ids)


class _Tokens(NamedTuple):
    """One tokenized text, before the template; `cut` when characters were left out."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    cut: bool = False

    def part(self, begin: int, end: int) -> "_Tokens":
        return _Tokens(self.ids[begin:end], self.offsets[begin:end], self.cut)


# For each text and special token in order: the text's number or the token; its type; is it special
_Template = tuple[tuple[int | _Tokens, ...], np.ndarray, np.ndarray]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A vocabulary and its rules. Made by `load`; may be shared between threads."""

    vocab_size: int  # the largest id, plus one
    max_length: int | None  # for calls that name none; None: no limit
    cls_id: int | None
    sep_id: int | None
    pad_id: int | None
    mask_id: int | None
    _library: "Library" = field(repr=False)
    _templates: tuple[_Template, _Template] = field(repr=False)  # of a text, of a pair

    @classmethod
    def load(
        cls, folder_or_file: Path, max_length: int | None = None, vocab_size: int | None = None
    ) -> "Tokenizer":
        """Read `tokenizer.json`, else `vocab.txt`, of a model folder (or that file itself).

        Truncation and padding stored in the file are ignored. A `vocab.txt` becomes BERT's
        WordPiece; its case is `do_lower_case` of the `tokenizer_config.json` beside it, else lower
        unless a word has a letter A to Z. A WordPiece `tokenizer.json` without a post-processor
        gets BERT's template if it knows [CLS] and [SEP]; any other gets no special tokens.
        `max_length` defaults to the folder's `model_max_length`; `vocab_size` is the model's.
        """
        path = find(Path(folder_or_file))
        beside = path.with_name("tokenizer_config.json")
        config = parse_object(beside)[1] if beside.is_file() else {}
        with blaming(CheckpointError, f"{path}: not a tokenizer"):
            library = open_library(path, config)
            templates = _template(library, path, pair=False), _template(library, path, pair=True)
            ids = [role_id(role, config, library) for role in ("cls", "sep", "pad", "mask")]
            size = 1 + max(chain(library.get_vocab().values(), library.encode("", "").ids))
        if vocab_size is not None and size > vocab_size:
            raise CheckpointError(
                f"{path}: a vocabulary that does not fit: {size} tokens, but the model was made "
                f"for {vocab_size}; use the tokenizer it was trained with"
            )
        if max_length is None and isinstance(stored := config.get("model_max_length"), int):
            max_length = stored if 0 < stored < NO_LIMIT else None  # transformers writes 10**30
        return cls(size, max_length, *ids, _library=library, _templates=templates)

    def encode(
        self, texts: Sequence[Text], max_length: int | None = None, on_long: OnLong = "truncate"
    ) -> list[Encoding]:
        """Encode each text or pair in at most `max_length` tokens (default: the tokenizer's).

        Too long: "truncate" drops the end, in a pair that of the longer text first;
        "truncate_left" drops the beginning instead, for which the whole text is tokenized;
        "only_second" drops the end of a pair's second text alone; "error" refuses.
        """
        if on_long not in ON_LONG:
            raise InputError(f"on_long is {on_long!r}; use one of {', '.join(ON_LONG)}")
        rows = _checked(texts)
        rooms = [self._room(len(row) == 2, max_length) for row in rows]
        limits = [NO_LIMIT if on_long == "truncate_left" else room for room in rooms]
        found = self._tokenize(rows, [(limit, limit) for limit in limits])
        return [
            self._join(_fit(tokens, room, on_long, i), before=_count(tokens))
            for i, (tokens, room) in enumerate(zip(found, rooms, strict=True))
        ]

    def windows(
        self, texts: Sequence[Text], max_length: int | None = None, stride: int | None = 0
    ) -> list[list[Encoding]]:
        """Encode each text or pair as one or more windows that share `stride` tokens.

        Nothing is lost: the whole text is tokenized, whatever it costs. Of a pair only the second
        text is windowed; the first, the question, opens every window. A `stride` of None is a
        quarter of what a window holds of the text.
        """
        rows = _checked(texts)
        rooms = [self._room(len(row) == 2, max_length) for row in rows]
        limits = [(room, NO_LIMIT)[-len(row) :] for row, room in zip(rows, rooms, strict=True)]
        found = zip(self._tokenize(rows, limits), rooms, strict=True)
        return [self._slide(tokens, room, stride, i) for i, (tokens, room) in enumerate(found)]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """The text that `ids` stand for, as far as the vocabulary can tell."""
        for id in ids:
            self.token(int(id))  # the library would skip an unknown one
        return self._library.decode([int(id) for id in ids], skip_special_tokens=skip_special)

    def token(self, id: int) -> str:
        """The token with this id."""
        found = self._library.id_to_token(id) if 0 <= id < self.vocab_size else None
        if found is None:
            raise InputError(f"no token has the id {id}; there are {self.vocab_size}")
        return found

    def id(self, token: str) -> int:
        """The id of this token, spelled as in the vocabulary (`##ing`, `Ġthe`)."""
        found = None if SURROGATE.search(token) else self._library.token_to_id(token)
        if found is None:
            raise InputError(f"{token!r} is not a token of this vocabulary")
        return found

    def specials_per(self, pair: bool) -> int:
        """How many special tokens a sequence takes."""
        return sum(not isinstance(piece, int) for piece in self._templates[pair][0])

    def _room(self, pair: bool, max_length: int | None) -> int:
        """How many tokens of text fit in one sequence."""
        limit = self.max_length if max_length is None else max_length
        specials = self.specials_per(pair)
        if limit is not None and limit <= specials:
            raise InputError(f"max_length is {limit}; with special tokens, at least {specials + 1}")
        return NO_LIMIT if limit is None else limit - specials

    def _tokenize(
        self, rows: list[tuple[str, ...]], limits: Sequence[tuple[int, ...]]
    ) -> list[list[_Tokens]]:
        """Each text whole, or at least its limit of tokens where the budgets allow it."""
        done = [[_Tokens([], [])] * len(row) for row in rows]
        left = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
        for chars in CHARS_PER_TOKEN:
            cuts = [_cut(rows[i][j], limits[i][j], chars) for i, j in left]
            parts = [rows[i][j][:end] for (i, j), (end, _) in zip(left, cuts, strict=True)]
            found = self._call(parts, [i for i, _ in left])
            for (i, j), cut, tokens in zip(left, cuts, found, strict=True):
                done[i][j] = _trusted(tokens, cut, len(rows[i][j]))
            lacks = [(i, j) for i, j in left if len(done[i][j].ids) < limits[i][j]]
            left = [(i, j) for i, j in lacks if done[i][j].cut]
            if not left:
                break
        return done

    def _call(self, parts: list[str], owners: list[int]) -> list[Any]:
        """Ask the library; where it fails, again one by one, to name the text it fails on."""
        try:
            with blaming(InputError, f"text {owners[0] if owners else 0} cannot be tokenized"):
                return self._library.encode_batch(parts, add_special_tokens=False)
        except InputError:
            if len(parts) == 1:
                raise
        return [self._call([part], [i])[0] for part, i in zip(parts, owners, strict=True)]

    def _slide(
        self, tokens: list[_Tokens], room: int, stride: int | None, index: int
    ) -> list[Encoding]:
        *question, text = tokens
        room -= _count(question)
        if room < 1:
            raise InputError(_no_room(index))
        stride = room // 4 if stride is None else stride
        if not 0 <= stride < room:
            raise InputError(f"stride is {stride}; text {index} allows 0 to {room - 1}")
        starts = range(0, max(1, len(text.ids) - stride), room - stride)
        return [self._join([*question, text.part(s, s + room)], start=s) for s in starts]

    def _join(self, tokens: list[_Tokens], before: int = 0, start: int = 0) -> Encoding:
        """Lay texts and special tokens as the template says; `before`: tokens before truncation."""
        pieces, types, special = self._templates[len(tokens) == 2]
        parts = [tokens[piece] if isinstance(piece, int) else piece for piece in pieces]
        lengths = [len(part.ids) for part in parts]
        ends = list(accumulate(lengths))
        at = [pieces.index(text) for text in range(len(tokens))]
        offsets = chain.from_iterable(part.offsets for part in parts)
        return Encoding(
            ids=np.fromiter(chain.from_iterable(part.ids for part in parts), np.int32, ends[-1]),
            types=types.repeat(lengths),
            offsets=np.fromiter(chain.from_iterable(offsets), np.int32).reshape(-1, 2),
            special=special.repeat(lengths),
            spans=tuple(slice(ends[i] - lengths[i], ends[i]) for i in at),
            truncated=max(before - _count(tokens), int(any(t.cut for t in tokens))),
            start=start,
        )


def _count(tokens: Sequence[_Tokens]) -> int:
    return sum(len(each.ids) for each in tokens)


def _checked(texts: Sequence[Text]) -> list[tuple[str, ...]]:
    """Each text as a tuple of one or two strings that the library can take."""
    if isinstance(texts, str):
        raise InputError("texts is a single string; pass a list of texts")
    rows: list[tuple[str, ...]] = []
    for i, text in enumerate(texts):
        row = (text,) if isinstance(text, str) else text
        pair = isinstance(row, tuple | list) and len(row) == 2
        if not (isinstance(text, str) or (pair and all(isinstance(part, str) for part in row))):
            raise InputError(f"text {i} is neither a string nor a pair of strings: {text!r:.80}")
        if any(map(SURROGATE.search, row)):
            raise InputError(f"text {i} is not Unicode: it holds half a surrogate pair; remove it")
        rows.append(tuple(row))
    return rows


def _cut(text: str, limit: int, chars: int) -> tuple[int, int]:
    """Where to cut a text that needs `limit` tokens, and up to where its tokens can be trusted."""
    end = SPARE_CHARS + limit * chars
    if len(text) <= end:
        return len(text), len(text)
    words = (limit + SPARE_WORDS) * chars // CHARS_PER_TOKEN[0]
    match = re.compile(f"(?:[{BLANKS}]*+[^{BLANKS}]++){{{words}}}").match(text, 0, end)
    if match and text[match.end()] in BLANKS:
        return match.end(), match.end()
    blank = max(text.rfind(blank, end - DISTRUST, end) for blank in BLANKS)
    return (blank, blank) if blank >= 0 else (end, end - DISTRUST)


def _trusted(found: Any, cut: tuple[int, int], length: int) -> _Tokens:
    offsets = found.offsets
    while cut[0] < length and offsets and offsets[-1][0] >= cut[1]:
        offsets.pop()
    return _Tokens(found.ids[: len(offsets)], offsets, cut[0] < length)


def _fit(tokens: list[_Tokens], room: int, on_long: OnLong, index: int) -> list[_Tokens]:
    """Drop what does not fit, or refuse."""
    total, cut = _count(tokens), any(t.cut for t in tokens)
    if on_long == "error" and (cut or total > room):
        raise InputError(
            f"text {index} is too long: {'over ' * cut}{total} tokens, of which {room} fit; "
            "shorten it, raise max_length or let it be truncated"
        )
    if len(tokens) == 1 or total <= room:
        return [_kept(t, room, on_long) for t in tokens]
    share = len(tokens[0].ids) if on_long == "only_second" else _first_share(*tokens, room=room)
    if on_long == "only_second" and share >= room:
        raise InputError(_no_room(index))
    return [_kept(tokens[0], share, on_long), _kept(tokens[1], room - share, on_long)]


def _kept(tokens: _Tokens, size: int, on_long: OnLong) -> _Tokens:
    begin = max(0, len(tokens.ids) - size) if on_long == "truncate_left" else 0
    return tokens.part(begin, begin + size)


def _first_share(first: _Tokens, second: _Tokens, room: int) -> int:
    """What the first text of a pair keeps when the longer one loses first, as in transformers."""
    # A text that was cut counts as longer than any that was not, but not if it turned out short.
    sizes = [(t.cut and len(t.ids) >= room, len(t.ids)) for t in (first, second)]
    shorter = min(len(first.ids), len(second.ids), room // 2)
    return shorter if sizes[0] <= sizes[1] else room - shorter


def _no_room(index: int) -> str:
    return f"the first text of pair {index} leaves no room for the second; raise max_length"


def _template(library: "Library", path: Path, pair: bool) -> _Template:
    """Read the layout off an encoded probe, whatever the kind of post-processor that made it."""
    probes = ("a", *list(library.get_vocab())[:1000])
    counts = ((p, len(library.encode(p, add_special_tokens=False))) for p in probes)
    probe, count = next((each for each in counts if each[1]), ("", 0))
    made = library.encode(probe, probe if pair else None)
    types: list[int] = []
    pieces: list[int | _Tokens] = []
    for id, type, text in zip(made.ids, made.type_ids, made.sequence_ids, strict=True):
        if text is None or text not in pieces:
            types.append(type)
            pieces.append(_Tokens([id], [(0, 0)]) if text is None else text)
    special = np.array([not isinstance(piece, int) for piece in pieces])
    if not count or len(made) != special.sum() + count * (1 + pair):
        raise CheckpointError(f"{path}: no token for any text, or a text not once in the template")
    return tuple(pieces), np.array(types, np.uint8), special
