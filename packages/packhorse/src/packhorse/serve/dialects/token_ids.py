"""Whose token ids are these? Those of the model, of cl100k, or of nobody we know.

OpenAI's embeddings take token ids, and clients send those of OpenAI's own vocabulary. Read as the
model's they give vectors of another text, with nothing to show it: most ids exist in both. So ids
are the model's own only where all of a request are framed as its tokenizer frames a text ([CLS] …
[SEP]); a client that splits texts for another vocabulary frames nothing. Others are decoded where
`--token-ids` names their vocabulary, and refused where it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from packhorse.errors import InputError
from packhorse.runtime.tasks import TaskInput, is_ids
from packhorse.serve.cl100k import Table
from packhorse.serve.hosting import Hosted
from packhorse.tokens import Tokenizer


async def as_given(
    host: Hosted, inputs: Sequence[TaskInput], table: Table | None, most: int
) -> list[TaskInput]:
    """The inputs with foreign ids as texts of at most so many characters each."""
    if not any(map(is_ids, inputs)):
        return list(inputs)
    lists = cast("Sequence[Sequence[int]]", inputs)
    begin, end = frame(host.encoder.tokenizer)
    if (begin or end) and all(_is_framed(ids, begin, end) for ids in lists):
        return list(inputs)
    if table is None:
        raise InputError(_why(host, [*begin, *end]))
    return await asyncio.to_thread(lambda: [table.decode(ids, most) for ids in lists])


def frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's template puts before and after a text."""
    encoding = tokenizer.encode(["a"])[0]
    ids, text = encoding.ids.tolist(), encoding.spans[0]
    return ids[: text.start], ids[text.stop :]


def _is_framed(ids: Sequence[int], begin: list[int], end: list[int]) -> bool:
    if len(ids) < len(begin) + len(end):
        return False
    return list(ids[: len(begin)]) == begin and list(ids[len(ids) - len(end) :]) == end


def _why(host: Hosted, specials: list[int]) -> str:
    tokens = " … ".join(map(host.encoder.tokenizer.token, specials))
    reason = f"are not framed by {tokens}" if tokens else "cannot be told from another model's"
    return (
        f"the token ids {reason}, so they are not taken for those of {host.name}; send texts: in "
        "LangChain OpenAIEmbeddings(check_embedding_ctx_length=False), or start the server with "
        "--token-ids cl100k"
    )
