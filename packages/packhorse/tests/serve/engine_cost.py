"""What a request costs an engine's process: processor time from its `Run` record to its reply.

    taskset -c 1 python tests/serve/engine_cost.py --tokens 50 --texts 1 --batch 640

The model is not run: a backend returns zeros at once. Requests come over a socket as a front sends
them, and both threads of the engine count, the one that admits and the one that replies; so does
the reader of the replies here, which takes about two microseconds a request. The best round says
most, because a busy machine takes time from all others.
"""

from __future__ import annotations

import argparse
import gc
import selectors
import socket
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from packhorse.reports import random_model
from packhorse.runtime.loading import load
from packhorse.serve import hosting
from packhorse.serve.hosting import ServedModels
from packhorse.serve.processes import arena
from packhorse.serve.processes.arena import Arena
from packhorse.serve.processes.engine import EngineProcess, FrontLink
from packhorse.serve.processes.messages import Control, Records, Run
from packhorse.serve.settings import ServeSettings
from packhorse_bench.lanes import Zeros

WIDTH = 768  # numbers of a vector
BATCHES = 4  # a round
WARM = 3  # rounds that do not count


def records(front: Arena, count: int, texts: int, tokens: int) -> bytes:
    """Return the records of requests whose blocks lie in the arena."""
    lines: list[bytes] = []
    total = texts * tokens
    for request in range(count):
        output = -(-(8 * texts + 5 * total + texts) // 64) * 64
        size = output + 4 * WIDTH * texts
        offset = front.allocate(size)
        if offset is None:
            raise SystemExit("the arena is full; ask for fewer requests")
        numbers = front.array(offset, 2 * texts + total, np.int32)
        numbers[:texts] = tokens
        numbers[texts : 2 * texts] = 0
        numbers[2 * texts :] = 5
        rest = front.array(offset + numbers.nbytes, total + texts, np.uint8)
        rest[:total] = 0
        rest[total:] = 1
        end = offset + size
        run = Run(request, 0, -1, texts, total, offset, offset + output, end, "embed")
        lines.append(run.pack())
    return b"".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--batch", type=int, default=640, help="requests in a batch")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model.write("tiny", Path(scratch) / "tiny")
        encoder = load(folder, device="cpu")
    encoder = replace(encoder, backend=Zeros(WIDTH), width=WIDTH)
    count = BATCHES * arguments.batch
    settings = ServeSettings(
        model=("tiny",),
        batch_tokens=arguments.batch * arguments.texts * arguments.tokens + encoder.max_length,
        max_queue_tokens=2 * count * arguments.texts * arguments.tokens,
        max_queue_inputs=2 * count * arguments.texts,
    )
    model = hosting.serve_model(encoder, settings, publish=False)
    _, control = Control.pair()
    engine = EngineProcess(control, settings, ServedModels([model]), {0: model}, {})
    front_end, engine_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    memory = arena.create(1 << 28)
    front = Arena(memory)
    link = FrontLink(engine_end, front)
    engine.links = (link,)
    engine.selector.register(engine_end, selectors.EVENT_READ, link)
    data = records(front, count, arguments.texts, arguments.tokens)
    gc.collect()
    gc.freeze()
    microseconds: list[float] = []
    for turn in range(WARM + arguments.rounds):
        feeder = threading.Thread(target=front_end.sendall, args=[data])
        replies = Records()
        answered = 0
        front_end.setblocking(True)
        begun = time.process_time()
        feeder.start()
        while answered < count:
            for key, events in engine.selector.select(0.001):
                if isinstance(key.data, FrontLink):
                    engine._on_link(key.data, events)
                else:
                    key.data()
            try:
                answered += len(replies.feed(front_end.recv(1 << 20, socket.MSG_DONTWAIT)))
            except BlockingIOError:
                continue
        feeder.join()
        if turn >= WARM:
            microseconds.append(1e6 * (time.process_time() - begun) / count)
    model.runner.close()
    print(
        f"requests of {arguments.texts} x {arguments.tokens} tokens, batches of {arguments.batch}: "
        f"{min(microseconds):.1f} us a request, median {median(microseconds):.1f}"
    )


if __name__ == "__main__":
    main()
