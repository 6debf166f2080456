"""Hugging Face's inference API as its InferenceClient calls it: one URL, the body says what for.

A client whose model is a URL posts to that URL and nothing in the body names the task. What
`inputs` looks like decides first: a question with its context, a sentence with others. A plain text
is asked of the head that the options belong to, else of the first of these that the model has:
labels, names, words (where the text has a mask), vectors. `/pipeline/TASK/MODEL` and
`/models/MODEL/pipeline/TASK` name it. Answers have the shapes that the client unpacks: labels in a
list within a list, one answer bare, several in a list.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.serve.calls import Outcome, reply
from packhorse.serve.dialects.asking import Cut, answers, ask, vectors
from packhorse.serve.dialects.shapes import (
    Direction,
    HuggingFaceError,
    Lenient,
    Many,
    Text,
    Top,
    refusals,
)
from packhorse.serve.dialects.tei import similarities
from packhorse.serve.dialects.tei_shapes import SimilarityInput, SimilarityParameters
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.settings import Settings

Task = Literal[
    "feature-extraction",
    "sentence-similarity",
    "question-answering",
    "fill-mask",
    "text-classification",
    "token-classification",
]
# The names of `runtime.tasks`.
OURS: dict[str, str] = {
    "feature-extraction": "embed",
    "sentence-similarity": "embed",
    "question-answering": "answer",
    "fill-mask": "fill",
    "text-classification": "classify",
    "token-classification": "label",
}
# Options that only one task has.
TELLING = {
    "targets": "fill-mask",
    "function_to_apply": "text-classification",
    "aggregation_strategy": "token-classification",
    "ignore_labels": "token-classification",
    "normalize": "feature-extraction",
    "prompt_name": "feature-extraction",
    "truncate": "feature-extraction",
    "dimensions": "feature-extraction",
}
BY_HEAD = ("text-classification", "token-classification", "fill-mask", "feature-extraction")
APPLY = {"sigmoid": "multi_label", "softmax": "single_label", "none": "raw"}
LOSING = Cut("truncate", allowed=True)  # the API cuts long texts in all tasks but vectors
NOTHING = {"answer": "", "start": 0, "end": 0, "score": 0.0}


class Question(Lenient):
    """A question, and the text to look for the answer in."""

    question: str = Field(examples=["What carries the sacks?"])
    context: str = Field(examples=["The horse carries the sacks to market."])


class Parameters(Lenient):
    """The options of all tasks; those of another task than the one asked are ignored."""

    top_k: Top | None = None
    # question-answering
    align_to_words: bool | None = Field(
        default=None, description="Ignored: spans are whole tokens."
    )
    doc_stride: int | None = Field(default=None, ge=0, le=2**20)
    handle_impossible_answer: bool | None = None
    max_answer_len: int | None = Field(default=None, ge=1, le=256)
    max_question_len: int | None = Field(
        default=None, description="Ignored: half of a window at most."
    )
    max_seq_len: int | None = Field(default=None, ge=1, le=2**20)
    # fill-mask
    targets: Many[str] | None = None
    # text-classification
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    # token-classification
    aggregation_strategy: Literal["none", "simple"] | None = Field(
        default=None, description="Tokens, or stretches of them; words are not weighed as a whole."
    )
    ignore_labels: Many[str] | None = None
    stride: int | None = Field(default=None, ge=0, le=2**20)
    # sentence-similarity
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


Inputs = Annotated[
    Text | Many[Text] | SimilarityInput | Question | Many[Question],
    Field(examples=["What is packing?"]),
]


class InferenceRequest(Lenient):
    """What InferenceClient sends; vectors have their options beside `inputs`."""

    inputs: Inputs
    parameters: Parameters | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    dimensions: int | None = Field(default=None, ge=1, le=2**20)
    encoding_format: Literal["float"] | None = Field(
        default=None, description="Numbers are JSON here."
    )

    @property
    def options(self) -> Parameters:
        """Those of a task; none were given where there are none."""
        return self.parameters or Parameters()

    @property
    def given(self) -> set[str]:
        """The options that were sent."""
        sent = self.model_fields_set | self.options.model_fields_set
        return {
            name
            for name in sent
            if any(getattr(of, name, None) is not None for of in (self, self.options))
        }


class HfLabel(BaseModel):
    """A label and how likely it is."""

    label: str
    score: float


class HfAnswer(BaseModel):
    """`context[start:end]`."""

    answer: str
    start: int
    end: int
    score: float


class HfWord(BaseModel):
    """A word for the mask, its id, and the text with it put in."""

    score: float
    token: int
    token_str: str
    sequence: str


class HfName(BaseModel):
    """A stretch of the text, or a token of it, and what it names."""

    entity_group: str | None = None
    entity: str | None = None
    score: float
    word: str
    start: int
    end: int


Vector = list[float]
Words = list[HfWord]


class Inferred(
    RootModel[
        Vector
        | list[Vector]
        | list[list[HfLabel]]
        | HfAnswer
        | list[HfAnswer]
        | list[list[HfAnswer]]
        | Words
        | list[Words]
        | list[list[Words]]
        | list[HfName]
        | list[list[HfName]]
    ]
):
    """The shape of the task's answer."""


