"""Models behind HTTP, in the APIs that clients already use.

`app` describes the way of a request through these modules. `serve` never batches and has no queue:
it parses requests, submits their texts to a `PackRunner`, and writes the answers.

Internal: the command `packhorse serve` and its routes are public, these modules are not.
"""
