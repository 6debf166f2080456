"""Inputs of a class of the script's own: a parser says which tensors they hold.

    class ParseBatch(poptorch.ICustomArgParser):
        def yieldTensors(self, struct): ...
        def reconstruct(self, original_structure, tensor_iterator): ...

    poptorch.registerCustomArgParser(Batch, ParseBatch())

Inputs are taken apart by torch's pytrees, so the class becomes a node of those.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from packhorse.errors import InputError
from packhorse_port.notices import place

_parsers: dict[type, ICustomArgParser] = {}


class ICustomArgParser(abc.ABC):
    """Abstract: how an object is taken apart into tensors, and put together again."""

    @abc.abstractmethod
    def yieldTensors(self, struct: Any) -> Iterable[Tensor]:
        """Every tensor in the object, always in the same order."""

    @abc.abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Any]) -> Any:
        """A new object of the kind, with the tensors that the iterator gives."""


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Take objects of this type apart by the parser; None: as one value again."""
    if arg_parser is not None and not isinstance(arg_parser, ICustomArgParser):
        raise InputError(f"{place()}arg_parser must inherit from ICustomArgParser")
    if arg_data_type in _parsers:
        del _parsers[arg_data_type]
        _pytree._deregister_pytree_node(arg_data_type)
    if arg_parser is None:
        return
    parser = arg_parser
    _parsers[arg_data_type] = parser
    _pytree.register_pytree_node(
        arg_data_type,
        lambda struct: (list(parser.yieldTensors(struct)), struct),
        lambda values, struct: parser.reconstruct(struct, iter(values)),
    )
