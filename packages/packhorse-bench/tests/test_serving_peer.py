"""The peer's server: requests are batched, and a failing batch fails alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("fastapi")

from packhorse_bench.serving_peer import Batcher, create


def lengths(texts: Sequence[str]) -> np.ndarray:
    """Takes its time, so that others gather meanwhile."""
    time.sleep(0.05)
    if "poison" in texts:
        raise ValueError("a text that fails")
    return np.array([[len(text), 1.0] for text in texts], np.float32)


def serve(work: object) -> object:
    """What `work` makes of a batcher whose worker runs."""

    async def run() -> object:
        batches: list[int] = []

        def encode(texts: Sequence[str]) -> np.ndarray:
            batches.append(len(texts))
            return lengths(texts)

        batcher = Batcher(encode, max_texts=8, wait=0.002)
        worker = asyncio.get_running_loop().create_task(batcher.work())
        try:
            return await work(batcher, batches)  # type: ignore[operator]
        finally:
            worker.cancel()

    return asyncio.run(run())


def test_requests_of_many_are_encoded_together_and_answered_in_order() -> None:
    async def work(batcher: Batcher, batches: list[int]) -> None:
        texts = [["x" * n, "y"] for n in range(1, 13)]
        vectors = await asyncio.gather(*(batcher.vectors(pair) for pair in texts))
        assert [[v[0] for v in pair] for pair in vectors] == [[n, 1] for n in range(1, 13)]
        assert max(batches) <= 8 and sum(batches) == 24 and len(batches) <= 6

    serve(work)


def test_a_failing_batch_fails_alone_and_leavers_harm_nobody() -> None:
    async def work(batcher: Batcher, batches: list[int]) -> None:
        with pytest.raises(ValueError, match="fails"):
            await batcher.vectors(["poison"])
        leaver = asyncio.get_running_loop().create_task(batcher.vectors(["gone"]))
        await asyncio.sleep(0.01)
        leaver.cancel()
        (vector,) = await batcher.vectors(["here"])
        assert vector[0] == 4

    serve(work)


def test_it_speaks_as_openai_does() -> None:
    httpx = pytest.importorskip("httpx")

    async def run() -> None:
        app = create(lengths, 8, 0.002)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            assert (await client.get("/health")).status_code == 200
            body = {"model": "m", "input": ["one", "three"]}
            document = (await client.post("/v1/embeddings", json=body)).json()
            assert [row["embedding"] for row in document["data"]] == [[3, 1], [5, 1]]
            single = (await client.post("/v1/embeddings", json={"input": "one"})).json()
            assert [row["index"] for row in single["data"]] == [0]

    asyncio.run(run())
