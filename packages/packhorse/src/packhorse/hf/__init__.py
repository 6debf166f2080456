"""Packhorse inside transformers: its encoders run and train without padding, one line changed.

    from packhorse.hf import PackedCollator
    trainer = Trainer(model, args, data_collator=PackedCollator(tokenizer, model), …)

`PackedCollator` prepares the model and lays its batches flat. `packed(model)` is the first half of
that, for training loops of one's own. `register()` alone makes `attn_implementation="packhorse"`
known, for whoever lays batches flat himself or wants attention to skip the padding of padded ones.

Registering is a call and no effect of the import, as everywhere in the house: who names the
collator has made the call, so it stays one line.
"""

from packhorse.hf.attention import register
from packhorse.hf.collator import PackedCollator
from packhorse.hf.heads import packed

__all__ = ["PackedCollator", "packed", "register"]
