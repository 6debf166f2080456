"""Hugging Face's inference API as its InferenceClient calls it: one URL for all tasks.

A client whose model is a URL posts to that URL, and nothing in the body names the task. The form of
`inputs` decides first: a question with its context, or a sentence with others. For a plain text the
task is the one that the options belong to, otherwise the first of these that the model supports:
text-classification, token-classification, fill-mask (if the text has a mask), feature-extraction.
`/pipeline/TASK/MODEL` and `/models/MODEL/pipeline/TASK` name the task. Answers have the forms that
the client unpacks: labels in a list within a list, one answer bare, several answers in a list.

Follows the public specification of the tasks. Options are in `parameters`, for vectors beside
`inputs`; both places are read for all tasks. An option of another task than the one requested is
refused: `candidate_labels` in a plain classification would otherwise be silently ignored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.results import Aggregation
from packhorse.serve.calls import json_response
from packhorse.serve.dialects import tasks, zero_shot
from packhorse.serve.dialects.schemas import (
    NO_EFFECT,
    Direction,
    HuggingFaceError,
    LenientBody,
    ListOf,
    ModelName,
    Text,
    TopK,
    only,
    post_routes,
)
from packhorse.serve.dialects.tasks import Truncation, run_task
from packhorse.serve.dialects.tei import SimilarityInput, SimilarityParameters, similarities
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings

# Tasks and their options -----------------------------------------------------------------------

HfTask = Literal[
    "feature-extraction",
    "sentence-similarity",
    "question-answering",
    "fill-mask",
    "text-classification",
    "token-classification",
    "zero-shot-classification",
]
# Names in `runtime.tasks`, except zero_shot, which classifies pairs.
TASK_NAMES: dict[str, str] = {
    "feature-extraction": "embed",
    "sentence-similarity": "embed",
    "question-answering": "answer",
    "fill-mask": "fill",
    "text-classification": "classify",
    "token-classification": "label",
    "zero-shot-classification": "zero_shot",
}
# For a plain text without options, the first of these that the model supports.
TEXT_TASKS: tuple[HfTask, ...] = (
    "text-classification",
    "token-classification",
    "fill-mask",
    "feature-extraction",
)
TRUNCATION_OPTIONS = {"truncate", "truncation", "truncation_direction"}
TASK_OPTIONS: dict[HfTask, set[str]] = {
    "zero-shot-classification": {
        "candidate_labels",
        "hypothesis_template",
        "multi_label",
        *TRUNCATION_OPTIONS,
    },
    "fill-mask": {"targets", "top_k", *TRUNCATION_OPTIONS},
    "text-classification": {
        "function_to_apply",
        "return_all_scores",
        "top_k",
        *TRUNCATION_OPTIONS,
    },
    "token-classification": {
        "aggregation_strategy",
        "ignore_labels",
        "stride",
        *TRUNCATION_OPTIONS,
    },
    "feature-extraction": {
        "normalize",
        "dimensions",
        "encoding_format",
        "prompt_name",
        *TRUNCATION_OPTIONS,
    },
    "sentence-similarity": {"prompt_name", *TRUNCATION_OPTIONS},
    "question-answering": {
        "align_to_words",
        "doc_stride",
        "handle_impossible_answer",
        "max_answer_len",
        "max_question_len",
        "max_seq_len",
        "top_k",
    },
}
# An option that only one task has tells which task is meant.
TASK_OF_OPTION: dict[str, HfTask] = {
    name: task
    for task, names in TASK_OPTIONS.items()
    for name in names
    if sum(name in others for others in TASK_OPTIONS.values()) == 1
}
TASK_OF_OPTION["prompt_name"] = "feature-extraction"  # sentence-similarity is known by its inputs

PROBLEMS = {"sigmoid": "multi_label", "softmax": "single_label", "none": "raw"}
NO_ANSWER = {"answer": "", "start": 0, "end": 0, "score": 0.0}
MAX_ANSWERS = 100
PIPELINE_WINDOW = (
    384  # tokens, and those that windows share: the defaults of transformers' pipeline
)
PIPELINE_STRIDE = 128


# Request bodies --------------------------------------------------------------------------------


class QuestionInput(LenientBody):
    """A question, and the text to search for its answer."""

    question: str = Field(examples=["What carries the sacks?"])
    context: str = Field(examples=["The horse carries the sacks to market."])


class InferenceOptions(LenientBody):
    """The options of all tasks."""

    # of several tasks
    top_k: TopK | None = None
    truncate: bool | None = None
    truncation: bool | None = Field(default=None, description="The same as `truncate`.")
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    # feature-extraction
    normalize: bool | None = None
    dimensions: int | None = Field(default=None, ge=1, le=2**20)
    encoding_format: Literal["float"] | None = Field(
        default=None, description="Numbers are always written as JSON."
    )
    # question-answering
    align_to_words: bool | None = None
    doc_stride: int | None = Field(default=None, ge=0, le=2**20)
    handle_impossible_answer: bool | None = None
    max_answer_len: int | None = Field(default=None, ge=1, le=256)
    max_question_len: int | None = Field(
        default=None, ge=1, description="A question with more tokens is refused, not truncated."
    )
    max_seq_len: int | None = Field(default=None, ge=1, le=2**20)
    # fill-mask
    targets: ListOf[str] | None = None
    # text-classification
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    return_all_scores: Annotated[bool | None, only(True, instead="use `top_k`")] = None
    # token-classification
    aggregation_strategy: Aggregation | None = Field(
        default=None,
        description="Return single tokens (none), or join neighbors of the same label: tokens "
        "(simple, the default), or words, labeled by the first token, the average or the maximum.",
    )
    ignore_labels: ListOf[str] | None = None
    stride: int | None = Field(
        default=None,
        ge=0,
        le=2**20,
        description="Read a long text in windows that share this many tokens. Not with "
        "`aggregation_strategy` none.",
    )
    # zero-shot-classification
    candidate_labels: str | ListOf[str] | None = Field(
        default=None, description="Labels to choose from: a list, or one text with commas."
    )
    hypothesis_template: str | None = Field(
        default=None, description="A sentence with {} in place of the label."
    )
    multi_label: bool | None = Field(
        default=None, description="Whether labels are scored independently of each other."
    )
    # of the tokenizer
    max_length: Annotated[
        int | None, only(instead="texts are truncated to what the model takes")
    ] = None
    padding: bool | str | None = NO_EFFECT


class Parameters(InferenceOptions):
    """Options, for most tasks."""


InferenceInputs = Annotated[
    Text | ListOf[Text] | SimilarityInput | QuestionInput | ListOf[QuestionInput],
    Field(examples=["What is packing?"]),
]


class InferenceRequest(InferenceOptions):
    """What InferenceClient sends; for vectors it has options beside `inputs`."""

    inputs: InferenceInputs
    parameters: Parameters | None = None
    options: dict[str, Any] | None = NO_EFFECT  # use_cache, wait_for_model
    model: ModelName = None

    def option(self, name: str) -> Any:
        """Return the value of an option in either place, None if it was not sent."""
        inner = None if self.parameters is None else getattr(self.parameters, name)
        return getattr(self, name) if inner is None else inner

    @property
    def sent_options(self) -> list[str]:
        """The names of the options that were sent."""
        return [name for name in InferenceOptions.model_fields if self.option(name) is not None]

    @property
    def truncate_long(self) -> bool | None:
        """Whether to truncate texts that are too long; None if it was not sent."""
        truncate = self.option("truncate")
        return self.option("truncation") if truncate is None else truncate

    def check_options(self, task: HfTask) -> None:
        """Raise `InputError` for an option that only other tasks have."""
        task_options = set().union(*TASK_OPTIONS.values())
        for name in self.sent_options:
            if name in task_options - TASK_OPTIONS[task]:
                owners = " and ".join(
                    owner for owner, names in TASK_OPTIONS.items() if name in names
                )
                raise InputError(f"{name} is an option of {owners}, but the task is {task}")


# Response bodies -------------------------------------------------------------------------------


class HfLabel(BaseModel):
    """A label and its score."""

    label: str
    score: float


class HfAnswer(BaseModel):
    """An answer, `context[start:end]`."""

    answer: str
    start: int
    end: int
    score: float


class HfWord(BaseModel):
    """A word for the mask, its token id, and the text with it filled in."""

    score: float
    token: int
    token_str: str
    sequence: str


class HfEntity(BaseModel):
    """A span of the text, or one of its tokens, and its label."""

    entity_group: str | None = None
    entity: str | None = None
    score: float
    word: str
    start: int
    end: int


Vector = list[float]
Words = list[HfWord]


class InferenceResponse(
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
        | list[HfEntity]
        | list[list[HfEntity]]
    ]
):
    """The answer, in the form of the task."""


# Routes ----------------------------------------------------------------------------------------


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    post = post_routes(app, "Hugging Face", HuggingFaceError)

    @post("/", response_model=InferenceResponse)
    async def infer(request: Request, body: InferenceRequest) -> Response:
        """The task that the body and the models' heads imply."""
        model, task = choose(models, body.model, body)
        return json_response(await TASKS[task](request, model, body))

    # The routes with a task come before /models/{name:path}, which would match them as well.
    @post("/pipeline/{task}/{name:path}", response_model=InferenceResponse)
    @post("/models/{name:path}/pipeline/{task}", response_model=InferenceResponse)
    async def infer_task(
        request: Request, body: InferenceRequest, task: HfTask, name: str
    ) -> Response:
        """A named task of a named model."""
        check_inputs_fit(task, body.inputs)
        body.check_options(task)
        model = models.find(name, TASK_NAMES[task])
        return json_response(await TASKS[task](request, model, body))

    @post("/models/{name:path}", response_model=InferenceResponse)
    async def infer_model(request: Request, body: InferenceRequest, name: str) -> Response:
        """The task that the body and this model's heads imply."""
        model, task = choose(models, name, body)
        return json_response(await TASKS[task](request, model, body))