def add(app: FastAPI, hosts: Hosts, settings: Settings) -> None:
    """Add the routes: that with a task goes before that whose name of a model takes the rest."""
    post = partial(app.post, tags=["Hugging Face"], responses=refusals(HuggingFaceError))

    @post("/", response_model=Inferred)
    async def infer(request: Request, body: InferenceRequest) -> Response:
        """Whatever the body and the models' heads make of it."""
        host, task = choose(hosts, None, body)
        return reply(await DO[task](request, host, body))

    @post("/pipeline/{task}/{name:path}", response_model=Inferred)
    @post("/models/{name:path}/pipeline/{task}", response_model=Inferred)
    async def infer_task(
        request: Request, body: InferenceRequest, task: Task, name: str
    ) -> Response:
        """A named task of a named model."""
        host = hosts.find(name, OURS[task])
        return reply(await DO[fitting(task, body.inputs)](request, host, body))

    @post("/models/{name:path}", response_model=Inferred)
    async def infer_model(request: Request, body: InferenceRequest, name: str) -> Response:
        """Whatever the body and this model's heads make of it."""
        host, task = choose(hosts, name, body)
        return reply(await DO[task](request, host, body))


def choose(hosts: Hosts, name: str | None, body: InferenceRequest) -> tuple[Hosted, str]:
    """Which model is meant, and what it is asked."""
    shape = shape_of(body.inputs)
    if shape != "texts":
        return hosts.find(name, OURS[shape]), shape
    for option, task in TELLING.items():
        if option in body.given:
            return hosts.find(name, OURS[task]), task
    host = hosts.find(name)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    task = next((task for task in BY_HEAD if _can(host, task, texts)), "feature-extraction")
    return hosts.find(name, OURS[task]), task


def _can(host: Hosted, task: str, texts: Any) -> bool:
    if task == "fill-mask" and "fill" in host.tasks:
        mask = host.encoder.tokenizer.mask_id
        word = "" if mask is None else host.encoder.tokenizer.token(mask)
        return all(word in text for text in texts)
    return OURS[task] in host.tasks


def shape_of(inputs: Any) -> str:
    """The task that inputs of this shape can only be for, or "texts"."""
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, SimilarityInput):
        return "sentence-similarity"
    return "question-answering" if isinstance(first, Question) else "texts"


def fitting(task: Task, inputs: Any) -> Task:
    """The task, where the inputs have its shape."""
    shape = shape_of(inputs)
    wanted = task if task in ("sentence-similarity", "question-answering") else "texts"
    if shape != wanted:
        raise InputError(f"inputs are not of the shape that {task} takes")
    return task


def _texts(body: InferenceRequest) -> tuple[list[str], bool]:
    inputs: Any = body.inputs
    return ([inputs], True) if isinstance(inputs, str) else (inputs, False)


def _bare(rows: Sequence[Any], single: bool) -> Any:
    return rows[0] if single else rows


async def _embed(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    texts, single = _texts(body)
    cut = Cut.read(body.truncate, body.truncation_direction)
    how = {"normalise": body.normalize, "prompt": body.prompt_name}
    found = await vectors(request, host, texts, cut, dimensions=body.dimensions, **how)
    return _bare(found.values, single)


async def _compare(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    inputs: Any = body.inputs
    how = SimilarityParameters(
        truncate=body.options.truncate,
        truncation_direction=body.options.truncation_direction,
        prompt_name=body.options.prompt_name,
    )
    texts = [inputs.source_sentence, *inputs.sentences]
    return (await similarities(request, host, texts, how)).values


async def _answer(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    asked: Any = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    options = body.options
    top = options.top_k or 1
    found = await answers(
        request,
        host,
        [(each.question, each.context) for each in asked],
        window=options.max_seq_len,
        stride=options.doc_stride,
        top_k=min(top, 100),
        max_answer_tokens=options.max_answer_len or 30,
        no_answer=0.0 if options.handle_impossible_answer else None,
    )
    rows: list[Any] = [
        [{"answer": a.text, "start": a.start, "end": a.end, "score": a.score} for a in each]
        for each in found.values
    ]
    if top == 1:
        rows = [each[0] if each else NOTHING for each in rows]
    return _bare(rows, not isinstance(body.inputs, list))


async def _fill(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    texts, single = _texts(body)
    how = {"top_k": body.options.top_k or 5, "targets": body.options.targets}
    found = await ask(request, host, "fill", texts, LOSING, **how)
    rows = []
    for text in found.values:
        masks = [
            [
                {"score": w.score, "token": w.id, "token_str": w.word, "sequence": w.text}
                for w in mask
            ]
            for mask in text
        ]
        rows.append(_bare(masks, len(masks) == 1))
    return _bare(rows, single)


async def _classify(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    texts, _ = _texts(body)
    problem = APPLY.get(body.options.function_to_apply or "")
    found: Outcome = await ask(request, host, "classify", texts, LOSING, problem=problem)
    return [
        [{"label": label, "score": score} for label, score in each.scores.items()][
            : body.options.top_k
        ]
        for each in found.values
    ]


async def _label(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    texts, single = _texts(body)
    join = body.options.aggregation_strategy != "none"
    cut = LOSING if body.options.stride is None else Cut("chunk", True)
    found = await ask(request, host, "label", texts, cut, join=join)
    name, unwanted = "entity_group" if join else "entity", body.options.ignore_labels or ()
    rows = [
        [
            {name: e.label, "score": e.score, "word": e.text, "start": e.start, "end": e.end}
            for e in each
            if e.label not in unwanted
        ]
        for each in found.values
    ]
    return _bare(rows, single)


DO: dict[str, Callable[[Request, Hosted, InferenceRequest], Awaitable[Any]]] = {
    "feature-extraction": _embed,
    "sentence-similarity": _compare,
    "question-answering": _answer,
    "fill-mask": _fill,
    "text-classification": _classify,
    "token-classification": _label,
}
