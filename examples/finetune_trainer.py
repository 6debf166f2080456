"""Fine-tune a classifier with transformers' Trainer, padded or packed: one line differs.

    pip install 'packhorse[hf]' accelerate
    python examples/finetune_trainer.py --data SST-2/train.tsv            # padded, as ever
    python examples/finetune_trainer.py --data SST-2/train.tsv --packed
    python examples/finetune_trainer.py --data SST-2/train.tsv --compare  # in turns; the speed-up

The file has a header, then a sentence and the number of its class, with a tab between them. Without
one, sentences are made up: of many lengths, half of them saying that something is good.
"""

import argparse
import csv
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from packhorse.checkpoint import resolve
from packhorse.hf import PackedCollator

WARM_UP = 3  # steps that are not timed


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def steps_a_second(self) -> float:
        timed = self.ends[min(WARM_UP, len(self.ends) - 1) - 1 :]
        return (len(timed) - 1) / (timed[-1] - timed[0])


def sentences(file: Path | None, count: int) -> list[tuple[str, int]]:
    """Texts and their classes."""
    if file is not None:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        random.Random(0).shuffle(rows)
        return [(row[0], int(row[1])) for row in rows[:count]]
    rng = random.Random(0)
    nouns, made = ("road", "mule", "harbour", "letter", "bread", "winter"), []
    for number in range(count):
        words = [rng.choice(nouns) for _ in range(round(rng.lognormvariate(2.2, 0.8)))]
        words.insert(rng.randint(0, len(words)), ("bad", "good")[number % 2])
        made.append((" ".join(words), number % 2))
    return made


def train(options: argparse.Namespace, packed: bool, folder: str) -> tuple[float, float]:
    """sequences per second, and the loss that was reached."""
    set_seed(0)  # the head is new, and begins the same in every run
    path = str(resolve(options.model))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    data = [
        {**tokenizer(text, truncation=True, max_length=options.max_length), "label": label}
        for text, label in sentences(options.data, options.steps * options.batch)
    ]
    collator: Any = DataCollatorWithPadding(tokenizer)
    if packed:
        collator = PackedCollator(tokenizer, model)  # the line that changes
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=5e-5,
        bf16=options.bf16,
        train_sampling_strategy="group_by_length" if options.group else "random",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    clock = Clock()
    trainer = Trainer(model, arguments, collator, train_dataset=data, callbacks=[clock])
    loss = trainer.train().training_loss
    return clock.steps_a_second() * options.batch, loss


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune with Trainer, padded or packed.")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="a tab-separated file: sentence, class")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, as a GPU should")
    parser.add_argument("--group", action="store_true", help="sequences of like length together")
    parser.add_argument("--packed", action="store_true", help="no padding")
    parser.add_argument("--compare", action="store_true", help="both in turns, the best of each")
    parser.add_argument("--rounds", type=int, default=3, help="how often to compare")
    options = parser.parse_args(given)
    best: dict[bool, float] = {}
    for turn in range(2 * options.rounds if options.compare else 1):
        packed = bool(turn % 2) if options.compare else options.packed
        with tempfile.TemporaryDirectory() as folder:
            rate, loss = train(options, packed, folder)
        best[packed] = max(rate, best.get(packed, 0.0))
        print(f"{'packed' if packed else 'padded'}: {rate:.1f} sequences/s, loss {loss:.4f}")
    if options.compare:
        print(f"packed is {best[True] / best[False]:.2f} times as fast")


if __name__ == "__main__":
    main()