def choose(
    models: ServedModels, name: str | None, body: InferenceRequest
) -> tuple[ServedModel, HfTask]:
    """Return the model and the task that a request means."""
    task = choose_task(models, name, body)
    body.check_options(task)
    return models.find(name, TASK_NAMES[task]), task


def choose_task(models: ServedModels, name: str | None, body: InferenceRequest) -> HfTask:
    """Return the task that the form of the inputs, the options or the model's heads imply."""
    task = task_of_inputs(body.inputs)
    if task is not None:
        return task
    for option in body.sent_options:
        if option in TASK_OF_OPTION:
            return TASK_OF_OPTION[option]
    model = models.find(name)
    texts, _ = _texts(body)
    for candidate in TEXT_TASKS:
        if _supports(model, candidate, texts):
            return candidate
    return "feature-extraction"


def _supports(model: ServedModel, task: HfTask, texts: Sequence[str]) -> bool:
    if task == "fill-mask" and "fill" in model.tasks:
        mask_id = model.encoder.tokenizer.mask_id
        mask = "" if mask_id is None else model.encoder.tokenizer.token(mask_id)
        return all(mask in text for text in texts)
    return TASK_NAMES[task] in model.tasks


def task_of_inputs(inputs: Any) -> HfTask | None:
    """Return the only task that takes inputs of this form; None for texts."""
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, SimilarityInput):
        return "sentence-similarity"
    return "question-answering" if isinstance(first, QuestionInput) else None


