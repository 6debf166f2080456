"""From a ported BERT to a packed one: train it as for an IPU, then run it without padding.

    packhorse port bert_exercise.py

A small BERT learns to tell texts that name an animal from others; its texts are made here. Replace
each `raise` by the lines that its TODO asks for; `bert_solution.py` has the answers.
"""

# ruff: noqa: F401, F821 (what is missing is the exercise)

import random
import time
from pathlib import Path

import numpy as np
import poptorch
import torch
import transformers

import packhorse

LONGEST = 64
random.seed(3)
torch.manual_seed(3)
ANIMALS = ["horse", "donkey", "mule", "camel", "ox"]
OTHERS = ["cart", "road", "load", "rope", "hill", "town", "river", "bridge"]
folder = Path("bert")
folder.mkdir(exist_ok=True)
marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
(folder / "vocab.txt").write_text("\n".join([*marks, *ANIMALS, *OTHERS]), "utf-8")


def text():
    """A text of 3 to 60 words, most of them short, and whether an animal is in it."""
    words = random.choices(OTHERS, k=min(60, 3 + int(random.expovariate(1 / 10))))
    label = random.randint(0, 1)
    if label:
        words[random.randrange(len(words))] = random.choice(ANIMALS)
    return " ".join(words), label


texts, labels = zip(*(text() for _ in range(256)), strict=True)
tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
padded = tokenizer(
    list(texts), padding="max_length", max_length=LONGEST, truncation=True, return_tensors="pt"
)
config = transformers.BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
)
bert = transformers.BertForSequenceClassification(config)


class WithLoss(torch.nn.Module):
    """BERT as PopTorch wants it: tensors in, the loss out."""

    def __init__(self):
        super().__init__()
        self.bert = bert

    def forward(self, ids, mask, labels=None):
        output = self.bert(input_ids=ids, attention_mask=mask, labels=labels)
        return (output.logits, output.loss) if self.training else output.logits


model = WithLoss()
data = torch.utils.data.TensorDataset(
    padded["input_ids"], padded["attention_mask"], torch.tensor(labels)
)
opts = poptorch.Options().deviceIterations(4)
loader = poptorch.DataLoader(opts, data, batch_size=16, shuffle=True)
optimizer = poptorch.optim.AdamW(model.parameters(), lr=2e-3)
training = poptorch.trainingModel(model, opts, optimizer)
for _epoch in range(6):
    for ids, mask, kinds in loader:
        _, loss = training(ids, mask, kinds)
training.detachFromDevice()
print(f"loss: {loss:.3f}")

model.eval()
inference = poptorch.inferenceModel(model)
inference(padded["input_ids"], padded["attention_mask"])  # the first call is slower
begin = time.process_time()
before = inference(padded["input_ids"], padded["attention_mask"]).numpy()
seconds_before = time.process_time() - begin

# TODO 1: Save BERT and its tokenizer.
raise NotImplementedError("TODO 1: save BERT and its tokenizer")

# TODO 2: Classify with packhorse, and time it.
raise NotImplementedError("TODO 2: classify with packhorse, and time it")

# TODO 3: The share of padding.
raise NotImplementedError("TODO 3: the share of padding")

names = list(bert.config.id2label.values())
chosen = np.array([names.index(answer.label) for answer in answers])
agree = float((before.argmax(1) == chosen).mean())
right = float((chosen == np.array(labels)).mean())
print(f"{padding:.0%} of the ported script's tokens were padding")
print(f"the same answers: {agree:.1%}; right: {right:.1%}")
print(f"seconds of the processor: {seconds_before:.3f} padded, {seconds_after:.3f} packed")
