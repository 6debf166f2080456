"""Texts and pairs of texts to token ids and back, for any `tokenizer.json` or an old `vocab.txt`.

The `tokenizers` library splits the text, in parallel and without the GIL, or `wordpiece`, where its
few rules are enough. This module adds special tokens by the file's own template, truncation that is
always reported, overlapping windows, and offsets that are code points of the original text.

Trade-offs. (1) A text that cannot fit is cut *before* it is tokenized: to as many words as there is
room for tokens (and 8 more), within 8 characters per token. Only if that gives too few tokens (long
words, runs of blanks), it is tried again with 32, then with 128 characters per token. So a text of
2 MB costs no more than its budget, and ordinary text gives the same tokens as if tokenized whole.
After a cut inside a word (scripts without blanks) the tokens of the last 128 characters are
dropped, because they might differ in the whole text. If the result is then shorter than
`max_length`, it is still marked `truncated`. A text that is truncated at its beginning is cut there
in the same way, but only where words end, and tokenized whole if too few tokens are left. (2) A
template is derived from an encoded probe text instead of being parsed, so that it works for every
kind of post-processor.
"""

import hashlib
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, final, get_args

import numpy as np

from packhorse.errors import CheckpointError, InputError
from packhorse.json_types import is_object
from packhorse.tokens.files import (
    find_tokenizer_file,
    open_library,
    parse_object,
    special_token_id,
    wrap_errors,
)
from packhorse.tokens.wordpiece import AsciiWordPiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

Text = str | tuple[str, str]
OnLong = Literal["truncate", "truncate_left", "only_second", "error"]
ON_LONG = get_args(OnLong)

CHARS_PER_TOKEN = (8, 32, 128)  # budgets for a long text, tried one after the other
# Added to every budget, so that a tiny max_length does not end within the first words.
SPARE_CHARS = 512
SPARE_WORDS = 8
DISTRUST = 128  # tokens nearer to a cut may be wrong; more than the longest word of WordPiece
BLANKS = " \t\r\n"  # not \s: BERT deletes some of those (\x1c), which joins the words around them
# BERT's rules make each of these a word of its own, or delete it between words.
BERT_BOUNDARY = re.compile(f"[{BLANKS}{re.escape(string.punctuation)}\u4e00-\u9fff]")
NO_LIMIT = 1 << 60
KEPT_LENGTH = 512  # tokens of a sequence whose layout is kept for others of the same lengths
SURROGATE = re.compile(r"[\ud800-\udfff]")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """One tokenized sequence: a text, a pair, or one window of them."""

    ids: np.ndarray  # int32 [n]
    types: np.ndarray  # uint8 [n]: by the template; BERT gives the second text 1, all else 0
    offsets: np.ndarray  # int32 [n, 2]: code points of the ORIGINAL text; (0, 0) if special
    special: np.ndarray  # bool [n]: added by the template
    spans: tuple[slice, ...]  # the tokens of each text: one slice, or two for a pair
    truncated: int = 0  # tokens known to be lost, at least 1 if anything was; 0: nothing lost
    start: int = 0  # windows only: tokens of the windowed text that come before this window
    prompt_length: int = 0  # leading tokens that pooling leaves out
    key_length: int = 0  # leading tokens that others attend to; 0: all

    def __len__(self) -> int:
        return len(self.ids)


@final
@dataclass(frozen=True, slots=True, eq=False)
class FlatEncodings:
    """Many tokenized texts in a few arrays, for lists where an object per text is too slow."""

    ids: np.ndarray  # int32 [T], of all sequences, end to end
    types: np.ndarray | None  # uint8 [T]; None: all 0
    bounds: np.ndarray  # int64 [N+1]: sequence i is bounds[i]:bounds[i+1]
    truncated: int  # how many sequences do not have all of their text

    def __len__(self) -> int:
        return len(self.bounds) - 1


class _TokenizedText(NamedTuple):
    """One tokenized text, before the template; `cut` if characters were left out."""

    ids: np.ndarray  # int32 [n]
    offsets: np.ndarray  # int32 [n, 2]
    cut: bool = False

    def part(self, begin: int, end: int) -> "_TokenizedText":
        return _TokenizedText(self.ids[begin:end], self.offsets[begin:end], self.cut)


