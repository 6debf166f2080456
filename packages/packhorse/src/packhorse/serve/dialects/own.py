"""Our own routes, for what the other dialects have no words for: answers, words, labels, names.

Each takes one input or a list, and answers with a list of one item an input, in their order.
Offsets are code points of the text that was sent. An option that is not known is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, Field, RootModel, model_validator
from starlette.requests import Request
from starlette.responses import Response

from packhorse.serve.calls import reply
from packhorse.serve.dialects.asking import Cut, answers, ask
from packhorse.serve.dialects.shapes import (
    Exact,
    Long,
    Many,
    Named,
    TeiError,
    Text,
    Texts,
    Top,
    refusals,
)
from packhorse.serve.hosting import Hosts
from packhorse.serve.settings import Settings

Two = Annotated[list[str], Field(min_length=2, max_length=2)]


class AnswerRequest(Exact):
    """A question, and the text or texts to look for the answer in."""

    question: str = Field(examples=["What carries the sacks?"])
    context: str | None = Field(default=None, examples=["The horse carries the sacks to market."])
    contexts: Many[str] | None = None
    top_k: int = Field(default=1, ge=1, le=100)
    stride: int | None = Field(
        default=None, ge=0, le=2**20, description="Tokens that windows of a long context share."
    )
    max_answer_tokens: int = Field(default=30, ge=1, le=256)
    no_answer: float | None = Field(
        default=None,
        ge=-1e6,
        le=1e6,
        description="An empty answer comes first where none scores higher by more than this.",
    )
    model: Named = None

    @model_validator(mode="after")
    def _one_of_both(self) -> AnswerRequest:
        if (self.context is None) == (self.contexts is None):
            raise ValueError("give either context or contexts")
        return self


class FillRequest(Exact):
    """Texts with the model's mask token in them."""

    inputs: Texts = Field(examples=["A horse carries the [MASK]."])
    top_k: Top = 5
    targets: Many[str] | None = Field(default=None, description="Choose among these words alone.")
    long: Long = "error"
    model: Named = None


class ClassifyRequest(Exact):
    """Texts and pairs of texts."""

    inputs: Text | Many[Text | Two] = Field(examples=["Packing is fun."])
    long: Long = "error"
    model: Named = None


class NerRequest(Exact):
    """Texts to look for names in."""

    inputs: Texts = Field(examples=["Ada lives in London."])
    long: Long = "error"
    model: Named = None


class FoundAnswer(BaseModel):
    """`context[start:end]`; empty where there is none."""

    text: str
    start: int
    end: int
    score: float


class FoundWord(BaseModel):
    """A word for the mask, and the text with it put in."""

    word: str
    score: float
    text: str
    id: int


class FoundLabel(BaseModel):
    """The likeliest label, and how likely all are."""

    label: str
    score: float
    scores: dict[str, float]


class FoundName(BaseModel):
    """`text[start:end]` of the input, and what it names."""

    label: str
    text: str
    start: int
    end: int
    score: float


class Answers(RootModel[list[list[FoundAnswer]]]):
    """The best answers of each context."""


class Words(RootModel[list[list[list[FoundWord]]]]):
    """The likeliest words for each mask of each text."""


class Labels(RootModel[list[FoundLabel]]):
    """A label an input."""


class Names(RootModel[list[list[FoundName]]]):
    """The names in each text."""


def add(app: FastAPI, hosts: Hosts, settings: Settings) -> None:
    """Add the routes."""
    post = partial(app.post, tags=["Packhorse"], responses=refusals(TeiError))

    @post("/answer", response_model=Answers)
    async def answer(request: Request, body: AnswerRequest) -> Response:
        """The spans of each context that answer the question best."""
        host = hosts.find(body.model, "answer")
        contexts = [body.context] if body.context is not None else body.contexts or []
        pairs = [(body.question, context) for context in contexts]
        how = {"top_k": body.top_k, "no_answer": body.no_answer}
        how |= {"max_answer_tokens": body.max_answer_tokens}
        return reply((await answers(request, host, pairs, stride=body.stride, **how)).values)

    @post("/fill", response_model=Words)
    async def fill(request: Request, body: FillRequest) -> Response:
        """The likeliest words for each mask."""
        host, texts = hosts.find(body.model, "fill"), _listed(body.inputs)
        how = {"top_k": body.top_k, "targets": body.targets}
        cut = Cut.read(long=body.long)
        return reply((await ask(request, host, "fill", texts, cut, **how)).values)

    @post("/classify", response_model=Labels)
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        """The label of each text or pair."""
        host, cut = hosts.find(body.model, "classify"), Cut.read(long=body.long)
        given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        texts = [each if isinstance(each, str) else (each[0], each[1]) for each in given]
        return reply((await ask(request, host, "classify", texts, cut)).values)

    @post("/ner", response_model=Names)
    async def ner(request: Request, body: NerRequest) -> Response:
        """The names in each text."""
        host, cut = hosts.find(body.model, "label"), Cut.read(long=body.long)
        return reply((await ask(request, host, "label", _listed(body.inputs), cut)).values)


def _listed(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs
