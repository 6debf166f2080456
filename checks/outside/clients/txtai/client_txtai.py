"""txtai's embeddings by LiteLLM, which calls the server as OpenAI's."""

# package: txtai

from harness import inputs, method, run
from txtai import Embeddings

embeddings = Embeddings(
    path="openai/mini",
    method="litellm",
    vectors={"api_base": f"{inputs.url}/v1", "api_key": "none"},
    content=True,
)


@method("Embeddings.batchtransform", "vectors")
def batchtransform() -> list[list[float]]:
    return embeddings.batchtransform(inputs.texts)


@method("Embeddings.transform, a long text", "long")
def transform() -> list[float]:
    return embeddings.transform(inputs.long)


@method("Embeddings.index, Embeddings.search", "similarities")
def search() -> list[float]:
    embeddings.index(inputs.texts[1:])
    scores = {row["text"]: row["score"] for row in embeddings.search(inputs.texts[0])}
    return [scores[text] for text in inputs.texts[1:]]


run()
