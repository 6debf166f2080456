"""Hugging Face's InferenceClient, which takes the URL of a model's own endpoint."""

# package: huggingface_hub

import asyncio
from typing import Any

from harness import inputs, method, run
from huggingface_hub import AsyncInferenceClient, InferenceClient


def client(model: str) -> InferenceClient:
    return InferenceClient(model=f"{inputs.url}/models/{model}")


@method("feature_extraction", "vectors")
def feature_extraction() -> Any:
    return InferenceClient(model=inputs.url).feature_extraction(inputs.texts)


@method("feature_extraction, one text", "vector")
def feature_extraction_of_one() -> Any:
    return InferenceClient(model=inputs.url).feature_extraction(inputs.texts[0])


@method("feature_extraction, truncate=True", "long")
def feature_extraction_truncated() -> Any:
    return client("mini").feature_extraction(inputs.long, truncate=True)


@method("sentence_similarity", "similarities")
def sentence_similarity() -> list[float]:
    return client("mini").sentence_similarity(inputs.texts[0], inputs.texts[1:])


@method("text_classification", "labels")
def text_classification() -> dict[str, float]:
    labels = client("judge").text_classification(inputs.statement)
    return {label.label: label.score for label in labels}


@method("token_classification", "entities")
def token_classification() -> list[tuple[str, str, int, int]]:
    entities = client("tagger").token_classification(inputs.statement)
    return [(entity.entity_group, entity.word, entity.start, entity.end) for entity in entities]


@method('token_classification, aggregation_strategy="first"', "entities, first")
def token_classification_first() -> list[tuple[str, str, int, int]]:
    entities = client("tagger").token_classification(inputs.statement, aggregation_strategy="first")
    return [(entity.entity_group, entity.word, entity.start, entity.end) for entity in entities]


@method("question_answering", "answer")
def question_answering() -> tuple[str, int, int]:
    answer = client("reader").question_answering(inputs.question, inputs.context)
    return answer.answer, answer.start, answer.end


@method("fill_mask", "words")
def fill_mask() -> list[str]:
    return [word.token_str for word in client("filler").fill_mask(inputs.masked)]


@method("AsyncInferenceClient.feature_extraction", "vectors")
def feature_extraction_in_asyncio() -> Any:
    async def ask() -> Any:
        async with AsyncInferenceClient(model=inputs.url) as client:
            return await client.feature_extraction(inputs.texts)

    return asyncio.run(ask())


run()
