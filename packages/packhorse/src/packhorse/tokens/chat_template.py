"""Pairs and messages as one text, by a template in Jinja that the user passes.

A template takes messages, each with a role and a content, and gives the text that a model reads.
The two texts of a pair have the roles `query` and `document`; a single text has `user`, a prompt
`system`. Templates run in Jinja's sandbox, as in transformers, and see no object of Python's but
these texts. Those of a model's folder never run: a user passes what was read there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from packhorse.errors import InputError
from packhorse.tokens.tokenizer import Encoding, Tokenizer

Message = Mapping[str, Any]
ROLES = ("query", "document")
NO_LIMIT = 1 << 30
# Templates that take a content apart get a list of typed parts; others get a text.
PARTS = re.compile(r"""content(['"]\])?\[|(\.|\[['"])(type|text)\b""")
REMEDY = (
    "<Query>: {{ (messages | selectattr('role', 'eq', 'query') | first).%s }} "
    "<Document>: {{ (messages | selectattr('role', 'eq', 'document') | first).%s }}"
)


@dataclass(frozen=True)
class ChatTemplate:
    """One template, or several by name, and the special tokens that they may name."""

    source: str | Mapping[str, Any]
    special: Mapping[str, str]

    def encode(
        self,
        tokenizer: Tokenizer,
        entries: Sequence[Any],
        limit: int,
        prompt: str | None = None,
        chat_template: str = "default",
        **options: Any,
    ) -> list[Encoding]:
        """Encode texts, pairs and lists of messages in at most `limit` tokens.

        What the template writes after a text is kept where the text is cut. `options` are for the
        template.
        """
        template = self._compile(chat_template)
        options |= self.special
        system = [self._message("system", prompt)] if prompt else []
        conversations = [system + self._messages(entry) for entry in entries]
        if any({*ROLES} <= {row.get("role") for row in messages} for messages in conversations):
            self._check_pairs(template, options)
        rows: list[Encoding] = []
        for messages in conversations:
            row = _tokens(tokenizer, _render(template, messages, options))
            if len(row) > limit:
                end = self._end(tokenizer, template, messages, options)
                row = _cut(row, end, limit)
            rows.append(row)
        return rows

    def _compile(self, name: str) -> Any:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        source = self.source
        if isinstance(source, Mapping):
            if name not in source:
                raise InputError(
                    f"there is no chat template {name!r}; there are {', '.join(source)}"
                )
            source = source[name]
        if not isinstance(source, str):
            raise InputError(f"a chat template is a text, or texts by name, not {source!r:.80}")
        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        try:
            return environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise InputError(f"the chat template cannot be read: {error}") from error

    def _message(self, role: str, content: Any) -> dict[str, Any]:
        return {"role": role, "content": self._content(content)}

    def _content(self, content: Any) -> Any:
        if self._takes_parts and isinstance(content, str):
            return [{"type": "text", "text": content}]
        return content

    @property
    def _takes_parts(self) -> bool:
        return not isinstance(self.source, str) or PARTS.search(self.source) is not None

    def _messages(self, entry: Any) -> list[dict[str, Any]]:
        if isinstance(entry, str):
            return [self._message("user", entry)]
        rows: list[Any] = list(entry)
        if all(isinstance(row, Mapping) for row in rows):
            return [{**row, "content": self._content(row.get("content"))} for row in rows]
        if len(rows) != len(ROLES):
            raise InputError(f"a text, a pair or messages are expected, not {entry!r:.80}")
        return [self._message(role, text) for role, text in zip(ROLES, rows, strict=True)]

    def _check_pairs(self, template: Any, options: Mapping[str, Any]) -> None:
        """Raise unless both texts of a pair reach the text that the template gives."""
        probes = (("0", "0"), ("1 2", "0"), ("0", "1 2"))
        base, *varied = [_render(template, self._messages(pair), options) for pair in probes]
        lost = [role for role, text in zip(ROLES, varied, strict=True) if text == base]
        if lost:
            field = "content[0].text" if self._takes_parts else "content"
            raise InputError(
                f"the chat template cannot carry a 'query'/'document' pair: it leaves out the "
                f"{' and the '.join(lost)}; pass one that has both roles, such as "
                f"{REMEDY % (field, field)}"
            )

    def _end(
        self,
        tokenizer: Tokenizer,
        template: Any,
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> np.ndarray:
        """The last tokens, which no text changes."""
        first, second = (
            _tokens(tokenizer, _render(template, self._filled(messages, text), options)).ids
            for text in ("0", "1 2 3 4")
        )
        shared = min(len(first), len(second))
        differs = first[::-1][:shared] != second[::-1][:shared]
        count = int(differs.argmax()) if differs.any() else 0
        return first[len(first) - count :]

    def _filled(self, messages: Sequence[Message], text: str) -> list[Message]:
        return [
            row if row.get("role") == "system" else {**row, "content": self._content(text)}
            for row in messages
        ]


def _render(template: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    try:
        return template.render(messages=messages, add_generation_prompt=False, **options)
    except Exception as error:  # a template is a program, and may raise what Python can
        raise InputError(f"the chat template cannot carry this input: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _tokens(tokenizer: Tokenizer, text: str) -> Encoding:
    """The tokens of a text, without those that the tokenizer puts around it."""
    (row,) = tokenizer.encode([text], NO_LIMIT)
    (span,) = row.spans
    return replace(
        row,
        ids=row.ids[span],
        types=row.types[span],
        offsets=row.offsets[span],
        special=row.special[span],
        spans=(slice(0, len(row.ids[span])),),
    )


def _cut(row: Encoding, end: np.ndarray, limit: int) -> Encoding:
    """As many tokens, of which the last are those of the end."""
    kept = slice(0, limit)
    ids = row.ids[kept].copy()
    end = end[-limit:]
    ids[limit - len(end) :] = end
    return replace(
        row,
        ids=ids,
        types=row.types[kept],
        offsets=row.offsets[kept],
        special=row.special[kept],
        spans=(kept,),
        truncated=len(row) - limit,
    )
