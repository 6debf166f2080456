"""Tasks with known answers: their files, the targets made of them, and the scores."""
