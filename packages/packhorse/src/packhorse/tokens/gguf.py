"""A tokenizer of the `tokenizers` library from the metadata of a GGUF file.

llama.cpp keeps the vocabulary and the special tokens, not the rules: these follow from the kind of
tokenizer. In a WordPiece vocabulary it writes "▁word" for the beginning of a word and "ing" for
"##ing". Whether a vocabulary is lowercased is seen from its words, as for a `vocab.txt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from packhorse.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

SPACE = "\u2581"
CONTROL, USER_DEFINED = 3, 4  # TokenType of llama.cpp
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
    """The kind of tokenizer: `bert` is WordPiece, `t5` a unigram model, `gpt2` byte pairs."""
    name = metadata.get(f"{PREFIX}model")
    rules = metadata.get(f"{PREFIX}pre")
    if name not in ("bert", "t5") and not (name == "gpt2" and rules in PRE_TOKENIZERS):
        called = f"{name!r}" if name != "gpt2" else f"'gpt2' with the rules {rules!r}"
        raise CheckpointError(
            f"its tokenizer is of the kind {called}, whose rules a GGUF file does not tell; pass "
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
        if number is None:
            continue
        if type(number) is not int or not 0 <= number < len(tokens):
            raise CheckpointError(f"the {role} token has the id {number} of {len(tokens)} tokens")
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


def byte_pairs(metadata: Mapping[str, Any]) -> Library:
    """GPT-2's byte pairs, which RoBERTa, ModernBERT and Qwen have too, each with its own words."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    tokens = _tokens(metadata)
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise CheckpointError("two tokens are spelled alike")
    merges: Any = metadata.get(f"{PREFIX}merges")
    pairs = [tuple(str(merge).split(" ")) for merge in merges or ()]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            raise CheckpointError(f"the merge {' '.join(pair)!r} is not of two tokens to a third")
    rules = metadata[f"{PREFIX}pre"]
    regex = PRE_TOKENIZERS[rules]
    library: Any = Tokenizer(models.BPE(ids, cast("list[tuple[str, str]]", pairs)))
    if rules not in ROBERTA:
        library.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not regex)]
    )
    library.decoder = decoders.ByteLevel()
    special = special_tokens(metadata)
    begins = metadata.get(f"{PREFIX}add_bos_token", rules in ROBERTA)
    ends = metadata.get(f"{PREFIX}add_eos_token", rules in ROBERTA)
    begin = [special["cls_token"]] if begins and "cls_token" in special else []
    end = [special["sep_token"]] if ends and "sep_token" in special else []
    between = end * 2 if rules in ROBERTA else end
    library.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *between, "$B", *end],
        special_tokens=[(token, ids[token]) for token in {*begin, *end}],
    )
    kinds = metadata.get(f"{PREFIX}token_type", [])
    for number, kind in enumerate(list(kinds)[: len(tokens)]):
        token = tokens[number]
        mask = token == special.get("mask_token")  # as there: it takes the space before it
        if kind == CONTROL:
            library.add_special_tokens([AddedToken(token, lstrip=mask, normalized=False)])
        elif kind == USER_DEFINED:
            library.add_tokens([AddedToken(token, normalized=False)])
    return library


# Rules of a byte-pair tokenizer, by the name that llama.cpp gives them → what splits a text before
# GPT-2's bytes; empty: as GPT-2 does.
ROBERTA = ("roberta-bpe", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code")
CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    **dict.fromkeys(ROBERTA, ""),
    "modern-bert": "",
    "qwen2": CASES + r"\p{N}" + REST,
}
XLM_ROBERTA = {"unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(f"it has no vocabulary ({PREFIX}tokens)")
    return tokens  # pyright: ignore[reportUnknownVariableType]
