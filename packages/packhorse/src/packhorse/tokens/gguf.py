"""A tokenizer of the `tokenizers` library from the metadata of a GGUF file.

llama.cpp keeps the vocabulary and the special tokens, not the rules: these follow from the kind of
tokenizer. In a WordPiece vocabulary it writes "▁word" for the beginning of a word and "ing" for
"##ing". Whether a vocabulary is lowercased is seen from its words, as for a `vocab.txt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packhorse.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

SPACE = "\u2581"
CONTROL = 3  # TokenType of llama.cpp
PREFIX = "tokenizer.ggml."
# Role of a special token → the keys of its id; llama.cpp spells the second so, and has called the
# first two by the names of its language models' tokens.
ROLES = {
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id", "separator_token_id", "eos_token_id"),
    "pad": ("padding_token_id",),
    "cls": ("cls_token_id", "bos_token_id"),
    "mask": ("mask_token_id",),
}


def words(metadata: Mapping[str, Any]) -> dict[str, int]:
    """A WordPiece vocabulary as in a `vocab.txt`."""
    tokens = _tokens(metadata)
    kinds = metadata.get(f"{PREFIX}token_type", [])
    result: dict[str, int] = {}
    for number, token in enumerate(tokens):
        is_control = number < len(kinds) and int(kinds[number]) == CONTROL
        if token.startswith(SPACE):
            word = token[len(SPACE) :]
        else:
            word = token if is_control else f"##{token}"
        if result.setdefault(word, number) != number:
            raise CheckpointError(f"the token {word!r} is there twice")
    return result


def kind(metadata: Mapping[str, Any]) -> str:
    """The kind of tokenizer: `bert` is WordPiece, `t5` is SentencePiece's unigram model."""
    name = metadata.get(f"{PREFIX}model")
    if name not in ("bert", "t5"):
        raise CheckpointError(
            f"its tokenizer is of the kind {name!r}, whose rules a GGUF file does not tell; pass "
            f"that of the model it was made of: --vocab tokenizer.json (vocab=)"
        )
    return str(name)


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The spellings of special tokens by role, as a `tokenizer_config.json` has them."""
    tokens = _tokens(metadata)
    spellings: dict[str, str] = {}
    for role, keys in ROLES.items():
        ids = (metadata.get(PREFIX + key) for key in keys)
        number = next((number for number in ids if number is not None), None)
        if number is not None and not 0 <= number < len(tokens):
            raise CheckpointError(f"the {role} token has the id {number} of {len(tokens)} tokens")
        if number is not None:
            spellings[f"{role}_token"] = tokens[number]
    return spellings


def unigram(metadata: Mapping[str, Any]) -> Library:
    """XLM-RoBERTa's tokenizer: SentencePiece's unigram model between <s> and </s>."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    tokens = _tokens(metadata)
    scores = metadata.get(f"{PREFIX}scores", [])
    if len(scores) != len(tokens):
        raise CheckpointError(f"{len(scores)} scores for {len(tokens)} tokens")
    special = special_tokens(metadata)
    names = {role: special.get(f"{role}_token", default) for role, default in XLM_ROBERTA.items()}
    ids = {token: number for number, token in enumerate(tokens)}
    missing = [name for role, name in names.items() if name not in ids and role != "mask"]
    if missing:
        raise CheckpointError(f"there is no {', '.join(missing)} among the tokens")
    pieces = [(token, float(score)) for token, score in zip(tokens, scores, strict=True)]
    library = Tokenizer(models.Unigram(pieces, ids[names["unk"]], byte_fallback=False))
    charsmap = metadata.get(f"{PREFIX}precompiled_charsmap")
    steps: list[Any] = []
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(bytes(bytearray(int(c) & 255 for c in charsmap))))
    if metadata.get(f"{PREFIX}remove_extra_whitespaces", True):
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    library.normalizer = normalizers.Sequence(steps)
    scheme = "always" if metadata.get(f"{PREFIX}add_space_prefix", True) else "never"
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme),
        ]
    )
    begin = names["cls"]
    end = names["sep"]
    library.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} {end} $B {end}",
        special_tokens=[(name, ids[name]) for name in {begin, end}],
    )
    present = [name for name in dict.fromkeys(names.values()) if name in ids]
    library.add_special_tokens(present)  # pyright: ignore[reportUnknownMemberType]  (a bare list)
    return library


XLM_ROBERTA = {"unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(f"it has no vocabulary ({PREFIX}tokens)")
    return tokens  # pyright: ignore[reportUnknownVariableType]
