"""Packhorse inside transformers: its encoders run and train without padding, one line changed.

    from packhorse.hf import PackedCollator
    trainer = Trainer(model, args, data_collator=PackedCollator(tokenizer, model), …)

`PackedCollator` prepares the model and makes flat batches. `packed(model)` only prepares the model,
for your own training loop. `register()` alone makes `attn_implementation="packhorse"` known, for
code that makes flat batches itself, or to skip the padding of padded batches in attention alone.

Importing this package registers nothing; creating a `PackedCollator`, or calling one of the two
functions, does.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.hf.attention import register
    from packhorse.hf.collator import PackedCollator
    from packhorse.hf.heads import packed
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.hf.attention": ["register"],
            "packhorse.hf.collator": ["PackedCollator"],
            "packhorse.hf.heads": ["packed"],
        },
    )

__all__ = ["PackedCollator", "packed", "register"]
