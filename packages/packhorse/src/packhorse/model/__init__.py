"""BERT over packed sequences, its heads, and its preparation for CPU inference.

Internal: models are loaded by `packhorse.load` and `packhorse.checkpoint`.
"""
