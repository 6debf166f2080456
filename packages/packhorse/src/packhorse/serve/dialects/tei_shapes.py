"""Bodies of text-embeddings-inference's routes (1.8), with `model` and `long` added."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from packhorse.serve.dialects.fields import only
from packhorse.serve.dialects.shapes import (
    Direction,
    Ids,
    Inputs,
    Lenient,
    Long,
    Many,
    Named,
    Prompt,
    Text,
    Texts,
)

Pair = Annotated[list[str], Field(min_length=1, max_length=2)]
PredictInputs = Annotated[
    Text | Pair | Many[Pair],
    Field(
        description="A text, a pair [a, b], or a list of [text] and [a, b].",
        examples=["Packing is fun."],
    ),
]
Dimensions = Annotated[
    int | None, Field(ge=1, le=2**20, description="Keep this many numbers of each vector.")
]


class Cutting(Lenient):
    """What every body may say of long texts."""

    truncate: bool | None = Field(default=None, description="Cut texts that are too long.")
    truncation_direction: Direction = "Right"
    model: Named = None


class EmbedRequest(Cutting):
    """Texts or token ids to embed."""

    inputs: Inputs
    prompt_name: Prompt = None
    normalize: bool = Field(default=True, description="Make vectors one long.")
    dimensions: Dimensions = None
    long: Long | None = Field(default=None, description="Goes before `truncate`.")


class EmbedAllRequest(Cutting):
    """Texts or token ids whose every token is asked for."""

    inputs: Inputs
    prompt_name: Prompt = None


class PredictRequest(Cutting):
    """Texts and pairs to classify."""

    inputs: PredictInputs
    raw_scores: bool = Field(default=False, description="Logits instead of probabilities.")


class RerankRequest(Cutting):
    """Texts to rank by how well they answer a query."""

    query: str = Field(examples=["What is packing?"])
    documents: Annotated[
        Any, only(instead="send `texts`, or send `documents` to /v1/rerank or /v2/rerank")
    ] = None
    texts: Many[str] = Field(examples=[["Sequences laid end to end.", "A horse carries it."]])
    raw_scores: bool = Field(default=False, description="Logits instead of probabilities.")
    return_text: bool = False
    # Of Infinity, vLLM and Jina, which have this route too:
    top_n: int | None = Field(
        default=None, ge=1, le=2**31, description="Return the best few alone."
    )
    return_documents: bool | None = Field(default=None, description="The same as `return_text`.")


class SimilarityInput(Lenient):
    """A text and those it is compared with."""

    source_sentence: str = Field(examples=["What is packing?"])
    sentences: Many[str] = Field(examples=[["What is padding?", "A horse carries it."]])


class SimilarityParameters(Lenient):
    """Options of a comparison."""

    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    prompt_name: Prompt = None


class SimilarityRequest(Lenient):
    """A text, those it is compared with, and how."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: Named = None


class TokenizeRequest(Lenient):
    """Texts to split into tokens; nothing is truncated."""

    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: Prompt = None
    model: Named = None


class DecodeRequest(Lenient):
    """Token ids to make text of."""

    ids: Ids | Many[Ids] = Field(examples=[[101, 7592, 102]])
    skip_special_tokens: bool = True
    model: Named = None


class Vectors(RootModel[list[list[float]]]):
    """A vector an input."""

    model_config = {"json_schema_extra": {"examples": [[[0.6, 0.8]]]}}


class TokenVectors(RootModel[list[list[list[float]]]]):
    """A vector for each token of each input, special ones included."""

    model_config = {"json_schema_extra": {"examples": [[[[0.1, 0.9], [0.6, 0.8]]]]}}


class Prediction(BaseModel):
    """A label and how likely it is."""

    score: float = Field(examples=[0.98])
    label: str = Field(examples=["POSITIVE"])


class Predictions(RootModel[list[Prediction] | list[list[Prediction]]]):
    """All labels, the likeliest first; for a batch, a list of these."""


class Rank(BaseModel):
    """A text's place."""

    index: int = Field(examples=[0])
    score: float = Field(examples=[0.93])
    text: str | None = Field(default=None, description="Where `return_text` asks for it.")


class Ranks(RootModel[list[Rank]]):
    """The texts, best first."""


class Similarities(RootModel[list[float]]):
    """The cosine of each sentence with the source."""

    model_config = {"json_schema_extra": {"examples": [[0.71, 0.12]]}}


class Token(BaseModel):
    """A token and where in the text it stands, in code points."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokens(RootModel[list[list[Token]]]):
    """The tokens of each text."""


class Decoded(RootModel[list[str]]):
    """A text for each list of ids."""


class EmbeddingModel(BaseModel):
    """How vectors are made of the tokens' states."""

    pooling: str = Field(examples=["mean"])


class ClassifierModel(BaseModel):
    """What the model tells apart."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(BaseModel):
    """What kind of model it is; one of these, or none."""

    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    reranker: ClassifierModel | None = None


class Served(BaseModel):
    """One of the models."""

    name: str
    tasks: list[str] = Field(examples=[["embed", "hidden"]])
    max_input_length: int
    dtype: str
    device: str
    kernel: str
    prompts: list[str]


class Info(BaseModel):
    """The default model and the limits in text-embeddings-inference's words; then all models."""

    model_id: str = Field(examples=["all-MiniLM-L6-v2"])
    model_sha: str | None
    model_dtype: str = Field(examples=["float32"])
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: Literal[False] = False
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    models: list[Served]
