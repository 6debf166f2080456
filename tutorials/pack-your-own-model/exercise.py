"""Your BERT without padding: six TODOs are yours.

    python exercise.py

Replace each `raise` by the lines that its TODO asks for, then run again: the next one tells itself.
The sections of the README have the same numbers. `solution.py` has the answers.
"""

# ruff: noqa: F401, F821 (what is missing is the exercise)

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

# TODO 1: Load the model that `args.model` names, as `model`.
raise NotImplementedError("TODO 1: load the model")
print(model)

# TODO 2: Tokenize the texts (`encodings`), take their `lengths` as an array, and count the tokens
# that batches of 16 would have, each padded to its longest text (`padded`).
raise NotImplementedError("TODO 2: count the waste")
print(f"{len(texts)} texts of {lengths.min()} to {lengths.max()} tokens, {lengths.sum()} in all;")
print(f"padded in batches of 16 they are {padded}: {1 - lengths.sum() / padded:.0%} is waste")

# TODO 3: Lay the first three encodings end to end, as `packed`.
raise NotImplementedError("TODO 3: pack three texts")
print(f"three texts are one run of {len(packed.ids)} tokens, cut at {packed.cu_seqlens.tolist()}")

# TODO 4: Plan (`plan`) all lengths into rows of `capacity` tokens, the model's longest sequence.
raise NotImplementedError("TODO 4: plan rows")
print(f"in rows of {capacity}: {plan.pack_count} rows, {plan.efficiency:.1%} full")

# TODO 5: Embed all texts `together`, then each one `alone`; take the largest `difference`.
raise NotImplementedError("TODO 5: check equality")
print(f"a text among others and alone: vectors differ by {difference:.0e} at most")
if difference > 1e-5:
    raise SystemExit("a text's vector depends on its neighbors, and must not")

# TODO 6: Submit the texts one by one to a PackRunner; keep the vectors (`online`) and its `stats`.
raise NotImplementedError("TODO 6: run online")
print(f"one by one: {stats.answered} answers in {stats.batches} batches, {stats.fill:.0%} full")
print(f"the same vectors, within {np.abs(online - together).max():.0e}")
