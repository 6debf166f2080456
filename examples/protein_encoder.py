"""Train a protein encoder in plain PyTorch, padded and packed: the same gradients, fewer tokens.

    pip install packhorse
    python examples/protein_encoder.py
    python examples/protein_encoder.py --device cuda --bf16 --width 512 --heads 8 --batch 256

The model is no BERT and nothing of it comes from Packhorse: rotary positions, RMS norms, gated
feed-forward layers, a class per residue. Packhorse plans the batches, lays them out, and computes
attention within each protein. Linear layers and norms work on flat tokens as they are.

The proteins are made up, with lengths as skewed as real ones; the class of a residue says whether
its surroundings are mostly hydrophobic, so that the model must look at neighbors.

Shapes: T tokens of a packed batch, B rows and L columns of a padded one, H heads, D head width.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from packhorse.attention import PackedAttention
from packhorse.packing import Packed, SequenceCollator, assign, plan

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
HYDROPHOBIC = "AFILMVWY"
LONGEST = 384
IGNORED = -100  # the label that cross_entropy leaves out

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [..., H, D] to [..., H, D]


def make_proteins(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Random proteins: ids of their residues, and a label for each."""
    rng = np.random.default_rng(seed)
    is_hydrophobic = np.array([letter in HYDROPHOBIC for letter in AMINO_ACIDS])
    proteins = []
    for length in np.clip(rng.lognormal(4.3, 0.7, count).astype(int), 8, LONGEST):
        ids = rng.integers(0, len(AMINO_ACIDS), length)
        around = np.convolve(is_hydrophobic[ids], np.ones(7) / 7, mode="same")
        proteins.append({"ids": ids, "labels": (around > 0.4).astype(np.int64)})
    return proteins


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): x [..., H, D], positions [...]."""
    half = x.shape[-1] // 2
    frequencies = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None, None] * frequencies  # [..., 1, D/2]
    a, b = x.chunk(2, dim=-1)
    sine = angles.sin().to(x.dtype)
    cosine = angles.cos().to(x.dtype)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


class Block(nn.Module):
    """One layer; what attends to what is left to `attention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_gate = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(-3)  # [..., H, D]
        mixed = attention(rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(mixed.flatten(-2))
        gate, up = self.gate(self.before_gate(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ProteinEncoder(nn.Module):
    """Two scores per residue, over flat [T] or padded [B, L] tokens."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(AMINO_ACIDS) + 1, width)  # the last one is padding
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, positions, attention)
        return self.head(self.norm(x))


def packed_loss(model: nn.Module, packed: Packed, labels: Tensor) -> Tensor:
    """The three lines that differ: flat tokens, positions that restart, attention in bounds."""
    attention = PackedAttention(packed)
    scores = model(packed.ids, packed.positions, attention)  # [T, 2]
    return F.cross_entropy(scores, labels)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention over [B, L, H, D], where `mask` [B, 1, 1, L] hides padding."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def padded_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The usual way: rows filled up to the longest."""
    mask = (labels != IGNORED)[:, None, None, :]
    positions = torch.arange(ids.shape[1], device=ids.device)
    scores = model(ids, positions, partial(padded_attention, mask=mask))  # [B, L, 2]
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    """All gradients in one vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(
    model: nn.Module, batch: list[dict[str, np.ndarray]], device: torch.device, bf16: bool = False
) -> float:
    """Print a padded and a packed step on one batch; return how far their gradients differ."""
    packed, fields = SequenceCollator(per_token=["labels"])(batch)
    packed = packed.to(device)
    flat_labels = fields["labels"].to(device)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    ids = pad([torch.from_numpy(protein["ids"]) for protein in batch], padding_value=20)
    labels = pad([torch.from_numpy(protein["labels"]) for protein in batch], padding_value=IGNORED)
    ids = ids.to(device)
    labels = labels.to(device)

    def padded_step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = padded_loss(model, ids, labels)
        return gradient_of(model, loss)

    def packed_step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = packed_loss(model, packed, flat_labels)
        return gradient_of(model, loss)

    expected = padded_step()
    difference = float((packed_step() - expected).norm() / expected.norm())
    # In turns, so that whatever else the machine does meets both.
    times = [(seconds(padded_step, device), seconds(packed_step, device)) for _ in range(3)]
    padded_time, packed_time = np.median(times, axis=0)
    lengths = packed.lengths
    print(f"{len(batch)} proteins of {lengths.min()} to {lengths.max()} residues")
    print(f"padded: {ids.numel():6d} tokens, {1000 * padded_time:6.1f} ms per step")
    print(f"packed: {len(packed.ids):6d} tokens, {1000 * packed_time:6.1f} ms per step")
    print(f"gradients differ by {difference:.1e} of their norm")
    return difference


def train(
    model: nn.Module, proteins: list[dict[str, np.ndarray]], args: argparse.Namespace
) -> list[float]:
    """Epochs over packed batches of at most `args.tokens` tokens; the mean loss of each."""
    lengths = [len(protein["ids"]) for protein in proteins]
    packs = plan(lengths=lengths, capacity=args.tokens)
    filled = packs.plan.efficiency
    print(f"{len(proteins)} proteins in {len(packs)} batches of {args.tokens}, {filled:.0%} full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(args.epochs):
        loader = DataLoader(
            proteins,
            batch_sampler=assign(packs.plan, lengths, seed=epoch),
            collate_fn=SequenceCollator(per_token=["labels"]),
            num_workers=args.workers,
        )
        total = 0.0
        for packed, fields in loader:
            packed = packed.to(args.device)
            labels = fields["labels"].to(args.device)
            with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
                loss = packed_loss(model, packed, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        losses.append(total / len(packs))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--bf16", action="store_true", help="autocast; the fast way on CUDA")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="proteins in the compared batch")
    parser.add_argument("--count", type=int, default=192, help="proteins to train on")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a training batch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = ProteinEncoder(args.width, args.layers, args.heads).to(args.device)
    compare(model, make_proteins(args.batch, seed=1), args.device, args.bf16)
    train(model, make_proteins(args.count), args)


if __name__ == "__main__":
    main()
