"""Packhorse: BERT without padding.

    import packhorse
    model = packhorse.load("sentence-transformers/all-MiniLM-L6-v2")
    vectors = model.embed(texts)

The public names are imported on first use, so that `import packhorse` is fast. Before the first
one, torch is restricted to the processor that `PACKHORSE_CPU` names, if it is set. The rooms below
that have an `__all__` are public too.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.errors import PackhorseError
    from packhorse.packing.batch import Packed
    from packhorse.packing.histogram import plan
    from packhorse.runtime.encoder import Encoder
    from packhorse.runtime.loading import load
    from packhorse.runtime.runner import PackRunner
    from packhorse.sbert.acceleration import accelerate
    from packhorse.sbert.dense import SentenceTransformer
    from packhorse.sbert.ranking import CrossEncoder
    from packhorse.sbert.sparse import SparseEncoder
    from packhorse.tokens.tokenizer import Tokenizer
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.errors": ["PackhorseError"],
            "packhorse.packing.batch": ["Packed"],
            "packhorse.packing.histogram": ["plan"],
            "packhorse.runtime.encoder": ["Encoder"],
            "packhorse.runtime.loading": ["load"],
            "packhorse.runtime.runner": ["PackRunner"],
            "packhorse.sbert.acceleration": ["accelerate"],
            "packhorse.sbert.dense": ["SentenceTransformer"],
            "packhorse.sbert.ranking": ["CrossEncoder"],
            "packhorse.sbert.sparse": ["SparseEncoder"],
            "packhorse.tokens.tokenizer": ["Tokenizer"],
        },
    )

__version__ = "0.1.0"

__all__ = [
    "CrossEncoder",
    "Encoder",
    "PackRunner",
    "Packed",
    "PackhorseError",
    "SentenceTransformer",
    "SparseEncoder",
    "Tokenizer",
    "__version__",
    "accelerate",
    "load",
    "plan",
]
