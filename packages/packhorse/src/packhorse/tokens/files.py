"""The files of a tokenizer: `tokenizer.json` or an old `vocab.txt`, and `tokenizer_config.json`.

A GGUF file of llama.cpp has a vocabulary of its own (`tokens.gguf`).

A regular expression in a file would run on users' texts and may backtrack forever, so only those in
`KNOWN_REGEXES` are accepted. Every problem is an error that names the file.

Follows BERT's WordPiece (Devlin et al. 2018) and the `tokenizer.json` format of tokenizers 0.21+.
"""

import json
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.errors import CheckpointError, PackhorseError
from packhorse.gguf import MAGIC, read_header
from packhorse.json_types import is_object
from packhorse.tokens import gguf

if TYPE_CHECKING:
    # The class of the `tokenizers` library. Ours, which is built around it, has the same name; so
    # an object of this one is called `library` here and in the other modules.
    from tokenizers import Tokenizer as Library

KNOWN_REGEXES = (
    " {2,}",  # ALBERT, CamemBERT, DeBERTa-v3, XLM-R, T5
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    *(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for numbers in (r"\p{N}", r"\p{N}{1,3}")  # Qwen 2 and 3; Llama 3, EuroBERT
    ),
)
# By the role of a special token: its usual spellings, BERT's first.
SPELLINGS = {
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
}
MAX_FILE_BYTES = 1 << 27  # the largest vocabularies in use are a quarter of this


