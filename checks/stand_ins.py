"""Small stand-ins for the models, texts and scripts that README and the documentation name.

Each function writes files into a folder, under the names that the documents print.
"""

from __future__ import annotations

import bz2
import hashlib
import importlib.util
import json
import shutil
import string
import sys
from pathlib import Path
from types import ModuleType

from packhorse.cli import main

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = [
    "the",
    "horse",
    "mule",
    "carries",
    "sacks",
    "to",
    "market",
    "good",
    "bad",
    "hello",
    "paris",
    "is",
    "capital",
    "of",
    "france",
]
POPTORCH = """
import poptorch
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels=None):
        x = self.layer(x)
        return (x, torch.nn.functional.cross_entropy(x, labels)) if self.training else x


options = poptorch.Options()
options.deviceIterations(2)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
loader = poptorch.DataLoader(options, data, batch_size=4, shuffle=True)
model = Model()
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
training = poptorch.trainingModel(model, options=options, optimizer=optimizer)
for x, labels in loader:
    output, loss = training(x, labels)
training.detachFromDevice()
"""
KERAS = """
import numpy as np
from tensorflow import keras
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(np.zeros((32, 4), "float32"), np.zeros(32, "int32"), batch_size=8)
"""


def load_test_module(place: str) -> ModuleType:
    """A file below tests/, loaded by its path."""
    path = REPOSITORY / "tests" / place
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_model(folder: Path, *heads: str, positions: int = 512) -> Path:
    """A random model with these heads, as Hugging Face stores it."""
    import torch

    from packhorse import attention, checkpoint
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.model.heads import Mlm, PooledLabels, Pooler, TokenLabels
    from packhorse.model.model import Model

    vocabulary = folder.parent / "vocabulary"
    vocabulary.mkdir(exist_ok=True)
    words = write_vocabulary(vocabulary / "vocab.txt")
    config = BertConfig(len(words), 32, 2, 2, 64, max_positions=positions)
    torch.manual_seed(0)
    bert = Bert(config, attention.kernel("reference"))
    pooler = Pooler(config)
    makers = {
        "pooled": lambda: pooler,
        "mlm": lambda: Mlm(config, bert.embed.words, True),
        "nsp": lambda: PooledLabels(config, pooler, 2),
        "span": lambda: TokenLabels(config, 2),
        "classify": lambda: PooledLabels(config, pooler, 2),
        "score": lambda: PooledLabels(config, pooler, 1),
        "tokens": lambda: TokenLabels(config, 3),
    }
    labels = {"classify": ("0", "1"), "score": ("score",), "tokens": ("O", "B-PER", "I-PER")}
    modules = {"classify" if head == "score" else head: makers[head]() for head in heads}
    contents = checkpoint.Checkpoint(
        config,
        Model(bert, modules).eval(),
        vocabulary,
        folder.name,
        positions,
        labels=labels.get(heads[-1], ()),
    )
    return checkpoint.write(folder, contents)


def write_vocabulary(path: Path) -> list[str]:
    """A vocabulary that spells every English text."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters]
    words += [f"##{letter}" for letter in letters]
    path.write_text("\n".join(words) + "\n")
    return words


def write_models(home: Path) -> None:
    """Models with every head, and Google's and MLPerf's TensorFlow checkpoints."""
    (home / "csarron").mkdir()
    write_model(home / "bert-large-uncased", "pooled", "mlm", "nsp")
    write_model(home / "bert-base-uncased", "pooled", "mlm", "nsp")
    write_model(home / "csarron" / "bert-base-uncased-squad-v1", "span")
    write_model(home / "squad-model", "span")
    write_model(home / "ranker", "score")
    write_model(home / "sst2", "classify")
    write_model(home / "ner", "tokens")
    google = home / "uncased_L-12_H-768_A-12"
    assert main(["convert", str(home / "bert-base-uncased"), str(google), "--to", "tf1"]) == 0
    mlperf = home / "tf-checkpoints" / "bs64k_32k_ckpt"
    mlperf.mkdir(parents=True)
    for file in google.glob("bert_model.ckpt.*"):
        shutil.copy(file, mlperf / file.name.replace("bert_model.ckpt", "model.ckpt-28252"))
        shutil.copy(file, home / file.name)
    for folder in (home, mlperf.parent):
        shutil.copy(google / "bert_config.json", folder)
    write_vocabulary(home / "vocab.txt")


def write_texts(home: Path) -> None:
    """Texts as plain lines, documents, JSONL and a dump of Wikipedia."""
    sentences = [f"The {a} carries {b} to the market." for a in WORDS[1:3] for b in WORDS[4:10]]
    documents = ["\n".join(sentences[i % 5 :] + sentences[: i % 3]) for i in range(24)]
    (home / "texts").mkdir()
    (home / "texts" / "part-00000-of-00001").write_text("\n\n".join(documents) + "\n")
    (home / "sample_text.txt").write_text("\n\n".join(documents) + "\n")
    for name in ("texts.txt", "input.txt"):
        (home / name).write_text("\n".join(sentences[:5]) + "\n")
    endings = ("", " It rains.")  # `quantize` wants twenty texts that differ
    lines = (json.dumps({"text": sentence + end}) for sentence in sentences for end in endings)
    (home / "texts.jsonl").write_text("\n".join(lines) + "\n")
    reviews = ["review;stars", *(f"Caf\u00e9: {sentence};5" for sentence in sentences)]
    (home / "reviews.csv").write_text("\n".join(reviews) + "\n", "cp1252")
    (home / "dump.tsv").write_text('text\tn\n5" of rain\t1\n')
    pages = "".join(
        f"<page><title>A {i}</title><ns>0</ns><id>{i}</id><revision><id>1</id>"
        f"<text>{' '.join(document.splitlines())}</text></revision></page>"
        for i, document in enumerate(documents)
    )
    dump = f"<mediawiki>{pages}</mediawiki>"
    (home / "enwiki.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    hashes = [hashlib.md5(document.encode()).hexdigest() for document in documents]
    (home / "eval.md5").write_text("\n".join(hashes[:6]) + "\n")


def write_tasks(home: Path) -> None:
    """SST-2's, MRPC's and SQuAD's files, and pairs of texts that belong together."""
    rows = [f"the horse is {word}\t{i % 2}" for i, word in enumerate(WORDS * 2)]
    for name in ("train.tsv", "dev.tsv"):
        (home / name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    groups = [{"anchor": f"where is the {a}", "positive": f"the {a} is good"} for a in WORDS]
    for name in ("pairs.jsonl", "dev.jsonl"):
        (home / name).write_text("".join(json.dumps(group) + "\n" for group in groups))
    (home / "mrpc").mkdir()
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    pairs = [f"{i % 2}\t1\t2\tthe horse\tthe {word}" for i, word in enumerate(WORDS)]
    for name in ("train.tsv", "dev.tsv"):
        (home / "mrpc" / name).write_text("\n".join([header, *pairs]) + "\n")
    context = "The good horse carries sacks to market."
    questions = [
        {
            "id": word,
            "question": "who carries",
            "answers": [{"text": word, "answer_start": context.index(word)}],
        }
        for word in ("horse", "sacks", "market")
    ]
    squad = {"version": "1.1", "data": [{"paragraphs": [{"context": context, "qas": questions}]}]}
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (home / name).write_text(json.dumps(squad))