NO_TOKENS = _TokenizedText(np.empty(0, np.int32), np.empty((0, 2), np.int32))


class _Template(NamedTuple):
    """The texts and special tokens of a sequence, in order: one entry for each of them."""

    pieces: tuple[int | _TokenizedText, ...]  # the number of a text (0 or 1), or a special token
    types: tuple[int, ...]  # token types
    special: tuple[bool, ...]
    places: tuple[int, ...]  # of each text among the pieces

    def flat_types(self, *sizes: np.ndarray) -> np.ndarray | None:
        """Token types of sequences whose texts have these sizes; None if all are 0."""
        if not any(self.types):
            return None
        counts = self.counts(*sizes)
        return np.tile(np.array(self.types, np.uint8), len(counts)).repeat(counts.ravel())

    def counts(self, *sizes: np.ndarray) -> np.ndarray:
        """[n, pieces] the tokens of each piece, where the texts have these sizes."""
        counts = np.ones((len(sizes[0]), len(self.pieces)), np.int64)
        counts[:, self.places] = np.stack(sizes, axis=1)
        return counts

    def marked(self, marker: int) -> "_Template":
        """The template with one more special token, behind its first."""
        return _Template(
            (self.pieces[0], _special(marker), *self.pieces[1:]),
            (self.types[0], 0, *self.types[1:]),
            (self.special[0], True, *self.special[1:]),
            tuple(place + 1 for place in self.places),
        )

    def join(self, *texts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
        """The ids of all sequences: of each text the ids, where they begin and how many count."""
        counts = self.counts(*(sizes for _, _, sizes in texts))
        starts = _bounds(counts.ravel())
        ids = np.empty(int(starts[-1]), np.int32)
        starts = starts[:-1].reshape(counts.shape)
        for place, piece in enumerate(self.pieces):
            if isinstance(piece, int):
                source, begins, sizes = texts[piece]
                within = np.arange(int(sizes.sum())) - np.repeat(_bounds(sizes)[:-1], sizes)
                ids[np.repeat(starts[:, place], sizes) + within] = source[
                    np.repeat(begins, sizes) + within
                ]
            else:
                ids[starts[:, place]] = piece.ids[0]
        return ids


class _Cut(NamedTuple):
    """The part of a long text that is tokenized, in characters.

    Tokens that begin outside of the reliable part might be others in the whole text.
    """

    end: int
    reliable_end: int
    begin: int = 0
    reliable_begin: int = 0


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A vocabulary and its rules. Create it with `load`; it may be shared between threads."""

    vocab_size: int  # the largest id, plus one
    max_length: int | None  # for calls that do not set it; None: no limit
    cls_id: int | None
    sep_id: int | None
    pad_id: int | None
    mask_id: int | None
    digest: str  # equal for tokenizers that turn every text into the same tokens
    _library: "Library" = field(repr=False)
    _templates: tuple[_Template, _Template] = field(repr=False)  # for a text, for a pair
    _ascii: AsciiWordPiece | None = field(repr=False)  # None: the library gets every text
    _blanks: str = field(repr=False)  # those of BLANKS that end a word

    @classmethod
    def load(
        cls, folder_or_file: Path, max_length: int | None = None, vocab_size: int | None = None
    ) -> "Tokenizer":
        """Read `tokenizer.json`, else `vocab.txt`, of a model folder (or that file itself).

        Truncation and padding stored in the file are ignored. A `vocab.txt` becomes BERT's
        WordPiece; whether it lowercases is `do_lower_case` of the `tokenizer_config.json` in the
        same folder, or else true unless a word has a letter A to Z. A WordPiece `tokenizer.json`
        without a post-processor gets BERT's template if it has [CLS] and [SEP]; any other gets no
        special tokens. `max_length` defaults to the folder's `model_max_length`; `vocab_size` is
        that of the model.
        """
        path = find_tokenizer_file(Path(folder_or_file))
        config_path = path.with_name("tokenizer_config.json")
        config = parse_object(config_path)[1] if config_path.is_file() else {}
        with wrap_errors(CheckpointError, f"{path}: not a tokenizer"):
            library, rules = open_library(path, config)
            templates = _template(library, path, pair=False), _template(library, path, pair=True)
            ids = [
                special_token_id(role, config, library) for role in ("cls", "sep", "pad", "mask")
            ]
            size = 1 + max(chain(library.get_vocab().values(), library.encode("", "").ids))
        if vocab_size is not None and size > vocab_size:
            raise CheckpointError(
                f"{path}: a vocabulary that does not fit: {size} tokens, but the model has "
                f"{vocab_size}; use the tokenizer it was trained with"
            )
        if max_length is None and isinstance(stored := config.get("model_max_length"), int):
            max_length = stored if 0 < stored < NO_LIMIT else None  # transformers writes 10**30
        digest = _digest(rules, templates)
        ascii = AsciiWordPiece.of(library)
        return cls(
            size,
            max_length,
            *ids,
            digest=digest,
            _library=library,
            _templates=templates,
            _ascii=ascii,
            _blanks=_blanks_between_words(library),
        )

    def copy_library(self) -> "Library":
        """A tokenizer of the `tokenizers` library with these rules, which may be changed."""
        return type(self._library).from_str(self._library.to_str())

    def to_json(self) -> str:
        """Return all of it as text, from which `from_json` makes the same tokenizer elsewhere."""
        special_ids = (self.cls_id, self.sep_id, self.pad_id, self.mask_id)
        fields = (self.vocab_size, self.max_length, *special_ids, self.digest)
        return json.dumps([*fields, self._library.to_str()])

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Make a tokenizer from the text of `to_json`."""
        from tokenizers import Tokenizer as Library

        *fields, source = json.loads(text)
        library = Library.from_str(source)
        path = Path("tokenizer.json")  # for messages; the text was written by a tokenizer of ours
        templates = _template(library, path, pair=False), _template(library, path, pair=True)
        ascii = AsciiWordPiece.of(library)
        blanks = _blanks_between_words(library)
        return cls(*fields, _library=library, _templates=templates, _ascii=ascii, _blanks=blanks)

    def encode(
        self, texts: Sequence[Text], max_length: int | None = None, on_long: OnLong = "truncate"
    ) -> list[Encoding]:
        """Encode each text or pair in at most `max_length` tokens (default: the tokenizer's).

        `on_long`: "truncate" drops the end, in a pair of the longer text first; "truncate_left"
        drops the beginning instead; "only_second" drops the end of a pair's second text only;
        "error" raises.
        """
        if on_long not in ON_LONG:
            raise InputError(f"on_long is {on_long!r}; use one of {', '.join(ON_LONG)}")
        rows = _checked(texts)
        rooms = [self._room(len(row) == 2, max_length) for row in rows]
        limits = [(room, room) for room in rooms]
        tokenized = self._tokenize(rows, limits, from_left=on_long == "truncate_left")
        return [
            self._join(_fit(tokens, room, on_long, i), before=_count(tokens))
            for i, (tokens, room) in enumerate(zip(tokenized, rooms, strict=True))
        ]

    def encode_flat(
        self, texts: Sequence[Text], max_length: int | None = None, marker: int | None = None
    ) -> FlatEncodings:
        """Encode texts, or pairs, as `encode` does, into a few arrays and without offsets.

        Where `wordpiece` is enough for a text, no Python code runs for it alone. A `marker` is a
        token more, behind the special one that every sequence must begin with.
        """
        pair = len(texts) > 0 and not isinstance(texts[0], str)
        template = self._templates[pair]
        if marker is not None:
            template = template.marked(marker)
        room = self._room(pair, max_length)
        if self._ascii is None:
            others = np.ones(len(texts), bool)
            counts = tuple(np.zeros(len(texts), np.int64) for _ in template.places)
            ids, truncated = NO_TOKENS.ids, 0
        else:
            tokenize = self._flat_pairs if pair else self._flat_texts
            ids, counts, truncated = tokenize(self._ascii, texts, template, room)
            others = counts[0] < 0
        if not others.any():
            sizes = template.counts(*counts).sum(axis=1)
            return FlatEncodings(ids, template.flat_types(*counts), _bounds(sizes), truncated)
        try:
            rest = self.encode([texts[i] for i in others.nonzero()[0].tolist()], max_length)
        except InputError:
            self.encode(texts, max_length)  # raises with the right number of the text
            raise
        for number, count in enumerate(counts):
            spans = [encoding.spans[number] for encoding in rest]
            count[others] = [span.stop - span.start for span in spans]
        sizes = template.counts(*counts).sum(axis=1)
        by_library = np.repeat(others, sizes)
        merged = np.empty(len(by_library), np.int32)
        merged[~by_library] = ids
        encoded = [encoding.ids for encoding in rest]
        if marker is not None:
            encoded = [np.insert(sequence, 1, marker) for sequence in encoded]
        merged[by_library] = np.concatenate(encoded)
        truncated += sum(bool(encoding.truncated) for encoding in rest)
        return FlatEncodings(merged, template.flat_types(*counts), _bounds(sizes), truncated)

    def _flat_texts(
        self, ascii: AsciiWordPiece, texts: Sequence[Any], template: _Template, room: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...], int]:
        """The sequences of texts end to end, the tokens of each text, and how many were cut.

        A text that needs the library has -1 tokens and is left out.
        """
        (place,) = template.places
        special = [piece.ids[0] for piece in template.pieces if not isinstance(piece, int)]
        ids, sizes, cut = ascii.sequences(
            texts,
            before=special[:place],
            after=special[place:],
            room=room,
            longest=_longest(room),
        )
        counts = np.where(sizes < 0, -1, sizes - len(special))
        return ids, (counts,), int(cut.sum())

    def _flat_pairs(
        self, ascii: AsciiWordPiece, pairs: Sequence[Any], template: _Template, room: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...], int]:
        """As `_flat_texts`, of pairs: both texts are tokenized whole, then cut."""
        whole = [
            ascii.sequences(
                [pair[number] for pair in pairs],
                before=(),
                after=(),
                room=NO_LIMIT,
                longest=_longest(room),
            )
            for number in range(2)
        ]
        known = (whole[0].sizes >= 0) & (whole[1].sizes >= 0)
        first, second = (text.sizes[known] for text in whole)
        over = first + second > room
        # As `_first_share`: the longer text loses first.
        shorter = np.minimum(np.minimum(first, second), room // 2)
        share = np.where(first <= second, shorter, room - shorter)
        kept = np.where(over, share, first), np.where(over, room - share, second)
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        counts: list[np.ndarray] = []
        for text, size in zip(whole, kept, strict=True):
            begins = _bounds(text.sizes.clip(0))[:-1]
            parts.append((text.ids, begins[known], size))
            count = np.full(len(pairs), -1)
            count[known] = size
            counts.append(count)
        return template.join(*parts), tuple(counts), int(over.sum())

    def windows(
        self, texts: Sequence[Text], max_length: int | None = None, stride: int | None = 0
    ) -> list[list[Encoding]]:
        """Encode each text or pair as one or more windows that share `stride` tokens.

        Nothing is lost: the whole text is tokenized, however long it is. Of a pair only the second
        text is windowed; the first one, the question, begins every window. A `stride` of None is a
        quarter of the tokens of text that a window holds.
        """
        rows = _checked(texts)
        rooms = [self._room(len(row) == 2, max_length) for row in rows]
        # The windowed text, which is the last one, has no limit; the question must fit.
        limits = [
            (room, NO_LIMIT) if len(row) == 2 else (NO_LIMIT,)
            for row, room in zip(rows, rooms, strict=True)
        ]
        tokenized = self._tokenize(rows, limits)
        return [
            self._slide(tokens, room, stride, i)
            for i, (tokens, room) in enumerate(zip(tokenized, rooms, strict=True))
        ]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """The text of `ids`, as far as the vocabulary can restore it."""
        for id in ids:
            self.token(int(id))  # raises for an unknown id, which the library would skip
        return self._library.decode([int(id) for id in ids], skip_special_tokens=skip_special)

    def token(self, id: int) -> str:
        """The token with this id."""
        token = self._library.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise InputError(f"no token has the id {id}; there are {self.vocab_size}")
        return token

    def id(self, token: str) -> int:
        """The id of this token, spelled as in the vocabulary (`##ing`, `Ġthe`)."""
        id = self.find(token)
        if id is None:
            raise InputError(f"{token!r} is not a token of this vocabulary")
        return id

    def find(self, token: str) -> int | None:
        """The id of this token, spelled as in the vocabulary; None if there is none."""
        return None if SURROGATE.search(token) else self._library.token_to_id(token)

    def word_spans(self, text: str) -> np.ndarray:
        """Return for each token of a text the characters of the word it belongs to, [n, 2].

        Words are those of the library's pre-tokenizer. A token of no word keeps its own characters.
        """
        (encoding,) = self._call([text], [0])
        spans = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        words: list[int | None] = encoding.word_ids
        for i, word in enumerate(words):
            if word is not None:
                first.setdefault(word, i)
                last[word] = i
        widened = spans.copy()
        for i, word in enumerate(words):
            if word is not None:
                widened[i] = spans[first[word], 0], spans[last[word], 1]
        return widened

    def continues_word(self, encoding: Encoding, text: str) -> np.ndarray:
        """Return for each token of a text whether it continues the word of the token before it.

        WordPiece marks such tokens (`##ing`). Other vocabularies mark none, or only the tokens
        after a blank; for these a word goes on up to the next blank, as in transformers, so that
        punctuation belongs to its word. An unknown token is a word.
        """
        model = self._library.model
        tokens = [self.token(id) for id in encoding.ids.tolist()]
        prefix: str | None = getattr(model, "continuing_subword_prefix", None)
        if prefix:
            return np.array([token.startswith(prefix) for token in tokens], bool)
        unknown = getattr(model, "unk_token", None) or "<unk>"  # SentencePiece has no field for it
        starts: list[int] = encoding.offsets[:, 0].tolist()
        return np.array(
            [
                start > 0 and token != unknown and " " not in text[start - 1 : start + 1]
                for token, start in zip(tokens, starts, strict=True)
            ],
            bool,
        )

    @property
    def starts_special(self) -> bool:
        """Whether every sequence begins with a special token."""
        return all(template.special[0] for template in self._templates)

    def specials_per(self, pair: bool) -> int:
        """The number of special tokens in a sequence."""
        return sum(self._templates[pair].special)

    def _room(self, pair: bool, max_length: int | None) -> int:
        """The number of tokens of text that fit in one sequence."""
        limit = self.max_length if max_length is None else max_length
        specials = self.specials_per(pair)
        if limit is not None and limit <= specials:
            raise InputError(
                f"max_length is {limit}; with special tokens it must be at least {specials + 1}"
            )
        return NO_LIMIT if limit is None else limit - specials

    def _tokenize(
        self,
        rows: list[tuple[str, ...]],
        limits: Sequence[tuple[int, ...]],
        from_left: bool = False,
    ) -> list[list[_TokenizedText]]:
        """Tokenize each text whole, or up to its limit of tokens as far as the budgets allow.

        With `from_left` these are the last tokens of a text.
        """
        budgets = CHARS_PER_TOKEN
        cut_text = partial(_cut, blanks=self._blanks)
        if from_left:
            budgets = (*CHARS_PER_TOKEN, NO_LIMIT)
            cut_text = partial(_cut_left, boundary=self._boundary())
        result = [[NO_TOKENS] * len(row) for row in rows]
        # (row, text of the row) of all that still has to be tokenized, with a larger budget.
        pending = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
        for chars in budgets:
            cuts = [cut_text(rows[i][j], limits[i][j], chars) for i, j in pending]
            parts = [
                rows[i][j][cut.begin : cut.end] for (i, j), cut in zip(pending, cuts, strict=True)
            ]
            tokens = self._split(parts, [i for i, _ in pending])
            for (i, j), cut, text in zip(pending, cuts, tokens, strict=True):
                result[i][j] = _reliable(text, cut, len(rows[i][j]))
            pending = [
                (i, j)
                for i, j in pending
                if result[i][j].cut and len(result[i][j].ids) < limits[i][j]
            ]
            if not pending:
                break
        return result

    def _boundary(self) -> re.Pattern[str] | None:
        """A pattern for characters that end a word and never vanish, whatever is beside them."""
        normalizer: Any = self._library.normalizer
        is_bert = (
            type(self._library.pre_tokenizer).__name__ == "BertPreTokenizer"
            and type(normalizer).__name__ == "BertNormalizer"
            and normalizer.handle_chinese_chars
        )
        if is_bert:
            return BERT_BOUNDARY
        return re.compile(f"[{self._blanks}]") if self._blanks else None

    def _split(self, parts: list[str], owners: list[int]) -> list[_TokenizedText]:
        """Tokenize texts whole, each by `wordpiece` if it can be, else by the library."""
        simple = self._ascii.encode(parts) if self._ascii else [None] * len(parts)
        others = [index for index, tokens in enumerate(simple) if tokens is None]
        if not others:
            return [_TokenizedText(*tokens) for tokens in simple if tokens]
        encodings = self._call([parts[i] for i in others], [owners[i] for i in others])
        by_library = dict(zip(others, encodings, strict=True))
        return [
            _TokenizedText(*tokens) if tokens else _from_library(by_library[index])
            for index, tokens in enumerate(simple)
        ]

    def _call(self, parts: list[str], owners: list[int]) -> list[Any]:
        """Call the library; if it fails, again for each text, to name the one it fails on."""
        try:
            with wrap_errors(InputError, f"text {owners[0] if owners else 0} cannot be tokenized"):
                return self._library.encode_batch(parts, add_special_tokens=False)
        except InputError:
            if len(parts) == 1:
                raise
        return [self._call([part], [i])[0] for part, i in zip(parts, owners, strict=True)]

    def _slide(
        self, tokens: list[_TokenizedText], room: int, stride: int | None, index: int
    ) -> list[Encoding]:
        """Windows of `room` tokens over the last text."""
        *question, text = tokens
        room -= _count(question)
        if room < 1:
            raise InputError(_no_room(index))
        stride = room // 4 if stride is None else stride
        if not 0 <= stride < room:
            raise InputError(f"stride is {stride}; text {index} allows 0 to {room - 1}")
        starts = range(0, max(1, len(text.ids) - stride), room - stride)
        return [
            self._join([*question, text.part(start, start + room)], start=start) for start in starts
        ]

    def _join(self, tokens: list[_TokenizedText], before: int = 0, start: int = 0) -> Encoding:
        """Join texts and special tokens by the template; `before`: tokens before truncation."""
        pieces, types, special, places = self._templates[len(tokens) == 2]
        parts = [tokens[piece] if isinstance(piece, int) else piece for piece in pieces]
        lengths = tuple(len(part.ids) for part in parts)
        # Long sequences are not kept: thousands of them would fill the memory.
        make_layout = _layout if sum(lengths) <= KEPT_LENGTH else _layout.__wrapped__
        layout = make_layout(types, special, places, lengths)
        return Encoding(
            ids=np.concatenate([part.ids for part in parts]),
            types=layout.types,
            offsets=np.concatenate([part.offsets for part in parts]),
            special=layout.special,
            spans=layout.spans,
            truncated=max(before - _count(tokens), int(any(text.cut for text in tokens))),
            start=start,
        )


class _Layout(NamedTuple):
    """What all sequences of a template with the same lengths share."""

    types: np.ndarray
    special: np.ndarray
    spans: tuple[slice, ...]


@lru_cache(4096)
def _layout(
    types: tuple[int, ...],
    special: tuple[bool, ...],
    places: tuple[int, ...],
    lengths: tuple[int, ...],
) -> _Layout:
    ends = list(accumulate(lengths))
    layout = _Layout(
        np.array(types, np.uint8).repeat(lengths),
        np.array(special, bool).repeat(lengths),
        tuple(slice(ends[place] - lengths[place], ends[place]) for place in places),
    )
    layout.types.flags.writeable = False
    layout.special.flags.writeable = False
    return layout


def _bounds(sizes: np.ndarray) -> np.ndarray:
    """Where each item begins, and the end: [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _count(tokens: Sequence[_TokenizedText]) -> int:
    return sum(len(text.ids) for text in tokens)


def _checked(texts: Sequence[Text]) -> list[tuple[str, ...]]:
    """Each text as a tuple of one or two strings that the library accepts."""
    if isinstance(texts, str):
        raise InputError("texts is a single string; pass a list of texts")
    rows: list[tuple[str, ...]] = []
    for i, text in enumerate(texts):
        row = (text,) if isinstance(text, str) else text
        if not (isinstance(text, str) or _is_pair(row)):
            raise InputError(f"text {i} is neither a string nor a pair of strings: {text!r:.80}")
        if any(map(SURROGATE.search, row)):
            raise InputError(f"text {i} is not Unicode: it has half of a surrogate pair; remove it")
        rows.append(tuple(row))
    return rows


def _is_pair(value: Any) -> bool:
    """Whether a user's input is two strings, whatever its type says."""
    parts = cast("Sequence[object]", value) if isinstance(value, tuple | list) else ()
    return len(parts) == 2 and all(isinstance(part, str) for part in parts)


def _blanks_between_words(library: "Library") -> str:
    """Those of BLANKS at which a tokenizer divides a text, before it divides the words.

    SentencePiece's divide at a space alone, where their normalization does not make one of the
    others, and some divide nowhere. How their words become tokens depends on all of a word.
    """
    if library.pre_tokenizer is None:
        return ""

    def pieces(text: str) -> int:
        normalized = library.normalizer.normalize_str(text) if library.normalizer else text
        return len(library.pre_tokenizer.pre_tokenize_str(normalized))

    return "".join(blank for blank in BLANKS if pieces(f"a{blank}b") > pieces("ab"))


def _cut(text: str, limit: int, chars: int, blanks: str = BLANKS) -> _Cut:
    """Cut a text of which `limit` tokens are needed, within `chars` characters per token.

    blanks: the characters that end a word.
    """
    end = SPARE_CHARS + limit * chars
    if len(text) <= end:
        return _Cut(len(text), len(text))
    if not blanks:
        return _Cut(end, end - DISTRUST)
    # With the first budget, as many words as tokens; with a larger one, more in proportion.
    words = (limit + SPARE_WORDS) * chars // CHARS_PER_TOKEN[0]
    # Possessive quantifiers: without them a text that does not match would be tried again and
    # again with shorter words.
    match = re.compile(f"(?:[{blanks}]*+[^{blanks}]++){{{words}}}").match(text, 0, end)
    if match and text[match.end()] in blanks:
        return _Cut(match.end(), match.end())
    blank = max(text.rfind(blank, end - DISTRUST, end) for blank in blanks)
    return _Cut(blank, blank) if blank >= 0 else _Cut(end, end - DISTRUST)


def _cut_left(text: str, limit: int, chars: int, boundary: re.Pattern[str] | None) -> _Cut:
    """Cut a text of which the last `limit` tokens are needed, where a word ends.

    How a word is divided depends on how it begins. So a text is not cut within one, as `_cut` may,
    but kept whole if there is no boundary near.
    """
    begin = len(text) - SPARE_CHARS - limit * chars
    near = begin + SPARE_CHARS // 2
    match = boundary.search(text, begin, near) if boundary and begin > 0 else None
    if match is None:
        return _Cut(len(text), len(text))
    # A boundary may be a part of a token of several words, such as [MASK], or of several blanks.
    return _Cut(len(text), len(text), match.start(), match.start() + DISTRUST)


def _from_library(encoding: Any) -> _TokenizedText:
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return _TokenizedText(np.array(encoding.ids, np.int32), offsets)


def _reliable(tokens: _TokenizedText, cut: _Cut, length: int) -> _TokenizedText:
    """The tokens of a text of `length` characters that a cut cannot have changed."""
    if cut.begin:
        offsets = tokens.offsets + np.int32(cut.begin)
        reliable = offsets[:, 0] >= cut.reliable_begin
        first = int(reliable.argmax()) if reliable.any() else len(offsets)
        return _TokenizedText(tokens.ids[first:], offsets[first:], True)
    if cut.end == length:
        return tokens
    count = len(tokens.ids)
    while count and tokens.offsets[count - 1, 0] >= cut.reliable_end:
        count -= 1
    return _TokenizedText(tokens.ids[:count], tokens.offsets[:count], True)


def _fit(
    tokens: list[_TokenizedText], room: int, on_long: OnLong, index: int
) -> list[_TokenizedText]:
    """Drop what does not fit, or raise."""
    total = _count(tokens)
    is_cut = any(text.cut for text in tokens)
    if on_long == "error" and (is_cut or total > room):
        count = f"over {total}" if is_cut else f"{total}"
        raise InputError(
            f"text {index} is too long: {count} tokens, of which {room} fit; "
            "shorten it, raise max_length or let it be truncated"
        )
    if len(tokens) == 1 or total <= room:
        return [_truncated(text, room, on_long) for text in tokens]
    share = len(tokens[0].ids) if on_long == "only_second" else _first_share(*tokens, room=room)
    if on_long == "only_second" and share >= room:
        raise InputError(_no_room(index))
    return [
        _truncated(tokens[0], share, on_long),
        _truncated(tokens[1], room - share, on_long),
    ]


def _longest(room: int) -> int:
    """Characters of a text that `_cut` leaves whole."""
    return SPARE_CHARS + room * CHARS_PER_TOKEN[0]


def _truncated(tokens: _TokenizedText, size: int, on_long: OnLong) -> _TokenizedText:
    begin = max(0, len(tokens.ids) - size) if on_long == "truncate_left" else 0
    return tokens.part(begin, begin + size)


def _first_share(first: _TokenizedText, second: _TokenizedText, room: int) -> int:
    """Tokens that a pair's first text keeps; the longer text loses first, as in transformers."""
    # A text that was cut counts as longer than any that was not, unless it turned out short: of
    # its real length only a lower bound is known.
    sizes = [(text.cut and len(text.ids) >= room, len(text.ids)) for text in (first, second)]
    shorter = min(len(first.ids), len(second.ids), room // 2)
    return shorter if sizes[0] <= sizes[1] else room - shorter


def _no_room(index: int) -> str:
    return f"the first text of pair {index} leaves no room for the second; raise max_length"


def _digest(rules: dict[str, Any], templates: tuple[_Template, _Template]) -> str:
    """A digest of what decides the tokens of a text.

    The rules are those of the file, not as the library would write them, which may change with its
    version. The templates stand for the post-processor, of which there are several kinds.
    """
    decisive = {name: rules.get(name) for name in ("model", "normalizer", "pre_tokenizer")}
    vocabulary = rules["model"].get("vocab")
    if is_object(vocabulary):
        # In the order of ids: sorting the keys of 30,000 words takes ten times as long.
        words = sorted(vocabulary, key=vocabulary.__getitem__)
        ids = sorted(vocabulary.values())
        numbered = [words, [] if ids == list(range(len(ids))) else ids]
        decisive["model"] = {**rules["model"], "vocab": numbered}
    decisive["added_tokens"] = sorted(rules.get("added_tokens") or (), key=str)
    decisive["layouts"] = [
        (
            [piece if isinstance(piece, int) else piece.ids.tolist() for piece in pieces],
            list(types),
        )
        for pieces, types, *_ in templates
    ]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _special(id: int) -> _TokenizedText:
    return _TokenizedText(np.array([id], np.int32), np.zeros((1, 2), np.int32))


def _template(library: "Library", path: Path, pair: bool) -> _Template:
    """Derive the layout from an encoded probe text, whatever the kind of post-processor."""
    probes = ("a", *list(library.get_vocab())[:1000])
    # The first probe that gives any tokens: a vocabulary need not have a token for "a".
    counts = ((text, len(library.encode(text, add_special_tokens=False))) for text in probes)
    probe, count = next((item for item in counts if item[1]), ("", 0))
    encoding = library.encode(probe, probe if pair else None)
    types: list[int] = []
    pieces: list[int | _TokenizedText] = []
    for id, type, text in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
        if text is None or text not in pieces:
            types.append(type)
            pieces.append(_special(id) if text is None else text)
    special = tuple(not isinstance(piece, int) for piece in pieces)
    texts = 2 if pair else 1
    if not count or len(encoding) != sum(special) + count * texts:
        raise CheckpointError(
            f"{path}: it has no token for any text, or its template does not have each text once"
        )
    places = tuple(pieces.index(text) for text in range(texts))
    return _Template(tuple(pieces), tuple(types), special, places)
