"""From a ported BERT to a packed one: train it as for an IPU, then run it without padding.

    packhorse port bert_solution.py

A small BERT learns to tell texts that name an animal from others; its texts are made here. The
regions between `# --- solution` and `# --- end` are what `bert_exercise.py` leaves to you.
"""

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

# --- solution 1
bert.save_pretrained(folder)
tokenizer.save_pretrained(folder)
# --- end 1

# --- solution 2
packed = packhorse.load(folder, device="cpu", dtype="fp32")
packed.classify(texts)
begin = time.process_time()
answers = packed.classify(texts)
seconds_after = time.process_time() - begin
# --- end 2

# --- solution 3
tokens = int(padded["attention_mask"].sum())
padding = 1 - tokens / padded["input_ids"].numel()
# --- end 3

names = list(bert.config.id2label.values())
chosen = np.array([names.index(answer.label) for answer in answers])
agree = float((before.argmax(1) == chosen).mean())
right = float((chosen == np.array(labels)).mean())
print(f"{padding:.0%} of the ported script's tokens were padding")
print(f"the same answers: {agree:.1%}; right: {right:.1%}")
print(f"seconds of the processor: {seconds_before:.3f} padded, {seconds_after:.3f} packed")