def check_inputs_fit(task: HfTask, inputs: Any) -> None:
    """Raise `InputError` unless the inputs have the form that the task takes."""
    takes_texts = task not in ("sentence-similarity", "question-answering")
    if task_of_inputs(inputs) != (None if takes_texts else task):
        raise InputError(f"inputs do not have the form that {task} takes")


def _texts(body: InferenceRequest) -> tuple[list[str], bool]:
    """Return the texts, and whether there is a single one that is not in a list."""
    inputs: Any = body.inputs
    return ([inputs], True) if isinstance(inputs, str) else (inputs, False)


def _unwrap(rows: Sequence[Any], is_single: bool) -> Any:
    """Return the only row if the request had a single input that was not in a list."""
    return rows[0] if is_single else rows


def _truncation(body: InferenceRequest) -> Truncation:
    """Read the truncation options; the API truncates by default."""
    truncate = body.truncate_long
    direction = body.option("truncation_direction") or "right"
    return Truncation.read(truncate, direction, by_default=True)


# Tasks -----------------------------------------------------------------------------------------


async def _embed(request: Request, model: ServedModel, body: InferenceRequest) -> Any:
    texts, is_single = _texts(body)
    result = await tasks.embed(
        request,
        model,
        texts,
        _truncation(body),
        normalize=body.option("normalize"),
        dimensions=body.option("dimensions"),
        prompt=body.option("prompt_name"),
    )
    return _unwrap(result.values, is_single)


