"""Packhorse: BERT without padding.

    import packhorse
    model = packhorse.load("sentence-transformers/all-MiniLM-L6-v2")
    vectors = model.embed(texts)

The public names are imported on first use, so that `import packhorse` is fast. Before the first
one, torch is restricted to the processor that `PACKHORSE_CPU` names, if it is set.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse.errors import PackhorseError as PackhorseError
    from packhorse.packing.batch import Packed as Packed
    from packhorse.packing.histogram import plan as plan
    from packhorse.runtime.encoder import Encoder as Encoder
    from packhorse.runtime.loading import load as load
    from packhorse.runtime.runner import PackRunner as PackRunner
    from packhorse.tokens import Tokenizer as Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "Encoder": "packhorse.runtime.encoder",
    "PackRunner": "packhorse.runtime.runner",
    "Packed": "packhorse.packing.batch",
    "PackhorseError": "packhorse.errors",
    "Tokenizer": "packhorse.tokens",
    "load": "packhorse.runtime.loading",
    "plan": "packhorse.packing.histogram",
}
__all__ = [
    "Encoder",
    "PackRunner",
    "Packed",
    "PackhorseError",
    "Tokenizer",
    "__version__",
    "load",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    import_module("packhorse.processor").limit()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
