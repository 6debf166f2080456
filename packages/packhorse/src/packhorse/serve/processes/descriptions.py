"""What a front knows about a model that an engine runs: everything but its weights.

An engine describes its models as JSON; a front makes an `Encoder` of each that tokenizes, refuses
bad input and turns rows of numbers into answers exactly as the engine's own would, and cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from packhorse import device as devices
from packhorse.model.retrieval import MultiSettings, SparseSettings, TokenSide
from packhorse.packing.batch import Packed
from packhorse.runtime.batches import PER_TOKEN, PackedShape
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.tasks import from_ids
from packhorse.serve.hosting import ServedModel
from packhorse.tokens import Tokenizer
from packhorse.tokens.pair_template import PairTemplate


@dataclass(frozen=True, slots=True)
class EmbedderDescription:
    """The properties of the head that makes vectors; stands in for it in a front."""

    pooling: tuple[str, ...]
    normalize: bool
    include_prompt: bool
    is_average: bool


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model of an engine; all fields are JSON values."""

    name: str
    source: str
    tasks: tuple[str, ...]
    adapter: str | None  # in its weights, as passed to --adapter
    place: int  # number of the model in all engines, which no other model ever has
    opened: float
    tokenizer: str  # `Tokenizer.to_json`
    heads: tuple[str, ...]
    labels: tuple[str, ...]
    problem: str
    prompts: Mapping[str, str]
    default_prompt: str | None
    max_length: int
    width: int
    device: str
    dtype: str
    kernel: str
    reason: str
    embedder: Mapping[str, Any] | None
    sparse: Mapping[str, Any] | None
    multi: Mapping[str, Any] | None
    similarity: str
    score_activation: str
    truncate_dim: int | None
    pair_template: Mapping[str, Any] | None
    fingerprint: Mapping[str, Any]  # its parts, with the default prompt
    shape: Mapping[str, Any]  # of a batch, fields of `PackedShape`
    max_waiting_requests: int
    max_waiting_tokens: int
    # By head: the shape of its output per token or per sequence, found by running it once.
    outputs: Mapping[str, Sequence[int]]

    def encoder(self) -> Encoder:
        """Return an encoder that prepares and finishes jobs but cannot run them."""
        embedder = None
        if self.embedder is not None:
            embedder = EmbedderDescription(
                tuple(self.embedder["pooling"]),
                self.embedder["normalize"],
                self.embedder["include_prompt"],
                self.embedder["is_average"],
            )
        return Encoder(
            name=self.name,
            tokenizer=Tokenizer.from_json(self.tokenizer),
            backend=_NoBackend(),
            heads=tuple(self.heads),
            width=self.width,
            labels=tuple(self.labels),
            problem=self.problem,
            prompts=dict(self.prompts),
            default_prompt=self.default_prompt,
            max_length=self.max_length,
            device=torch.device(self.device),
            dtype=devices.parse_dtype(self.dtype),
            kernel=self.kernel,
            reason=self.reason,
            embedder=cast(Any, embedder),
            sparse_settings=None if self.sparse is None else _sparse_settings(self.sparse),
            multi_settings=None if self.multi is None else _multi_settings(self.multi),
            similarity_fn_name=self.similarity,
            score_activation=self.score_activation,
            truncate_dim=self.truncate_dim,
            pair_template=None if self.pair_template is None else _template(self.pair_template),
        )

    def output_size(self, head: str, tokens: int, sequences: int) -> int:
        """Return how many numbers the head gives for a request."""
        rows = tokens if head in PER_TOKEN else sequences
        return rows * prod(self.outputs[head])


class _NoBackend:
    """The backend of a front's encoder."""

    def __call__(self, packed: Packed, heads: Sequence[str], at: Tensor | None = None) -> NoReturn:
        raise RuntimeError("this process has no model; requests are run by an engine process")


def describe(model: ServedModel, place: int) -> ModelDescription:
    """Describe a model that is open in this process, and has this number in it."""
    encoder = model.encoder
    runner = model.runner
    embedder = encoder.embedder
    return ModelDescription(
        name=model.name,
        source=model.source,
        adapter=model.adapter,
        tasks=model.tasks,
        place=place,
        opened=model.opened,
        tokenizer=encoder.tokenizer.to_json(),
        heads=encoder.heads,
        labels=encoder.labels,
        problem=encoder.problem,
        prompts=encoder.prompts,
        default_prompt=encoder.default_prompt,
        max_length=encoder.max_length,
        width=encoder.width,
        device=str(encoder.device),
        dtype=devices.dtype_name(encoder.dtype),
        kernel=encoder.kernel,
        reason=encoder.reason,
        embedder=None
        if embedder is None
        else asdict(
            EmbedderDescription(
                embedder.pooling,
                embedder.normalize,
                embedder.include_prompt,
                embedder.is_average,
            )
        ),
        sparse=_described(encoder.sparse_settings),
        multi=_described(encoder.multi_settings),
        similarity=encoder.similarity_fn_name,
        score_activation=encoder.score_activation,
        truncate_dim=encoder.truncate_dim,
        pair_template=None if encoder.pair_template is None else asdict(encoder.pair_template),
        fingerprint=model.fingerprint_parts.parts,
        shape=asdict(runner.shape),
        max_waiting_requests=runner.max_waiting_requests,
        max_waiting_tokens=runner.max_waiting_tokens,
        outputs=_outputs(encoder, runner.shape),
    )


def _described(settings: SparseSettings | MultiSettings | None) -> dict[str, Any] | None:
    if settings is None:
        return None
    fields = asdict(settings)
    if fields.get("query_weights") is not None:
        fields["query_weights"] = fields["query_weights"].tolist()
    return fields


def _template(fields: Mapping[str, Any]) -> PairTemplate:
    ends = {side: tuple(fields[side]) for side in ("before", "after")}
    return PairTemplate(**{**fields, **ends})


def _sparse_settings(fields: Mapping[str, Any]) -> SparseSettings:
    weights = fields["query_weights"]
    array = None if weights is None else np.array(weights, np.float32)
    return SparseSettings(**{**fields, "skipped": tuple(fields["skipped"]), "query_weights": array})


def _multi_settings(fields: Mapping[str, Any]) -> MultiSettings:
    sides = {
        side: TokenSide(**{**fields[side], "skipped": tuple(fields[side]["skipped"])})
        for side in ("query", "document")
    }
    return MultiSettings(**{**fields, **sides})


def _outputs(encoder: Encoder, shape: PackedShape) -> dict[str, list[int]]:
    heads = ["hidden", *encoder.heads]
    if encoder.embedder is not None:
        heads.append("raw")  # vectors before normalization
    sequence = from_ids([0], 1, 1)
    packed = shape.lay([sequence], [[0]])
    return {
        head: list(encoder.launch(packed, (head,)).wait().outputs[0].shape[1:]) for head in heads
    }
