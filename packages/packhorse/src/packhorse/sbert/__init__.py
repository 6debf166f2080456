"""The classes of sentence-transformers over the packed encoder, and that library's own, packed.

Internal: `packhorse.SentenceTransformer`, `packhorse.CrossEncoder`, `packhorse.SparseEncoder` and
`packhorse.accelerate` are the public names. Nothing here imports sentence-transformers, but for
`acceleration`, which is handed one of its models.
"""
