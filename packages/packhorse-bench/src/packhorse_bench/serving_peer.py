"""A server to compare with: sentence-transformers behind FastAPI, with dynamic batching.

    python -m packhorse_bench.serving_peer FOLDER --port 8081 --threads 2

`packhorse bench serve` starts it. It is what a careful user writes by hand to serve embeddings,
because a comparison with a careless server would flatter ours: requests go into an asyncio queue;
one worker takes what waits, up to a few batches within a few milliseconds, and encodes it in a
thread, so that the event loop stays free; `encode` sorts by length and pads batch by batch;
responses are written by orjson; event loop and HTTP parser are uvicorn's fast ones if they are
installed. It speaks OpenAI's `/v1/embeddings` for texts.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Response
from pydantic import BaseModel

Encode = Callable[[Sequence[str]], np.ndarray]  # texts → vectors [n, E]


class EmbedBody(BaseModel):
    """The body of a request to `/v1/embeddings`."""

    input: str | list[str]
    model: str = ""


class Batcher:
    """Encodes the texts of many requests together, up to `max_texts`, after `wait` seconds."""

    def __init__(self, encode: Encode, max_texts: int, wait: float) -> None:
        self.encode = encode
        self.max_texts = max_texts
        self.wait = wait
        self.queue: asyncio.Queue[tuple[str, asyncio.Future[np.ndarray]]] = asyncio.Queue()

    async def vectors(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Queue the texts and wait for their vectors, in the same order."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in texts]
        for pair in zip(texts, futures, strict=True):
            self.queue.put_nowait(pair)
        return await asyncio.gather(*futures)

    async def work(self) -> None:
        """Encode batch after batch, until cancelled."""
        while True:
            texts, futures = zip(*await self._next_batch(), strict=True)
            try:
                vectors = await asyncio.to_thread(self.encode, texts)
            except Exception as error:  # fails these requests, not the server
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, vector in zip(futures, vectors, strict=True):
                if not future.done():  # cancelled, if its client has disconnected
                    future.set_result(vector)

    async def _next_batch(self) -> list[tuple[str, asyncio.Future[np.ndarray]]]:
        """Wait for a text, then take more until the batch is full or `wait` has passed."""
        batch = [await self.queue.get()]
        try:
            async with asyncio.timeout(self.wait):
                while len(batch) < self.max_texts:
                    batch.append(await self.queue.get())
        except TimeoutError:
            pass
        return batch


def create(encode: Encode, max_texts: int, wait: float) -> FastAPI:
    """The application, with one batcher that runs as long as it does."""
    batcher = Batcher(encode, max_texts, wait)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.get_running_loop().create_task(batcher.work())
        yield
        worker.cancel()

    app = FastAPI(lifespan=lifespan)

    async def embeddings(body: EmbedBody) -> Response:
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors = await batcher.vectors(texts)
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        answer: dict[str, Any] = {"object": "list", "data": data, "model": body.model}
        document = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(document, media_type="application/json")

    async def health() -> Response:
        return Response(b"{}", media_type="application/json")

    app.post("/v1/embeddings")(embeddings)
    app.get("/health")(health)
    return app


def open_model(folder: str, device: str, dtype: str, batch: int) -> Encode:
    """Load the model; returns sentence-transformers' own `encode` for it, warmed up."""
    from sentence_transformers import SentenceTransformer

    from packhorse.device import parse_dtype

    options = {"dtype": parse_dtype(dtype)}
    model = SentenceTransformer(folder, device=device, model_kwargs=options).eval()

    def encode(texts: Sequence[str]) -> np.ndarray:
        vectors = model.encode(
            list(texts),
            batch_size=batch,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, np.float32)

    # The first call allocates and compiles, which no request should wait for.
    encode(["warm up", "with two texts of unlike length"])
    return encode


def main() -> None:
    """Serve until a signal comes."""
    import torch
    import uvicorn

    flags = argparse.ArgumentParser(description="sentence-transformers behind FastAPI.")
    flags.add_argument("folder", help="of the model")
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--dtype", default="fp32")
    flags.add_argument("--batch", type=int, default=32, help="sequences that are padded together")
    flags.add_argument("--most", type=int, default=128, help="texts that are sorted together")
    flags.add_argument("--wait-ms", type=float, default=2.0, help="for more texts to come")
    arguments = flags.parse_args()
    torch.set_num_threads(arguments.threads)
    encode = open_model(arguments.folder, arguments.device, arguments.dtype, arguments.batch)
    uvicorn.run(
        create(encode, arguments.most, arguments.wait_ms / 1e3),
        host="127.0.0.1",
        port=arguments.port,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=30,
    )


if __name__ == "__main__":
    main()
