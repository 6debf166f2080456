"""Training of packed BERT: objectives, data, the loop, checkpoints and MLPerf submissions."""
