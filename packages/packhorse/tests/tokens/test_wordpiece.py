"""WordPiece in C against the `tokenizers` library, on any text and with several vocabularies."""

import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.models import WordPiece

from packhorse.native import Obstacle
from packhorse.tokens import wordpiece
from packhorse.tokens.wordpiece import AsciiWordPiece

PIECES = [
    "a",
    "ab",
    "abc",
    "b",
    "hello",
    "world",
    "un",
    "aff",
    "able",
    "A",
    "Ab",
    "Hello",
    "1",
    "12",
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

try:
    wordpiece._functions()
    OBSTACLE = ""
except Obstacle as reason:
    OBSTACLE = str(reason)
pytestmark = pytest.mark.skipif(bool(OBSTACLE), reason=f"the C code cannot be built: {OBSTACLE}")


def library(lowercase: bool = True, prefix: str = "##", longest_word: int = 100) -> Library:
    words = [*SPECIALS, *PIECES, *(prefix + piece for piece in PIECES), *string.punctuation, "ä"]
    vocabulary = {word: id for id, word in enumerate(dict.fromkeys(words))}
    model = WordPiece(
        vocabulary,
        unk_token="[UNK]",
        continuing_subword_prefix=prefix,
        max_input_chars_per_word=longest_word,
    )
    tokenizer = Library(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


KINDS: dict[str, Callable[[], Library]] = {
    "lowercase": library,
    "cased": lambda: library(lowercase=False),
    "another prefix": lambda: library(prefix="@@"),
    "no prefix": lambda: library(prefix=""),
    "short words": lambda: library(longest_word=5),
}
LIBRARIES = {name: make() for name, make in KINDS.items()}
ASCII = st.text(st.characters(max_codepoint=127), max_size=60)
WORDS = st.lists(
    st.sampled_from([*PIECES, *SPECIALS, "xyz", "Unaffable", "HELLO", " ", "\t", "\n", "-", "'"]),
    max_size=12,
).map("".join)
ANY = st.one_of(ASCII, WORDS, st.text(max_size=30))


def tokens_of(library: Library, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = library.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


def ascii_rules(library: Library) -> AsciiWordPiece:
    rules = AsciiWordPiece.of(library)
    assert rules is not None
    return rules


RULES = {} if OBSTACLE else {name: ascii_rules(of) for name, of in LIBRARIES.items()}


@pytest.mark.parametrize("kind", LIBRARIES)
@given(texts=st.lists(ANY, max_size=6))
def test_tokens_and_offsets_are_those_of_the_library(kind: str, texts: list[str]) -> None:
    for text, tokens in zip(texts, RULES[kind].encode(texts), strict=True):
        if tokens is not None:
            ids, offsets = tokens
            assert (ids.tolist(), [tuple(row) for row in offsets.tolist()]) == tokens_of(
                LIBRARIES[kind], text
            )


@pytest.mark.parametrize("kind", LIBRARIES)
@given(texts=st.lists(ANY, min_size=1, max_size=6), room=st.integers(0, 8))
def test_sequences_are_the_tokens_between_special_ones(
    kind: str, texts: list[str], room: int
) -> None:
    ids, sizes, cut = RULES[kind].sequences(texts, before=[2, 4], after=[3], room=room, longest=40)
    assert len(ids) == sizes.clip(0).sum()
    begin = 0
    for text, size, is_cut in zip(texts, sizes.tolist(), cut.tolist(), strict=True):
        if size < 0:
            continue
        expected = tokens_of(LIBRARIES[kind], text)[0]
        assert ids[begin : begin + size].tolist() == [2, 4, *expected[:room], 3]
        assert is_cut == (len(expected) > room)
        begin += size


def test_which_texts_become_sequences() -> None:
    texts = ["hello", "caf\u00e9", "[MASK]", "x" * 41, "a\x00b", "world", "[SE", "P]"]
    sequences = RULES["lowercase"].sequences(texts, before=[2], after=[3], room=9, longest=40)
    # The last two are next to each other, and look like [SEP] together.
    assert (sequences.sizes > 0).tolist() == [True, *[False] * 4, True, False, True]
    expected = [tokens_of(LIBRARIES["lowercase"], word)[0] for word in ("hello", "world", "P]")]
    assert sequences.ids.tolist() == [id for ids in expected for id in (2, *ids, 3)]


def test_the_comparison_can_fail() -> None:
    ids, _ = RULES["cased"].encode(["Hello"])[0] or ([], [])
    assert list(ids) != tokens_of(LIBRARIES["lowercase"], "Hello")[0]


@pytest.mark.parametrize(
    ("text", "is_simple"),
    [
        ("", True),
        ("Hello, unaffable world!\r\n\t12", True),
        ("x" * 101 + " hello", True),  # one unknown word
        ("ab[MASK]", False),  # the library finds special tokens in the text
        ("[mask]", True),  # which this is not
        ("caf\u00e9", False),
        ("a\x00b", False),  # control characters are deleted: offsets shift
        ("a\x0bb", False),
        ("a\x7fb", False),
    ],
)
def test_which_texts_it_takes(text: str, is_simple: bool) -> None:
    # The texts beside it are not affected, whether it is taken or not.
    before, tokens, after = RULES["lowercase"].encode(["hello", text, "world"])
    assert (tokens is not None) is is_simple
    assert before is not None and after is not None
    expected = [tokens_of(LIBRARIES["lowercase"], word)[0] for word in ("hello", "world")]
    assert [before[0].tolist(), after[0].tolist()] == expected


def test_other_tokenizers_are_left_to_the_library() -> None:
    sequence = library()
    sequence.normalizer = normalizers.Sequence([normalizers.BertNormalizer()])
    splits = library()
    splits.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    searched_later = library()
    searched_later.add_tokens([AddedToken("hello world", normalized=True)])
    no_unknown = Library(WordPiece({"a": 0}, unk_token="[UNK]"))
    no_unknown.normalizer = normalizers.BertNormalizer()
    no_unknown.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    for other in (sequence, splits, searched_later, no_unknown):
        assert AsciiWordPiece.of(other) is None


def test_a_vocabulary_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordpiece, "MAX_VOCABULARY_BYTES", 10)
    assert AsciiWordPiece.of(library()) is None


def test_without_a_compiler_the_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Obstacle("no C compiler found; install gcc or clang (for a test)")

    monkeypatch.setattr(wordpiece, "_functions", refuse)
    with pytest.warns(RuntimeWarning, match="no C compiler found"):
        assert AsciiWordPiece.of(library()) is None
