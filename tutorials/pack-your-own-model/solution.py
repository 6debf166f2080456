"""Your BERT without padding: the first six sections of the README, done.

    python solution.py
    python solution.py --texts texts.txt --model FOLDER

Without a file the texts are docstrings of Python's own library. The regions between
`# --- solution` and `# --- end` are what `exercise.py` leaves to you.
"""

import argparse
from pathlib import Path

import numpy as np
from docstrings import docstrings

import packhorse
from packhorse.packing import histogram_of

arguments = argparse.ArgumentParser()
arguments.add_argument("--texts", type=Path, help="a file with one text a line")
arguments.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
arguments.add_argument("--most", type=int, default=120, help="texts to take")
args = arguments.parse_args()

lines = args.texts.read_text("utf-8").splitlines() if args.texts else dict(docstrings())
texts = [line for line in lines if line.strip()][: args.most]

# --- solution 1
model = packhorse.load(args.model)
# --- end 1
print(model)

# --- solution 2
encodings = model.tokenizer.encode(texts, max_length=model.max_length)
lengths = np.array([len(encoding.ids) for encoding in encodings])
padded = sum(16 * lengths[i : i + 16].max() for i in range(0, len(lengths), 16))
# --- end 2
print(f"{len(texts)} texts of {lengths.min()} to {lengths.max()} tokens, {lengths.sum()} in all;")
print(f"padded in batches of 16 they are {padded}: {1 - lengths.sum() / padded:.0%} is waste")

# --- solution 3
packed = packhorse.Packed.build(encodings[:3])
# --- end 3
print(f"three texts are one run of {len(packed.ids)} tokens, cut at {packed.cu_seqlens.tolist()}")

# --- solution 4
capacity = model.max_length
plan = packhorse.plan(histogram_of(lengths, capacity=capacity), capacity=capacity)
# --- end 4
print(f"in rows of {capacity}: {plan.pack_count} rows, {plan.efficiency:.1%} full")

# --- solution 5
together = model.embed(texts)
alone = np.concatenate([model.embed([text]) for text in texts])
difference = np.abs(together - alone).max()
# --- end 5
print(f"a text among others and alone: vectors differ by {difference:.0e} at most")
if difference > 1e-5:
    raise SystemExit("a text's vector depends on its neighbors, and must not")

# --- solution 6
with packhorse.PackRunner(model, timeout=0.005) as runner:
    futures = [runner.submit(text) for text in texts]
    online = np.stack([future.result() for future in futures])
    stats = runner.stats()
# --- end 6
print(f"one by one: {stats.answered} answers in {stats.batches} batches, {stats.fill:.0%} full")
print(f"the same vectors, within {np.abs(online - together).max():.0e}")
