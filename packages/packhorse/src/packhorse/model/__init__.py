"""BERT over packed sequences, and its heads."""
