"""Disentangled attention (He et al. 2021, DeBERTa): scores of content against distance.

To the product of a query with a key it adds the query with a vector for the key's distance (content
to position) and the key with a vector for the query's distance (position to content). The vectors
are rows of a table that all layers share, projected by each layer, so a kernel gets them with every
call; which row a distance uses is the same for all layers and part of the plan
(`AttentionScope.rows`).

A row is looked up once per distance and not once per pair: a sequence of length L has L² pairs and
2L-1 distances. One product then gives every query against every distance, and the scores of a query
are L neighbors in its row of that product, one place further to the left than those of the query
before: a view, without a copy. The price is twice the multiplications of a lookup afterwards, which
are few next to those of the linear layers; DeBERTa's own code looks up L² numbers instead.

Shapes: H heads, D head width, P rows of the table, n sequences, L tokens of each.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PositionTerms:
    """What a layer multiplies with content to score distances; at least one of the two."""

    keys: Tensor | None  # [P, H, D] multiplied with the queries: content to position
    queries: Tensor | None  # [P, H, D] multiplied with the keys: position to content

    def of_heads(self, heads: slice) -> PositionTerms:
        """The same for some of the heads."""
        keys, queries = self.keys, self.queries
        return PositionTerms(
            None if keys is None else keys[:, heads], None if queries is None else queries[:, heads]
        )

    def scale(self, width: int) -> float:
        """The factor of all scores: the more terms, the smaller."""
        terms = 1 + (self.keys is not None) + (self.queries is not None)
        return (width * terms) ** -0.5


def position_scores(q: Tensor, k: Tensor, terms: PositionTerms, rows: Tensor) -> Tensor:
    """The scores that distances add, scaled: q and k are [H, n, L, D], the result [H, n, L, L].

    rows: [2L-1] of the table, by distance, from a key L-1 before its query to one L-1 after it.
    """
    # Scale the rows of the table: they are fewer numbers than the queries, keys or scores.
    scale = terms.scale(q.shape[-1])
    scores: list[Tensor] = []
    if terms.keys is not None:
        scores.append(_by_distance(q, terms.keys[rows] * scale))
    if terms.queries is not None:
        # Seen from the key, its query lies on the other side.
        scores.append(_by_distance(k, terms.queries[rows.flip(0)] * scale).transpose(-1, -2))
    return scores[0] if len(scores) == 1 else scores[0] + scores[1]


def _by_distance(x: Tensor, vectors: Tensor) -> Tensor:
    """[H, n, L, D] with [2L-1, H, D], a vector per distance; each score where its token is."""
    length = x.shape[2]
    vectors = vectors.permute(1, 2, 0)  # [H, D, 2L-1]
    products = (x.flatten(1, 2) @ vectors).unflatten(1, x.shape[1:3])  # [H, n, L, 2L-1]
    if length == 1:
        return products
    # Token i needs the distances -i … L-1-i, which begin at column L-1-i of its row. Laid end to
    # end, rows that are one number shorter begin one column further to the left each.
    shorter = 2 * length - 2
    flat = products.flatten(-2).narrow(-1, length - 1, length * shorter)
    return flat.unflatten(-1, (length, shorter))[..., :length]
