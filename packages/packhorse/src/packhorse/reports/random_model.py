"""Write a BERT of a well-known size with random weights, as a folder that every library loads.

Speed does not depend on the values of the weights, and a machine for benchmarks may have no model.
The folder is an ordinary checkpoint (weights, configuration, a vocabulary of made-up words, mean
pooling), so its readers need no special case.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from packhorse import attention, checkpoint
from packhorse.checkpoint import configuration
from packhorse.errors import InputError
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed
from packhorse.model.model import Model

CONFIGS = {
    "tiny": BertConfig(2048, hidden_size=64, layers=2, heads=4, intermediate_size=128),
    "minilm": BertConfig(30522, hidden_size=384, layers=6, heads=12, intermediate_size=1536),
    "base": BertConfig(30522, hidden_size=768, layers=12, heads=12, intermediate_size=3072),
    "large": BertConfig(30522, hidden_size=1024, layers=24, heads=16, intermediate_size=4096),
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write(name: str, folder: Path, seed: int = 0, vocab: str | Path | None = None) -> Path:
    """Write a random model of this configuration to `folder`.

    `vocab` is a vocab.txt, a tokenizer.json or a folder with one of them; made-up words without it.
    """
    if name not in CONFIGS:
        raise InputError(f"unknown configuration {name!r}; there are {', '.join(CONFIGS)}")
    config = CONFIGS[name]
    tokenizer = configuration.vocabulary(folder, vocab) if vocab else None
    if tokenizer is None:
        tokenizer = folder.with_name(folder.name + "-tokenizer")
        _write_vocabulary(tokenizer, config.vocab_size)
    model = checkpoint.Checkpoint(
        config=config,
        model=build(config, seed),
        vocabulary=tokenizer,
        name=f"random-{name}",
        max_length=config.max_positions,
        raw={"position_embedding_type": "absolute"},  # CTranslate2 requires this key
    )
    checkpoint.tokenizer(model)  # raises if it has ids that the embedding has not
    return checkpoint.write(folder, model, overwrite=True)


def build(config: BertConfig, seed: int) -> Model:
    """Return a model with the weights that training begins with, and mean pooling.

    They are BERT's: normal with a deviation of 0.02, biases 0, norms 1.
    """
    generator = torch.Generator().manual_seed(seed)
    bert = Bert(config, attention.kernel("reference"))
    with torch.no_grad():
        for module in bert.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0, 0.02, generator=generator)
            if isinstance(module, nn.Linear):
                module.bias.zero_()
    return Model(bert, {"embed": Embed(("mean",), normalize=True)}).eval()


def _write_vocabulary(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *(f"w{number}" for number in range(size - len(SPECIAL)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
