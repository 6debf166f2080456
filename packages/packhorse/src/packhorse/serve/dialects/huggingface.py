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
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.serve.calls import Outcome, reply
from packhorse.serve.dialects import zero_shot
from packhorse.serve.dialects.asking import Cut, answers, ask, vectors
from packhorse.serve.dialects.fields import poster
from packhorse.serve.dialects.hf_shapes import (
    TELLING,
    InferenceRequest,
    Inferred,
    Question,
    Task,
)
from packhorse.serve.dialects.shapes import HuggingFaceError
from packhorse.serve.dialects.tei import similarities
from packhorse.serve.dialects.tei_shapes import SimilarityInput, SimilarityParameters
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.settings import Settings

# The names of `runtime.tasks`; zero-shot classification is pairs that are classified.
OURS: dict[str, str] = {
    "feature-extraction": "embed",
    "sentence-similarity": "embed",
    "question-answering": "answer",
    "fill-mask": "fill",
    "text-classification": "classify",
    "token-classification": "label",
    "zero-shot-classification": "zero_shot",
}
BY_HEAD: tuple[Task, ...] = (
    "text-classification",
    "token-classification",
    "fill-mask",
    "feature-extraction",
)
APPLY = {"sigmoid": "multi_label", "softmax": "single_label", "none": "raw"}
NOTHING = {"answer": "", "start": 0, "end": 0, "score": 0.0}
MOST_ANSWERS = 100


def add(app: FastAPI, hosts: Hosts, settings: Settings) -> None:
    """Add the routes: that with a task goes before that whose name of a model takes the rest."""
    post = poster(app, "Hugging Face", HuggingFaceError)

    @post("/", response_model=Inferred)
    async def infer(request: Request, body: InferenceRequest) -> Response:
        """Whatever the body and the models' heads make of it."""
        host, task = choose(hosts, body.model, body)
        return reply(await DO[task](request, host, body))

    @post("/pipeline/{task}/{name:path}", response_model=Inferred)
    @post("/models/{name:path}/pipeline/{task}", response_model=Inferred)
    async def infer_task(
        request: Request, body: InferenceRequest, task: Task, name: str
    ) -> Response:
        """A named task of a named model."""
        body.check(fitting(task, body.inputs))
        host = hosts.find(name, OURS[task])
        return reply(await DO[task](request, host, body))

    @post("/models/{name:path}", response_model=Inferred)
    async def infer_model(request: Request, body: InferenceRequest, name: str) -> Response:
        """Whatever the body and this model's heads make of it."""
        host, task = choose(hosts, name, body)
        return reply(await DO[task](request, host, body))


def choose(hosts: Hosts, name: str | None, body: InferenceRequest) -> tuple[Hosted, Task]:
    """Which model is meant, and what it is asked."""
    task = meant(hosts, name, body)
    body.check(task)
    return hosts.find(name, OURS[task]), task


def meant(hosts: Hosts, name: str | None, body: InferenceRequest) -> Task:
    """The task that the body's shape, its options or the model's heads tell."""
    shape = shape_of(body.inputs)
    if shape is not None:
        return shape
    for option in body.given:
        if option in TELLING:
            return TELLING[option]
    host = hosts.find(name)
    texts, _ = _texts(body)
    for task in BY_HEAD:
        if _can(host, task, texts):
            return task
    return "feature-extraction"


def _can(host: Hosted, task: str, texts: Any) -> bool:
    if task == "fill-mask" and "fill" in host.tasks:
        mask = host.encoder.tokenizer.mask_id
        word = "" if mask is None else host.encoder.tokenizer.token(mask)
        return all(word in text for text in texts)
    return OURS[task] in host.tasks


def shape_of(inputs: Any) -> Task | None:
    """The task that inputs of this shape can only be for; None for texts."""
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, SimilarityInput):
        return "sentence-similarity"
    return "question-answering" if isinstance(first, Question) else None


