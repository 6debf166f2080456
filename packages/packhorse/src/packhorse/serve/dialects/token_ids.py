"""Token ids in requests to OpenAI's API: of the model's vocabulary, or of OpenAI's (cl100k).

OpenAI's embeddings API accepts token ids, and clients such as LangChain's OpenAIEmbeddings send ids
of OpenAI's own vocabulary unless they are told not to. Most of these ids exist in the model's
vocabulary too, so that reading them as the model's would silently give the vector of another text.
Therefore ids count as the model's own only if every list of a request starts and ends like a text
of the model's tokenizer ([CLS] … [SEP]); a client that tokenizes for another vocabulary adds no
such tokens. Other ids are decoded to text if `--token-ids` names their vocabulary, otherwise
refused.

tiktoken's table of cl100k is a file of lines `base64 id`, known by its SHA-256. The server reads it
from disk and never downloads it. Decoding joins the bytes of the tokens, which needs neither
tiktoken nor its splitting rules.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from base64 import b64decode
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

from packhorse.errors import InputError
from packhorse.runtime.tasks import TaskInput, is_ids
from packhorse.serve.failures import TooLarge
from packhorse.serve.hosting import ServedModel
from packhorse.tokens import Tokenizer

NAME = "cl100k"
URL = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
CACHED_NAME = hashlib.sha1(URL.encode()).hexdigest()  # tiktoken's name for it in its cache
DIGEST = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
CACHE_VARIABLES = ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")


class Cl100kTable:
    """The bytes of each token of cl100k."""

    def __init__(self, tokens: dict[int, bytes]) -> None:
        self.tokens = tokens

    def decode(self, ids: Sequence[int], max_characters: int) -> str:
        """Return the text of these ids; raises `TooLarge` if it is much longer than allowed.

        If a text was split within a character, U+FFFD takes its place, as in tiktoken.
        """
        try:
            parts = [self.tokens[id] for id in ids]
        except KeyError:
            raise InputError(
                f"a token id is not in the vocabulary of {NAME}; send texts instead"
            ) from None
        # Checked before joining: an id of a few bytes may stand for a token of many. A character
        # has at most four bytes, so no text within the limit is refused here.
        if sum(map(len, parts)) > 4 * max_characters:
            raise TooLarge(f"an input has more than {max_characters} characters")
        return b"".join(parts).decode("utf-8", "replace")


def load_table(setting: str) -> Cl100kTable | None:
    """Load the table for `--token-ids`: cl100k (from tiktoken's cache), cl100k=FILE, or none."""
    name, _, file = setting.partition("=")
    if not name:
        return None
    if name != NAME:
        raise InputError(f"token_ids is {setting!r:.80}; it must be {NAME} or {NAME}=FILE")
    return _read_table(Path(file) if file else _tiktoken_cache() / CACHED_NAME)


def _tiktoken_cache() -> Path:
    """Return the directory in which tiktoken keeps downloaded files."""
    for variable in CACHE_VARIABLES:
        if os.environ.get(variable):
            return Path(os.environ[variable])
    return Path(tempfile.gettempdir()) / "data-gym-cache"


@cache
def _read_table(file: Path) -> Cl100kTable:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the table of {NAME} from {file}: {error.strerror}; download {URL} "
            f"and pass --token-ids {NAME}=FILE, or set TIKTOKEN_CACHE_DIR to tiktoken's cache"
        ) from error
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise InputError(
            f"{file} is not the table of {NAME}: its SHA-256 differs; download it again"
        )
    pairs = (line.split() for line in content.splitlines())
    return Cl100kTable({int(id): b64decode(token) for token, id in pairs})


async def decode_foreign(
    model: ServedModel, inputs: Sequence[TaskInput], table: Cl100kTable | None, max_characters: int
) -> list[TaskInput]:
    """Return the inputs, with token ids of another vocabulary decoded to texts."""
    if not any(map(is_ids, inputs)):
        return list(inputs)
    lists = cast("Sequence[Sequence[int]]", inputs)
    start, end = frame(model.encoder.tokenizer)
    if (start or end) and all(_is_framed(ids, start, end) for ids in lists):
        return list(inputs)
    if table is None:
        raise InputError(_refusal(model, [*start, *end]))
    return await asyncio.to_thread(lambda: [table.decode(ids, max_characters) for ids in lists])


def frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special token ids that the tokenizer puts before and after a text."""
    encoding = tokenizer.encode(["a"])[0]
    ids = encoding.ids.tolist()
    text = encoding.spans[0]
    return ids[: text.start], ids[text.stop :]


def _is_framed(ids: Sequence[int], start: list[int], end: list[int]) -> bool:
    if len(ids) < len(start) + len(end):
        return False
    return list(ids[: len(start)]) == start and list(ids[len(ids) - len(end) :]) == end


def _refusal(model: ServedModel, specials: list[int]) -> str:
    tokens = " … ".join(map(model.encoder.tokenizer.token, specials))
    if tokens:
        reason = f"are not framed by {tokens}"
    else:
        reason = "cannot be told apart from another model's"
    return (
        f"the token ids {reason}, so they may not be those of {model.name}; send texts: in "
        "LangChain OpenAIEmbeddings(check_embedding_ctx_length=False), or start the server with "
        "--token-ids cl100k"
    )
