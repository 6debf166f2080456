"""Packed rows for pretraining: examples and masks, their arrays, shards, manifest and loader."""