def fitting(task: Task, inputs: Any) -> Task:
    """The task, where the inputs have its shape."""
    wanted = task if task in ("sentence-similarity", "question-answering") else None
    if shape_of(inputs) != wanted:
        raise InputError(f"inputs are not of the shape that {task} takes")
    return task


def _texts(body: InferenceRequest) -> tuple[list[str], bool]:
    inputs: Any = body.inputs
    return ([inputs], True) if isinstance(inputs, str) else (inputs, False)


def _bare(rows: Sequence[Any], single: bool) -> Any:
    return rows[0] if single else rows


def _cut(body: InferenceRequest, default: bool = True) -> Cut:
    """The API cuts long texts in all tasks but vectors, unless it is told not to."""
    truncate = body.truncate_long
    direction = body.option("truncation_direction") or "right"
    return Cut.read(default if truncate is None else truncate, direction)


async def _embed(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    texts, single = _texts(body)
    found = await vectors(
        request,
        host,
        texts,
        _cut(body, default=False),
        normalise=body.option("normalize"),
        dimensions=body.option("dimensions"),
        prompt=body.option("prompt_name"),
    )
    return _bare(found.values, single)


async def _compare(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    inputs: Any = body.inputs
    how = SimilarityParameters(
        truncate=body.truncate_long,
        truncation_direction=body.option("truncation_direction") or "right",
        prompt_name=body.option("prompt_name"),
    )
    texts = [inputs.source_sentence, *inputs.sentences]
    return (await similarities(request, host, texts, how)).values


async def _answer(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    asked: Any = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    top = body.option("top_k") or 1
    if top > MOST_ANSWERS:
        raise InputError(f"top_k is {top}; a question has at most {MOST_ANSWERS} answers")
    found = await answers(
        request,
        host,
        [(each.question, each.context) for each in asked],
        window=body.option("max_seq_len"),
        stride=body.option("doc_stride"),
        longest_question=body.option("max_question_len"),
        top_k=top,
        max_answer_tokens=body.option("max_answer_len") or 30,
        no_answer=0.0 if body.option("handle_impossible_answer") else None,
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
    how = {"top_k": body.option("top_k") or 5, "targets": body.option("targets")}
    found = await ask(request, host, "fill", texts, _cut(body), **how)
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
    problem = APPLY.get(body.option("function_to_apply") or "")
    found: Outcome = await ask(request, host, "classify", texts, _cut(body), problem=problem)
    top = body.option("top_k")
    return [
        [{"label": label, "score": score} for label, score in each.scores.items()][:top]
        for each in found.values
    ]


async def _label(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    texts, single = _texts(body)
    join = body.option("aggregation_strategy") != "none"
    stride = body.option("stride")
    cut = _cut(body) if stride is None else Cut("chunk", True) if stride == 0 else Cut()
    found = await ask(request, host, "label", texts, cut, join=join)
    name, unwanted = "entity_group" if join else "entity", body.option("ignore_labels") or ()
    rows = [
        [
            {name: e.label, "score": e.score, "word": e.text, "start": e.start, "end": e.end}
            for e in each
            if e.label not in unwanted
        ]
        for each in found.values
    ]
    return _bare(rows, single)


async def _choose_labels(request: Request, host: Hosted, body: InferenceRequest) -> Any:
    texts, single = _texts(body)
    rows = await zero_shot.classify(
        request,
        host,
        texts,
        zero_shot.labels_of(body.option("candidate_labels")),
        body.option("hypothesis_template"),
        bool(body.option("multi_label")),
        _cut(body),
    )
    return _bare(rows, single)


DO: dict[str, Callable[[Request, Hosted, InferenceRequest], Awaitable[Any]]] = {
    "feature-extraction": _embed,
    "sentence-similarity": _compare,
    "question-answering": _answer,
    "fill-mask": _fill,
    "text-classification": _classify,
    "token-classification": _label,
    "zero-shot-classification": _choose_labels,
}
