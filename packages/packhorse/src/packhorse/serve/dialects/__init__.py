"""The APIs people already use, one module each: its routes, its bodies, its words.

A dialect turns a body into texts and options, asks the model by `calls.call`, and writes the answer
in its own shape. It never batches, never maps an error to a status, and holds nothing between
requests. `asking` is what they share of the first two, `shapes` what their bodies share.
"""
