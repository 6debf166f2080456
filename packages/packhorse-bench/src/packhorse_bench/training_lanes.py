"""Ways to train on the same sequences (lanes): ours, packed, and transformers as it is used today.

Ours is the step of `packhorse train` itself (`train.step`). A peer gets what a careful user would
give it, and in doubt more, so that the comparison does not flatter us: the same weights, the same
dtype (bf16 beside fp32 weights that the optimizer keeps), the same optimizer and clipping, no
attention dropout where we have none, and batches that are padded before the clock starts. Its loss
is its own: transformers scores the vocabulary at every token, ours at masked ones only, and in bf16
it sums in bf16 too, which is cheaper and shows in the loss's third digit.

`padded` fills every sequence up to the longest that may come. `grouped` sorts all sequences of a
round by length, as transformers' group_by_length does within fifty batches, and pads each batch to
its longest, a multiple of eight. `grouped-graphs` pads to eight widths and compiles each as CUDA
graphs, as ours are. `padding-free` lays sequences end to end as its flattening
collator does, for flash attention, and takes pooled tokens from where sequences begin. A peer's
batches have one number of sequences, so that it is compiled once; the few that are left over at the
end of a round it need not do.

Shapes: n sequences of a batch, L their padded length, T tokens, S sequences of a flat batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from packhorse import executable
from packhorse.optim import LAMB
from packhorse.reports.padded import silence_libraries
from packhorse.train import cost, feed
from packhorse.train.feed import StepBatches
from packhorse.train.job import TrainingJob
from packhorse.train.objectives.stats import evaluating
from packhorse.train.preparing import optimizer_for
from packhorse.train.step import RankGroup, train_step
from packhorse_bench.peers import Unserved
from packhorse_bench.training_sets import IGNORED, TrainingExample, examples, work
from packhorse_bench.training_stage import TrainingStage

OURS = "packhorse, packed"
MULTIPLE = 8  # of a padded length: what tensor cores like
SHAPES = 8  # widths that are captured, as many as torch.compile keeps

Part = dict[str, Tensor]  # what transformers takes
Loss = Callable[[Any, Part], Tensor]  # of a model, or of what compiled it


@dataclass(frozen=True)
class TrainingLane:
    """One way to train, with its model loaded and its batches cut."""

    name: str
    attention: str
    step: Callable[[Any], Tensor]  # learns from one of `steps`; the loss, on the device
    steps: Sequence[Any]
    optimizer: Optimizer
    sequences: int  # of a round
    work: cost.StepWork  # the same
    loss: float  # of the first batch, before anything was learned, without dropout


def ours(stage: TrainingStage) -> TrainingLane:
    """Our lane: packed, by the step of `packhorse train`."""
    job = stage.job
    steps = stage.steps
    places = job.feed.shape.tokens if job.compiled else 0
    kernel = type(job.model.bert.kernel).__name__.lower()
    batches = [batch for step in steps for batch in step.batches]
    return TrainingLane(
        name=OURS + (", compiled" if job.compiled else ""),
        attention=kernel,
        step=lambda step: train_step(job, step, RankGroup()).row[0],
        steps=steps,
        optimizer=job.optimizer,
        sequences=sum(step.sequences for step in steps),
        work=cost.work(batches, places),
        loss=_our_loss(job, steps[0]),
    )


def _our_loss(job: TrainingJob, step: StepBatches) -> float:
    batch = feed.to_device(step.batches[0], job.place.device)
    with evaluating(job.model), torch.compiler.set_stance("force_eager"):
        return float(job.objective.loss(job.model, batch)[0])


def padded(
    stage: TrainingStage, *, compiled: bool = False, grouped: bool = False, graphs: bool = False
) -> TrainingLane:
    """transformers over batches [n, L]."""
    if graphs and stage.job.place.device.type != "cuda":
        raise Unserved("CUDA graphs need a GPU")
    if compiled and executable.cpp_compiler() is None:
        raise Unserved("torch.compile needs a C++ compiler (g++ or clang++)")
    model, optimizer = _opened(stage, "sdpa")
    steps = cut(stage, grouped)
    all_examples = [example for step in steps for chunk in step for example in chunk]
    multiple = -(-stage.longest // SHAPES) if graphs else MULTIPLE

    def width(chunk: Sequence[TrainingExample]) -> int:
        longest = max(len(example.ids) for example in chunk)
        rounded = -(-longest // multiple) * multiple
        return min(rounded, stage.longest) if grouped else stage.longest

    batches = [[pad(chunk, width(chunk)) for chunk in step] for step in steps]
    places = sum(part["input_ids"].numel() for step in batches for part in step)
    first = pad(list(examples(stage.steps[0].batches[0])))
    forward: Any = model
    if graphs:
        forward = torch.compile(model, dynamic=False, mode="reduce-overhead")
    elif compiled:
        forward = torch.compile(model, dynamic=grouped)
    return TrainingLane(
        name=title("grouped" if grouped else "padded", stage.longest, compiled, graphs),
        attention="sdpa",
        step=_stepping(stage, partial(_own_loss, forward), optimizer),
        steps=batches,
        optimizer=optimizer,
        sequences=len(all_examples),
        work=work(all_examples, places),
        loss=_their_loss(stage, model, _own_loss, first),
    )


def padding_free(stage: TrainingStage, attention: str = "flash_attention_2") -> TrainingLane:
    """transformers over flat batches [1, T]."""
    if attention == "flash_attention_2":
        if stage.job.place.device.type != "cuda" or not stage.job.place.half:
            raise Unserved("flash attention runs on CUDA, in bf16 or fp16")
        if find_spec("flash_attn") is None:
            raise Unserved("flash_attn is not installed; pip install flash-attn")
    model, optimizer = _opened(stage, attention)
    batches = [[flatten(batch) for batch in step.batches] for step in stage.steps]
    all_examples = [e for step in stage.steps for batch in step.batches for e in examples(batch)]
    places = sum(part["input_ids"].numel() for step in batches for part in step)
    loss = _flat_pretraining if stage.pretrains else _flat_classification
    return TrainingLane(
        name=title("padding-free", stage.longest),
        attention=attention,
        step=_stepping(stage, partial(loss, model), optimizer),
        steps=batches,
        optimizer=optimizer,
        sequences=len(all_examples),
        work=work(all_examples, places),
        loss=_their_loss(stage, model, loss, batches[0][0]),
    )


PEERS: dict[str, Callable[[TrainingStage], TrainingLane]] = {
    "padded": padded,
    "padded-compiled": partial(padded, compiled=True),
    "grouped": partial(padded, grouped=True),
    "grouped-compiled": partial(padded, compiled=True, grouped=True),
    "grouped-graphs": partial(padded, compiled=True, grouped=True, graphs=True),
    "padding-free": padding_free,
}


def title(peer: str, longest: int, compiled: bool = False, graphs: bool = False) -> str:
    """The name of a peer in the table."""
    way, _, suffix = peer.partition("-")
    ways = {"padded": f"padded to {longest}", "grouped": "grouped by length"}
    ending = ", compiled" if compiled or suffix in ("compiled", "graphs") else ""
    ending += " as CUDA graphs" if graphs or suffix == "graphs" else ""
    return f"transformers, {ways.get(way, peer)}{ending}"


def cut(stage: TrainingStage, grouped: bool = False) -> list[list[list[TrainingExample]]]:
    """The sequences of a round as steps of batches, all batches of one size."""
    all_examples = [e for step in stage.steps for batch in step.batches for e in examples(batch)]
    share = len(all_examples) // len(stage.steps)
    parts = math.ceil(share / max(1, stage.micro_tokens // stage.longest))
    size = share // parts
    used = all_examples[: len(stage.steps) * parts * size]
    if grouped:
        used.sort(key=lambda example: -len(example.ids))
    chunks = [used[begin : begin + size] for begin in range(0, len(used), size)]
    return [chunks[begin : begin + parts] for begin in range(0, len(chunks), parts)]


def pad(chunk: Sequence[TrainingExample], width: int | None = None) -> Part:
    """A padded batch [n, L]; by default L is the longest, rounded up to a multiple."""
    longest = max(len(example.ids) for example in chunk)
    width = width or -(-longest // MULTIPLE) * MULTIPLE
    shape = (len(chunk), width)
    ids, types, mask = np.zeros((3, *shape), np.int64)
    words = np.full(shape, IGNORED)
    for row, example in enumerate(chunk):
        until = len(example.ids)
        ids[row, :until], types[row, :until], mask[row, :until] = example.ids, example.types, 1
        if example.words is not None:
            words[row, :until] = example.words
    labels = np.array([example.label for example in chunk])
    arrays = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
    if chunk[0].words is None:
        arrays["labels"] = labels
    else:
        arrays |= {"labels": words, "next_sentence_label": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def flatten(batch: Any) -> Part:
    """A flat batch [1, T], with the boundaries of its sequences."""
    packed = batch.packed
    all_examples = list(examples(batch))
    bounds = packed.cu_seqlens
    tensors: Part = {
        "input_ids": packed.ids[None],
        "token_type_ids": packed.types[None],
        "position_ids": packed.positions[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "starts": packed.starts.long(),
        "longest": torch.tensor(packed.max_seqlen),
        "labels": torch.tensor([example.label for example in all_examples]),
    }
    words = [example.words for example in all_examples if example.words is not None]
    return tensors | {"words": torch.from_numpy(np.concatenate(words))} if words else tensors


def _own_loss(forward: Any, part: Part) -> Tensor:
    return forward(**part).loss


def _flat_pretraining(model: Any, part: Part) -> Tensor:
    states, pooled = _flat(model, part)
    words, follows = model.cls(states, pooled)
    return F.cross_entropy(words, part["words"]) + F.cross_entropy(follows, part["labels"])


def _flat_classification(model: Any, part: Part) -> Tensor:
    _, pooled = _flat(model, part)
    return F.cross_entropy(model.classifier(model.dropout(pooled)), part["labels"])


def _flat(model: Any, part: Part) -> tuple[Tensor, Tensor]:
    """States [T, E], and what BERT's pooler makes of each sequence's first, [S, E]."""
    names = ("input_ids", "token_type_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k")
    longest = int(part["longest"])  # it never left the host
    inputs = {name: part[name] for name in names}
    bert = model.base_model
    states = bert(**inputs, max_length_q=longest, max_length_k=longest).last_hidden_state[0]
    return states, bert.pooler(states[part["starts"]][:, None])


def _opened(stage: TrainingStage, attention: str) -> tuple[nn.Module, LAMB]:
    """A model of transformers with the job's weights, and the same optimizer over it."""
    import transformers as library

    library.utils.logging.disable_progress_bar()
    kinds = (library.AutoModelForSequenceClassification, library.AutoModelForPreTraining)
    job = stage.job
    with silence_libraries():
        model = kinds[stage.pretrains].from_pretrained(
            stage.folder,
            dtype=torch.float32,
            attn_implementation=attention,
            attention_probs_dropout_prob=job.settings.attention_dropout,
        )
    model = model.train().to(job.place.device)
    return model, optimizer_for(job.settings, model, job.place.half)


def _stepping(
    stage: TrainingStage, loss_of: Callable[[Part], Tensor], optimizer: LAMB
) -> Callable[[Any], Tensor]:
    """A function that runs one step: forward and backward over its parts, then the update.

    It never waits for the device (no `.item()`), or a GPU would idle between steps.
    """
    device = stage.job.place.device
    most = stage.job.settings.clip
    trained = [p for group in optimizer.param_groups for p in group["params"]]

    def step(parts: Sequence[Part]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in parts:
            torch.compiler.cudagraph_mark_step_begin()  # a graph's outputs may be reused from here
            loss = loss_of(_sent(part, device)) / len(parts)
            loss.backward()
            losses.append(loss.detach().clone())  # a graph's output, gone with its next replay
        if most:
            clip_grad_norm_(trained, most)
        optimizer.step()
        return torch.stack(losses).sum()

    return step


def _sent(part: Part, device: torch.device) -> Part:
    return {name: x if name == "longest" else feed.send(x, device) for name, x in part.items()}


def _their_loss(stage: TrainingStage, model: nn.Module, loss: Loss, part: Part) -> float:
    with evaluating(model):
        return float(loss(model, _sent(part, stage.job.place.device)))
