"""Bodies of Hugging Face's inference API, and which option belongs to which task.

Follows the public specification of its tasks. Options stand in `parameters`, those of vectors
beside `inputs`; both places are read for all. An option of another task than the one asked is
refused: `candidate_labels` beside a plain classification would be forgotten without a word.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from packhorse.errors import InputError
from packhorse.serve.dialects.fields import only
from packhorse.serve.dialects.shapes import (
    NO_EFFECT,
    Direction,
    Lenient,
    Many,
    Named,
    Text,
    Top,
)
from packhorse.serve.dialects.tei_shapes import SimilarityInput

Task = Literal[
    "feature-extraction",
    "sentence-similarity",
    "question-answering",
    "fill-mask",
    "text-classification",
    "token-classification",
    "zero-shot-classification",
]
CUTTING = {"truncate", "truncation", "truncation_direction"}
# What each task is told by; an option of only one task also tells which task is meant.
OPTIONS: dict[Task, set[str]] = {
    "zero-shot-classification": {
        "candidate_labels",
        "hypothesis_template",
        "multi_label",
        *CUTTING,
    },
    "fill-mask": {"targets", "top_k", *CUTTING},
    "text-classification": {"function_to_apply", "return_all_scores", "top_k", *CUTTING},
    "token-classification": {"aggregation_strategy", "ignore_labels", "stride", *CUTTING},
    "feature-extraction": {"normalize", "dimensions", "encoding_format", "prompt_name", *CUTTING},
    "sentence-similarity": {"prompt_name", *CUTTING},
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
TELLING: dict[str, Task] = {
    name: task
    for task, names in OPTIONS.items()
    for name in names
    if sum(name in others for others in OPTIONS.values()) == 1
}
TELLING["prompt_name"] = "feature-extraction"  # sentence-similarity is known by its inputs


class Question(Lenient):
    """A question, and the text to look for the answer in."""

    question: str = Field(examples=["What carries the sacks?"])
    context: str = Field(examples=["The horse carries the sacks to market."])


class Options(Lenient):
    """The options of all tasks, wherever they stand."""

    # of several tasks
    top_k: Top | None = None
    truncate: bool | None = None
    truncation: bool | None = Field(default=None, description="The same as `truncate`.")
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    # feature-extraction
    normalize: bool | None = None
    dimensions: int | None = Field(default=None, ge=1, le=2**20)
    encoding_format: Literal["float"] | None = Field(
        default=None, description="Numbers are JSON here."
    )
    # question-answering
    align_to_words: Annotated[bool | None, only(False, instead="spans are whole tokens")] = None
    doc_stride: int | None = Field(default=None, ge=0, le=2**20)
    handle_impossible_answer: bool | None = None
    max_answer_len: int | None = Field(default=None, ge=1, le=256)
    max_question_len: int | None = Field(
        default=None, ge=1, description="A question with more tokens is refused, not cut."
    )
    max_seq_len: int | None = Field(default=None, ge=1, le=2**20)
    # fill-mask
    targets: Many[str] | None = None
    # text-classification
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    return_all_scores: Annotated[bool | None, only(True, instead="use `top_k`")] = None
    # token-classification
    aggregation_strategy: Literal["none", "simple"] | None = Field(
        default=None, description="Tokens, or stretches of them; words are not weighed as a whole."
    )
    ignore_labels: Many[str] | None = None
    stride: int | None = Field(
        default=None,
        ge=0,
        le=2**20,
        description="With 0 a long text is read in chunks. Chunks share no tokens here: with more, "
        "a text that needs chunks is 413.",
    )
    # zero-shot-classification
    candidate_labels: str | Many[str] | None = Field(
        default=None, description="Labels to choose from; one text has commas between them."
    )
    hypothesis_template: str | None = Field(
        default=None, description="A sentence with {} where the label goes."
    )
    multi_label: bool | None = Field(
        default=None, description="Each label is true or not by itself."
    )
    # of the tokenizer
    max_length: Annotated[int | None, only(instead="texts are cut to what the model takes")] = None
    padding: bool | str | None = NO_EFFECT


class Parameters(Options):
    """Options, where most tasks have them."""


Inputs = Annotated[
    Text | Many[Text] | SimilarityInput | Question | Many[Question],
    Field(examples=["What is packing?"]),
]


class InferenceRequest(Options):
    """What InferenceClient sends; vectors have their options beside `inputs`."""

    inputs: Inputs
    parameters: Parameters | None = None
    options: dict[str, Any] | None = NO_EFFECT  # use_cache, wait_for_model
    model: Named = None

    def option(self, name: str) -> Any:
        """What was said of it, in either place."""
        inner = None if self.parameters is None else getattr(self.parameters, name)
        return getattr(self, name) if inner is None else inner

    @property
    def given(self) -> list[str]:
        """The options that were sent."""
        return [name for name in Options.model_fields if self.option(name) is not None]

    @property
    def truncate_long(self) -> bool | None:
        """May a text that is too long be cut? None where nothing is said."""
        found = self.option("truncate")
        return self.option("truncation") if found is None else found

    def check(self, task: Task) -> None:
        """Refuse what another task is told by."""
        every = set().union(*OPTIONS.values())
        for name in self.given:
            if name in every - OPTIONS[task]:
                tasks = " and ".join(task for task, names in OPTIONS.items() if name in names)
                raise InputError(f"{name} is an option of {tasks}; here {task} was asked")


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
