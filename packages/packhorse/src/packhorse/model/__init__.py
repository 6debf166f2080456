"""BERT over packed sequences, its heads, and its preparation for CPU inference."""
