"""Attention over packed sequences: kernels that never look across a boundary.

    mixed = attend(q, k, v, packed)  # [T, H, D] each, by the fastest kernel that can do it

`packed` has this function, and `PackedAttention` for models of several layers. `kernels` has the
protocol, the table of kernels and their choice; each kernel has a module of its own. `scope` says
what a layer's queries may attend to.
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
    from packhorse.attention.packed import PackedAttention, attend
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
            "packhorse.attention.packed": ["PackedAttention", "attend"],
            "packhorse.attention.scope": ["AttentionScope"],
        },
    )

__all__ = [
    "KERNELS",
    "AttentionScope",
    "Kernel",
    "KernelChoice",
    "KernelSupport",
    "PackedAttention",
    "attend",
    "kernel",
    "pick",
]
