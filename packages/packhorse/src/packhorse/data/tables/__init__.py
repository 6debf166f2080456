"""Rows of a table, wherever it lies, and the texts in them: what every command is fed."""
