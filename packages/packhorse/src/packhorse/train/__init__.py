"""Training packed BERT: what is learned, how, and what is kept of it."""
