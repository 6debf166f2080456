"""A server of several processes: fronts speak HTTP, engines compute, a supervisor replaces both.

Python runs one thread at a time per process, so on a fast GPU a single process is busy with HTTP,
JSON and tokenizing long before the GPU is busy with the model. Here these run in `fronts` processes
of their own, and each device has one engine process, which only packs, launches and replies. All
fronts share one listening socket and send to all engines; so batches mix the requests of all
clients, and there is one queue with one limit per engine.

A front and an engine are connected by a *link*: a Unix socket for small fixed messages
(`messages`), and shared memory (`arena`) in which the front allocates a block per request and
writes token ids; the engine writes its results into the same block. Nothing is pickled.

The supervisor (`supervisor`) opens no model and answers no request. It binds the port, starts the
other processes, makes the links and hands their ends out. A process that dies is replaced: its
peers notice that the link was closed and fail only the requests that were under way on it, with
503. A process whose supervisor is gone ends by itself.
"""
