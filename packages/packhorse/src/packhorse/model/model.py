"""`Model`: a BERT with the heads that its checkpoint holds; any other head is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from packhorse.errors import CheckpointError
from packhorse.model.bert import Bert
from packhorse.model.heads import Embed
from packhorse.model.retrieval import HEADS_BY_TOKEN
from packhorse.packing.batch import Packed


class Model(nn.Module):
    """The encoder and its heads: `hidden, vectors = model(packed, "hidden", "embed")`."""

    def __init__(self, bert: Bert, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.bert = bert
        self.heads = nn.ModuleDict(heads)

    def forward(self, packed: Packed, *heads: str, at: Tensor | None = None) -> list[Tensor]:
        """The output of each of `heads` for the batch; "hidden" is the hidden states themselves."""
        return self.apply_heads(self.bert(packed), packed, heads, at)

    def apply_heads(
        self, hidden: Tensor, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """Apply heads to hidden states [T, E]; with `at`, token heads get only these tokens.

        "raw" is the output of the head "embed" before it normalizes the vectors.
        """
        selected = hidden if at is None else hidden[at]
        outputs = []
        for name in heads:
            if name == "hidden":
                outputs.append(selected)
                continue
            head = self._head_function(name)
            outputs.append(head(selected if isinstance(head, HEADS_BY_TOKEN) else hidden, packed))
        return outputs

    def _head_function(self, name: str) -> Callable[[Tensor, Packed], Tensor]:
        embed = self.head("embed") if name == "raw" else None
        return embed.raw if isinstance(embed, Embed) else self.head(name)

    def head(self, name: str) -> nn.Module:
        """The head called `name`; never one with random weights."""
        if name not in self.heads:
            available = ", ".join(self.heads) or "none"
            raise CheckpointError(
                f"this checkpoint has no {name!r} head (it has: {available}); "
                f"load a checkpoint that was trained for the task"
            )
        return self.heads[name]
