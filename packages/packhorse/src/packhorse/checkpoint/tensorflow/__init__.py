"""The files of TensorFlow, read and written without it: checkpoints and frozen graphs."""
