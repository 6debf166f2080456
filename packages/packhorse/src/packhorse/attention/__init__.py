"""Attention over packed sequences: kernels that never look across a boundary.

    choice = pick(torch.device("cpu"), torch.float32)
    plan = choice.kernel.plan(packed)  # once per batch
    mixed = choice.kernel(qkv, plan)  # in every layer

`kernels` has the protocol, the table of kernels and their choice; each kernel has a module of its
own. `scope` says what a layer's queries may attend to.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.attention.kernels import (
        KERNELS,
        Kernel,
        KernelChoice,
        KernelSupport,
        kernel,
        pick,
    )
    from packhorse.attention.scope import AttentionScope
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.attention.kernels": [
                "KERNELS",
                "Kernel",
                "KernelChoice",
                "KernelSupport",
                "kernel",
                "pick",
            ],
            "packhorse.attention.scope": ["AttentionScope"],
        },
    )

__all__ = ["KERNELS", "AttentionScope", "Kernel", "KernelChoice", "KernelSupport", "kernel", "pick"]
