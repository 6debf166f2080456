"""A BERT with the heads its checkpoint holds; asking for another head is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from packhorse.errors import CheckpointError
from packhorse.model.bert import Bert
from packhorse.model.heads import OF_TOKENS, Embed
from packhorse.packing.batch import Packed


class Model(nn.Module):
    """The encoder and its heads: `hidden, vectors = model(packed, "hidden", "embed")`."""

    def __init__(self, bert: Bert, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.bert = bert
        self.heads = nn.ModuleDict(heads)

    def forward(self, packed: Packed, *heads: str, at: Tensor | None = None) -> list[Tensor]:
        """What each of `heads` makes of the batch; "hidden" is the hidden states themselves."""
        return self.apply_heads(self.bert(packed), packed, heads, at)

    def apply_heads(
        self, hidden: Tensor, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """Heads over hidden states; with `at`, heads of tokens see only these of the T tokens.

        "raw" is what the head "embed" gives before it makes vectors one long.
        """
        some = hidden if at is None else hidden[at]
        every = (None if name == "hidden" else self._named(name) for name in heads)
        return [
            some if head is None else head(some if isinstance(head, OF_TOKENS) else hidden, packed)
            for head in every
        ]

    def _named(self, name: str) -> Callable[[Tensor, Packed], Tensor]:
        embed = self.head("embed") if name == "raw" else None
        return embed.raw if isinstance(embed, Embed) else self.head(name)

    def head(self, name: str) -> nn.Module:
        """The head called `name`; never one with random weights."""
        if name not in self.heads:
            have = ", ".join(self.heads) or "none"
            raise CheckpointError(
                f"this checkpoint has no {name!r} head (it has: {have}); "
                f"load a checkpoint that was trained for the task"
            )
        return self.heads[name]
