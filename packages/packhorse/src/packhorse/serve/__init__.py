"""PackRunner behind HTTP, in the dialects people already speak.

`serve` never batches and owns no queue of requests: it parses, asks a runner, and writes the answer
down. Settings are read in `settings`, models are opened in `hosting`, `guard` stands before the
app and `life` runs it.
"""
