"""A `collate_fn` for torch's DataLoader that packs the examples of a batch; nothing is padded.

    collate = SequenceCollator(ids="ids", per_token=["labels"])
    loader = DataLoader(examples, batch_sampler=packs, collate_fn=collate, num_workers=2)
    for packed, fields in loader: ...       # fields["labels"] is [T]

Examples are dictionaries. If they are nothing but token ids, `collate_fn=Packed.build` is enough.
For the models and datasets of transformers there is `packhorse.hf.PackedCollator`.

Shapes: T tokens, N examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import (
    default_collate,  # pyright: ignore[reportUnknownVariableType]  (takes a bare list)
)

from packhorse.errors import InputError
from packhorse.packing.batch import Packed


class SequenceCollator:
    """Packs dictionaries of one example each: the ids as a `Packed`, the other fields as tensors.

    ids: the field with the token ids. per_token: fields with one value per token, laid end to end
    as the ids are, [T, …]. All other fields have one value per example and are stacked, [N, …].
    """

    def __init__(self, ids: str = "ids", per_token: Sequence[str] = ()) -> None:
        if isinstance(per_token, str):
            raise InputError(f"per_token is a list of names; pass [{per_token!r}]")
        self.ids = ids
        self.per_token = tuple(per_token)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> tuple[Packed, dict[str, Any]]:
        """The batch, and its other fields by name."""
        if not examples:
            raise InputError("there is no example to pack; pass at least one")
        for index, example in enumerate(examples):
            self._check(example, examples[0], index)
        columns = {name: [example[name] for example in examples] for name in examples[0]}
        packed = Packed.build(columns.pop(self.ids))
        fields: dict[str, Any] = {}
        for name, values in columns.items():
            try:
                fields[name] = packed.join(values) if name in self.per_token else _stack(values)
            except (InputError, RuntimeError, TypeError, ValueError) as error:
                advice = "" if name in self.per_token else "; is it one of per_token?"
                raise InputError(f"field {name!r} cannot be collated: {error}{advice}") from error
        return packed, fields

    def _check(self, example: Any, first: Mapping[str, Any], index: int) -> None:
        if not _is_mapping(example):
            raise InputError(
                f"example {index} is a {type(example).__name__}, not a dictionary; for examples of"
                " token ids alone use collate_fn=Packed.build"
            )
        for name in (self.ids, *self.per_token, *first):
            if name not in example:
                fields = ", ".join(map(repr, example))
                raise InputError(f"example {index} has no field {name!r}; it has {fields}")


def _is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _stack(values: list[Any]) -> Tensor | Any:
    # Python's floats become the default dtype here; default_collate would make them doubles.
    return torch.tensor(values) if isinstance(values[0], Number) else default_collate(values)
