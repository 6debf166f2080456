"""Small random data in the places where public projects look for theirs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SEED = 0
SENTENCE = "packing sequences leaves no padding between them and the horse carries all"
WORDS = SENTENCE.split()
TRAIN = 1600
TEST = 800
IMAGES = ("MNIST", "FashionMNIST")


def images(home: Path) -> None:
    """MNIST's files: the digit of an image is the row that is bright."""
    rng = np.random.default_rng(SEED)
    for name in IMAGES:
        folder = home / ".torch" / "datasets" / name / "raw"
        folder.mkdir(parents=True)
        for part, count in (("train", TRAIN), ("t10k", TEST)):
            labels = rng.integers(0, 10, count, dtype=np.uint8)
            pixels = rng.integers(0, 64, (count, 28, 28), dtype=np.uint8)
            pixels[np.arange(count), 2 * labels + 4] = 255
            for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
                head = bytes([0, 0, 8, array.ndim])
                head += b"".join(size.to_bytes(4, "big") for size in array.shape)
                (folder / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())


def squad(work: Path) -> None:
    """SQuAD's questions as a folder `squad`, which `load_dataset("squad")` takes for the set."""
    rng = np.random.default_rng(SEED)
    folder = work / "squad"
    folder.mkdir()
    for part, count in (("train", 8), ("validation", 4)):
        lines = []
        for number in range(count):
            words = [str(word) for word in rng.choice(WORDS, 30)]
            context = " ".join(words)
            answer = " ".join(words[5:8])
            lines.append(
                {
                    "id": f"{part}{number}",
                    "title": "Packing",
                    "context": context,
                    "question": f"what about {words[3]}",
                    "answers": {"text": [answer], "answer_start": [context.index(answer)]},
                }
            )
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / f"{part}.json").write_text(text, "utf-8")


def vocabulary(folder: Path) -> None:
    """A tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*marks, *letters, *(f"##{letter}" for letter in letters), *sorted(set(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(tokens), "utf-8")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}', "utf-8")


def hub_folder(home: Path, repository: str) -> Path:
    """An empty folder in the hub's cache, as if a repository had been fetched."""
    cache = home / ".cache" / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}"
    commit = "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    folder = cache / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def tokenizer(home: Path) -> None:
    vocabulary(hub_folder(home, "bert-base-uncased"))
    for name in ("bert-large-uncased", "bert-base-cased"):
        vocabulary(hub_folder(home, name))


def answers(home: Path) -> None:
    """A BERT that answers questions, with random weights."""
    import torch
    import transformers

    folder = hub_folder(home, "mrm8488/bert-medium-finetuned-squadv2")
    vocabulary(folder)
    torch.manual_seed(SEED)
    size = len((folder / "vocab.txt").read_text("utf-8").split("\n"))
    config = transformers.BertConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    transformers.BertForQuestionAnswering(config).save_pretrained(folder)
