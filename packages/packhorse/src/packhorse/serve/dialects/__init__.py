"""The HTTP APIs that clients already use, one module each: its routes and its request bodies.

A dialect turns a body into texts and options, runs them by `tasks`, and writes the answer in its
own shape. It never batches, never maps an error to a status, and keeps nothing between requests.
`schemas` has what the bodies of several dialects share.
"""
