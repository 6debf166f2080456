"""gRPC beside HTTP, in the same process and over the same models, compatible with TEI's. Internal.

`tei.proto` is the interface; `descriptors` makes message classes of it, `methods` has a function
for each method, `server` the life of a call.
"""
