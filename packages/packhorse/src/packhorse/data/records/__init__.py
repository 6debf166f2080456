"""Records that others prepared for pretraining (TFRecords, Graphcore's), as sequences."""
