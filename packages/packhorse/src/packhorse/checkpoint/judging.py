"""Rerankers that are language models and answer yes or no: Qwen3-Reranker, read as a classifier.

Qwen3-Reranker is a Qwen3ForCausalLM. Asked whether a document fits a query, it answers "yes" or
"no", and the score is the probability of "yes" against "no" at the last position. That is the
sigmoid of the difference of two logits, each of which is a product of the last hidden state with a
row of the output embeddings. So the model is read as a classifier with one label, whose weight is
the difference of the two rows; the logits of other words are never computed.

A folder is recognized in one of three ways: by sentence-transformers' module `LogitScore` after the
transformer, as a Qwen3ForCausalLM without modules (as the model was published first), or by the key
that vLLM reads from the configuration of a classifier. The words around a pair are those of the
model's card (Qwen/Qwen3-Reranker-0.6B); templates in Jinja are not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packhorse.checkpoint import files
from packhorse.checkpoint.names import CanonicalCheckpoint, source
from packhorse.errors import CheckpointError, InputError
from packhorse.json_types import is_list, is_object
from packhorse.tokens import Tokenizer
from packhorse.tokens.files import parse_object
from packhorse.tokens.pair_template import PairTemplate

MODEL_TYPE = "qwen3"
LANGUAGE_MODEL = "Qwen3ForCausalLM"
CLASSIFIER = "Qwen3ForSequenceClassification"
# vLLM's key for such a model as a classifier; written here too, so that the words are kept.
KEY = "is_original_qwen3_reranker"
WORDS = ("yes", "no")
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")  # files that may hold a chat template
# A part of BEFORE: a chat template with it is that of the card.
RECOGNIZED = "Judge whether the Document meets the requirements based on the Query"


@dataclass(frozen=True, slots=True)
class JudgedWords:
    """The tokens whose logits make the score."""

    true: int
    false: int | None  # None: the score is the logit of `true` alone


def read_words(folder: Path) -> JudgedWords:
    """The settings of a folder of `LogitScore`."""
    raw = files.read_object(folder, "config.json")
    true = raw.get("true_token_id")
    false = raw.get("false_token_id")
    for key, value in (("true_token_id", true), ("false_token_id", false)):
        optional = key == "false_token_id" and value is None
        if not optional and (type(value) is not int or value < 0):
            raise CheckpointError(f"{folder}: {key} is {value!r}, not the number of a token")
    name = raw.get("module_input_name", "causal_logits")
    if name != "causal_logits":
        raise CheckpointError(f"{folder}: module_input_name {name!r} does not run here")
    return JudgedWords(int(true or 0), false)


def find_words(raw: Mapping[str, Any], vocabulary: Path | None) -> JudgedWords | None:
    """The words of a language model without modules; None if this is none, or has no such words."""
    if raw.get("model_type") != MODEL_TYPE or LANGUAGE_MODEL not in _classes(raw):
        return None
    file = vocabulary / "tokenizer.json" if vocabulary and vocabulary.is_dir() else vocabulary
    if file is None or file.suffix != ".json" or not file.is_file():
        return None
    model = parse_object(file)[1].get("model")
    words: Any = model.get("vocab") if is_object(model) else None
    if not is_object(words):
        return None
    true, false = (words.get(word) for word in WORDS)
    if type(true) is not int or type(false) is not int:
        return None
    return JudgedWords(true, false)


def _classes(raw: Mapping[str, Any]) -> list[Any]:
    named: Any = raw.get("architectures") or []
    return named if is_list(named) else [named]


def as_classifier(checkpoint: CanonicalCheckpoint, words: JudgedWords) -> CanonicalCheckpoint:
    """The language model as a classifier of one label; other words are not scored."""
    if checkpoint.raw.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"config: of language models that score words only {MODEL_TYPE!r} runs here; this is "
            f"{checkpoint.raw.get('model_type')!r}"
        )
    embeddings = source("bert.embed.words.weight", checkpoint.family)
    tensors = dict(checkpoint.tensors)
    scores = tensors.pop("lm_head.weight", None)
    tied: Any = checkpoint.raw.get("tie_word_embeddings")
    # `lm_head` counts unless the configuration ties it to the word embeddings. Without it the
    # embeddings take its place, unless the configuration says that they are not tied.
    table = tensors.get(embeddings) if tied or (scores is None and tied is None) else scores
    if table is None or table.ndim != 2:
        missing = embeddings if tied else "lm_head.weight"
        raise CheckpointError(f"{missing} is missing, by which words are scored")
    if max(words.true, words.false or 0) >= len(table):
        raise CheckpointError(
            f"the score is that of the tokens {words.true} and {words.false}, and there are "
            f"{len(table)} tokens"
        )
    # In fp32, whatever the file's format: the difference of two close rows would lose digits.
    weight = table[words.true].float()
    if words.false is not None:
        weight = weight - table[words.false].float()
    tensors[source("heads.classify.dense.weight", checkpoint.family)] = weight[None].clone()
    raw = {
        **{key: value for key, value in checkpoint.raw.items() if key not in ("id2label", KEY)},
        "architectures": [CLASSIFIER],
        "num_labels": 1,
        "problem_type": None,
        KEY: True,
    }
    return replace(checkpoint, raw=raw, tensors=tensors)


def pair_template(
    raw: Mapping[str, Any],
    tokenizer: Tokenizer,
    vocabulary: Path | None,
    prompts: Mapping[str, str],
    default_prompt: str | None,
) -> PairTemplate | None:
    """The words around a pair; None if the model takes pairs as they are.

    The instruction is the model's default prompt, if it has one, as in sentence-transformers.
    """
    if raw.get("model_type") != MODEL_TYPE or CLASSIFIER not in _classes(raw):
        return None
    template = _chat_template(vocabulary)
    is_known = RECOGNIZED in template
    if "query" in template and "document" in template and not is_known:
        raise CheckpointError(
            "the chat template of this model's folder is not that of Qwen3-Reranker, and templates "
            "are not run here; write the whole prompt into the texts, and remove the template"
        )
    if not is_known and raw.get(KEY) is not True:
        return None
    instruction = prompts.get(default_prompt or "") or INSTRUCTION
    before, after = (_ids(tokenizer, text) for text in (BEFORE, AFTER))
    return PairTemplate(before, f"<Instruct>: {instruction}\n<Query>: ", "\n<Document>: ", after)


def _chat_template(vocabulary: Path | None) -> str:
    """The text of the chat template beside a tokenizer; empty if there is none."""
    folder = vocabulary if vocabulary is None or vocabulary.is_dir() else vocabulary.parent
    if folder is None:
        return ""
    file, settings = TEMPLATES
    if files.exists(folder, file):
        with files.open_file(folder, file) as opened:
            return opened.read(files.JSON_LIMIT).decode("utf-8", "replace")
    named: Any = files.read_object(folder, settings, optional=True).get("chat_template")
    return named if isinstance(named, str) else ""


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens of a text, without those that the tokenizer puts around it."""
    try:
        (encoding,) = tokenizer.encode([text], max_length=4096)
    except InputError as error:
        raise CheckpointError(f"the words around a pair have no tokens: {error}") from error
    return tuple(encoding.ids[encoding.spans[0]].tolist())