@contextmanager
def wrap_errors(kind: type[PackhorseError], problem: str) -> Generator[None]:
    """Raise errors of the library as `kind`; its Rust panics are not even an `Exception`."""
    try:
        yield
    except (PackhorseError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt, SystemExit
        raise kind(f"{problem}: {error}") from error


def find_tokenizer_file(path: Path) -> Path:
    """The tokenizer's file: `path` itself, or the one in the folder `path`."""
    for file in (path, path / "tokenizer.json", path / "vocab.txt"):
        if file.is_file():
            return file
    raise CheckpointError(
        f"{path}: no tokenizer.json or vocab.txt there; copy those of the model there"
    )


def all_files(path: Path) -> dict[str, Path]:
    """The files of a tokenizer, by their names in a model's folder."""
    file = find_tokenizer_file(path)
    files = {"tokenizer.json" if file.suffix == ".json" else "vocab.txt": file}
    config = file.with_name("tokenizer_config.json")
    if config.is_file():
        files[config.name] = config
    return files


def read_text(path: Path) -> str:
    """The file's text, if it is not too large to be a vocabulary."""
    with wrap_errors(CheckpointError, f"{path}: cannot be read"):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: over {MAX_FILE_BYTES >> 20} MiB; not a vocabulary")
        return path.read_bytes().decode("utf-8-sig")


def parse_object(path: Path) -> tuple[str, dict[str, Any]]:
    """Read a JSON object, refusing duplicate keys and unknown regular expressions."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):  # another parser might use the other value
            duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{path}: {duplicate!r} comes twice in one object")
        if isinstance(regex := unique.get("Regex"), str) and regex not in KNOWN_REGEXES:
            raise CheckpointError(
                f"{path}: the regular expression {regex!r:.80} is not one of the known harmless "
                "ones and might never finish on some text; the file is refused"
            )
        return unique

    text = read_text(path)
    with wrap_errors(CheckpointError, f"{path}: not JSON"):
        parsed = json.loads(text, object_pairs_hook=check)
    if not is_object(parsed):
        raise CheckpointError(f"{path}: holds a {type(parsed).__name__}, not a JSON object")
    return text, parsed


def spellings(role: str, config: dict[str, Any]) -> tuple[str, ...]:
    """The possible spellings of a special token; that of the configuration, if any, is first."""
    value = config.get(f"{role}_token")
    value = value.get("content") if is_object(value) else value
    return (value, *SPELLINGS[role]) if isinstance(value, str) else SPELLINGS[role]


def special_token_id(role: str, config: dict[str, Any], library: "Library") -> int | None:
    """The id of the special token for `role` ("cls", "sep", …), or None if there is none."""
    ids = (library.token_to_id(name) for name in spellings(role, config))
    return next((id for id in ids if id is not None), None)


def _vocabulary(path: Path) -> dict[str, int]:
    """The tokens of a `vocab.txt`, one per line; the line number is the id."""
    vocabulary: dict[str, int] = {}
    for i, line in enumerate(read_text(path).rstrip("\r\n").split("\n")):
        token = line.removesuffix("\r")
        if not token or "\0" in token:
            raise CheckpointError(f"{path}: line {i + 1} is {'binary' if token else 'empty'}")
        if (first := vocabulary.setdefault(token, i)) != i:
            raise CheckpointError(f"{path}: {token!r} is on line {first + 1} and on line {i + 1}")
    return vocabulary


def _has_capitals(vocabulary: dict[str, int], config: dict[str, Any]) -> bool:
    special = {name for role in SPELLINGS for name in spellings(role, config)}
    return any(re.search("[A-Z]", token) for token in vocabulary.keys() - special)


def is_cased(path: Path) -> bool:
    """Does a `vocab.txt` distinguish capital letters from small ones?"""
    return _has_capitals(_vocabulary(path), {})


def wordpiece_vocabulary(path: Path) -> list[str]:
    """A WordPiece `tokenizer.json` as the lines of a `vocab.txt`; empty if it is not WordPiece."""
    rules = open_library(path, {})[1] if is_gguf(path) else parse_object(path)[1]
    model = rules.get("model")
    if not is_object(model) or model.get("type") != "WordPiece":
        return []
    numbered: dict[int, str] = {number: word for word, number in model["vocab"].items()}
    return [numbered[n] for n in range(len(numbered))] if max(numbered) < len(numbered) else []


def is_gguf(path: Path) -> bool:
    """Is this a file of llama.cpp, by its first bytes?"""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_settings(path: Path) -> dict[str, Any]:
    """A `tokenizer_config.json` for the tokenizer of a GGUF file."""
    with path.open("rb") as file:
        special = gguf.special_tokens(read_header(file).metadata)
    return {"tokenizer_class": "PreTrainedTokenizerFast", **special}


def _from_gguf(path: Path, config: dict[str, Any]) -> "Library":
    with path.open("rb") as file:
        metadata = read_header(file).metadata
    kind = gguf.kind(metadata)
    if kind != "bert":
        return gguf.unigram(metadata) if kind == "t5" else gguf.byte_pairs(metadata)
    return _wordpiece(path, gguf.words(metadata), {**gguf.special_tokens(metadata), **config})


def _wordpiece(path: Path, vocabulary: dict[str, int], config: dict[str, Any]) -> "Library":
    import tokenizers

    names = {role: spellings(role, config)[0] for role in SPELLINGS}
    missing = [n for role, n in names.items() if n not in vocabulary and role != "mask"]
    if missing:
        raise CheckpointError(f"{path}: it has no {', '.join(missing)}: not a BERT vocabulary")
    special = [name for name in names.values() if name in vocabulary]
    model = tokenizers.models.WordPiece(vocabulary, unk_token=names["unk"])
    library = tokenizers.Tokenizer(model)
    library.normalizer = tokenizers.normalizers.BertNormalizer(
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", not _has_capitals(vocabulary, config))),
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece()
    library.add_special_tokens(special)  # pyright: ignore[reportUnknownMemberType]  (a bare list)
    return library


def open_library(path: Path, config: dict[str, Any]) -> tuple["Library", dict[str, Any]]:
    """The tokenizer in a file, and its rules in the format of `tokenizer.json`.

    WordPiece without a template gets BERT's, as in transformers.
    """
    from tokenizers import Tokenizer, models, processors

    if path.suffix == ".json":  # parsed first: the library would compile any regular expression
        text, rules = parse_object(path)
        library = Tokenizer.from_str(text)
    else:
        read = _from_gguf(path, config) if is_gguf(path) else None
        library = read or _wordpiece(path, _vocabulary(path), config)
        rules = json.loads(library.to_str())
    library.no_truncation()
    library.no_padding()
    library.encode("\U00013000")  # a hieroglyph: raises if the unknown token is missing
    sep, cls = (special_token_id(role, config, library) for role in ("sep", "cls"))
    has_no_template = library.post_processor is None and isinstance(library.model, models.WordPiece)
    if has_no_template and sep is not None and cls is not None:
        ends = [(str(library.id_to_token(id)), id) for id in (sep, cls)]
        library.post_processor = processors.BertProcessing(*ends)
    return library, rules