async def _compare(request: Request, model: ServedModel, body: InferenceRequest) -> Any:
    inputs: Any = body.inputs
    parameters = SimilarityParameters(
        truncate=body.truncate_long,
        truncation_direction=body.option("truncation_direction") or "right",
        prompt_name=body.option("prompt_name"),
    )
    texts = [inputs.source_sentence, *inputs.sentences]
    return (await similarities(request, model, texts, parameters)).values


async def _answer(request: Request, model: ServedModel, body: InferenceRequest) -> Any:
    is_single = not isinstance(body.inputs, list)
    questions: Any = [body.inputs] if is_single else body.inputs
    top = body.option("top_k") or 1
    if top > MAX_ANSWERS:
        raise InputError(f"top_k is {top}; a question has at most {MAX_ANSWERS} answers")
    result = await tasks.answer(
        request,
        model,
        [(item.question, item.context) for item in questions],
        window=body.option("max_seq_len") or PIPELINE_WINDOW,
        stride=body.option("doc_stride"),
        default_stride=PIPELINE_STRIDE,
        max_question_tokens=body.option("max_question_len"),
        top_k=top,
        max_answer_tokens=body.option("max_answer_len") or 15,
        no_answer=0.0 if body.option("handle_impossible_answer") else None,
        scoring="pipeline",
        align_to_words=body.option("align_to_words") is not False,
    )
    rows: list[Any] = [
        [{"answer": a.text, "start": a.start, "end": a.end, "score": a.score} for a in answers]
        for answers in result.values
    ]
    if top == 1:
        rows = [row[0] if row else NO_ANSWER for row in rows]
    return _unwrap(rows, is_single)


async def _fill(request: Request, model: ServedModel, body: InferenceRequest) -> Any:
    texts, is_single = _texts(body)
    options = {"top_k": body.option("top_k") or 5, "targets": body.option("targets")}
    options["decoded"] = True
    result = await run_task(request, model, "fill", texts, _truncation(body), **options)
    rows = []
    for masks in result.values:
        row = [
            [
                {"score": w.score, "token": w.id, "token_str": w.word, "sequence": w.text}
                for w in words
            ]
            for words in masks
        ]
        rows.append(_unwrap(row, len(row) == 1))
    return _unwrap(rows, is_single)


async def _classify(request: Request, model: ServedModel, body: InferenceRequest) -> Any:
    texts, _ = _texts(body)
    problem = PROBLEMS.get(body.option("function_to_apply") or "")
    truncation = _truncation(body)
    result = await run_task(request, model, "classify", texts, truncation, problem=problem)
    top = body.option("top_k")
    return (
        [{"label": label, "score": score} for label, score in value.scores.items()][:top]
        for value in result.values
    )


async def _label(request: Request, model: ServedModel, body: InferenceRequest) -> Any:
    texts, is_single = _texts(body)
    aggregation = body.option("aggregation_strategy") or "simple"
    stride = body.option("stride")
    result = await tasks.label(
        request, model, texts, _truncation(body), stride=stride, aggregation=aggregation
    )
    key = "entity" if aggregation == "none" else "entity_group"
    ignored = body.option("ignore_labels") or ()
    rows = [
        [
            {key: e.label, "score": e.score, "word": e.text, "start": e.start, "end": e.end}
            for e in entities
            if e.label not in ignored
        ]
        for entities in result.values
    ]
    return _unwrap(rows, is_single)


async def _classify_zero_shot(request: Request, model: ServedModel, body: InferenceRequest) -> Any:
    texts, is_single = _texts(body)
    rows = await zero_shot.classify(
        request,
        model,
        texts,
        zero_shot.read_labels(body.option("candidate_labels")),
        body.option("hypothesis_template"),
        bool(body.option("multi_label")),
        _truncation(body),
    )
    return _unwrap(rows, is_single)


TASKS: dict[str, Callable[[Request, ServedModel, InferenceRequest], Awaitable[Any]]] = {
    "feature-extraction": _embed,
    "sentence-similarity": _compare,
    "question-answering": _answer,
    "fill-mask": _fill,
    "text-classification": _classify,
    "token-classification": _label,
    "zero-shot-classification": _classify_zero_shot,
}
