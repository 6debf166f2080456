"""The classes of sentence-transformers over the packed encoder, and that library's own, packed.

    from packhorse.sbert import SentenceTransformer    # or from packhorse
    model = packhorse.accelerate(sentence_transformers.SentenceTransformer("all-MiniLM-L6-v2"))

`SentenceTransformer`, `CrossEncoder` and `SparseEncoder` need no sentence-transformers: they have
its arguments and give its results. `accelerate` takes an object of that library and has it compute
packed; where that is not possible, it warns with `AccelerationWarning`.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.sbert.acceleration import AccelerationWarning, accelerate
    from packhorse.sbert.dense import SentenceTransformer
    from packhorse.sbert.ranking import CrossEncoder
    from packhorse.sbert.sparse import SparseEncoder
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.sbert.acceleration": ["AccelerationWarning", "accelerate"],
            "packhorse.sbert.dense": ["SentenceTransformer"],
            "packhorse.sbert.ranking": ["CrossEncoder"],
            "packhorse.sbert.sparse": ["SparseEncoder"],
        },
    )

__all__ = [
    "AccelerationWarning",
    "CrossEncoder",
    "SentenceTransformer",
    "SparseEncoder",
    "accelerate",
]
