"""Tiny models exported in every way there is, and their answers, one sequence at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("onnx", reason="the extra onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

Answers = list[dict[str, np.ndarray]]  # of each sequence, by the name of the output

EXPORTS = Path(__file__).parents[1] / "checkpoint" / "exports"
WORDS, POSITIONS = 60, 24
LONGEST = POSITIONS - 2  # of RoBERTa's positions the first two are not for tokens
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": POSITIONS,
}
DISTIL = {
    "vocab_size": WORDS,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": POSITIONS,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", SIZES),
    "span": ("BertForQuestionAnswering", SIZES),
    "classify": ("BertForSequenceClassification", SIZES | {"num_labels": 3}),
    "tokens": ("BertForTokenClassification", SIZES | {"num_labels": 5}),
    "pretraining": ("BertForPreTraining", SIZES),
    "roberta": ("RobertaModel", SIZES),
    "roberta-classify": ("RobertaForSequenceClassification", SIZES),
    "distilbert": ("DistilBertForQuestionAnswering", DISTIL),
    "electra": ("ElectraForSequenceClassification", SIZES | {"embedding_size": 8}),
    "mpnet": ("MPNetModel", SIZES),
}
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Tokens:
    """A sequence."""

    ids: np.ndarray
    types: np.ndarray


@pytest.fixture(autouse=True)
def _one_thread(threads: Callable[[int], None]) -> None:
    threads(1)


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pytest.importorskip("transformers", reason="transformers is not installed")
    result.logging.set_verbosity_error()
    return result


@pytest.fixture(scope="session")
def make(transformers: ModuleType) -> Callable[..., nn.Module]:
    """A model of MODELS whose weights are all random."""

    def make(kind: str, attention: str = "sdpa", **settings: Any) -> nn.Module:
        name, sizes = MODELS[kind]
        cls = getattr(transformers, name)
        torch.manual_seed(0)
        config = cls.config_class(**(sizes | settings))
        model = cls._from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    return make


class Called(nn.Module):
    """A model with its inputs in order and its outputs as a tuple, as an exporter likes it."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *options: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.model(**dict(zip(self.names, options, strict=True)))
        return tuple(result.values()) if hasattr(result, "values") else result


def export(
    model: nn.Module,
    path: Path,
    outputs: Sequence[str],
    *,
    inputs: Sequence[str] = INPUTS,
    dynamo: bool = False,
    opset: int | None = None,
    dynamic: bool = True,
) -> Path:
    """Write `path` with torch's old exporter, or with the new one."""
    ids = torch.randint(3, WORDS, (2, 7))
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": ids * 0}
    arguments = tuple(options[name] for name in inputs)
    names = {"input_names": list(inputs), "output_names": list(outputs), "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            any_size = torch.export.Dim.DYNAMIC
            shapes = {"options": tuple({0: any_size, 1: any_size} for _ in inputs)}
            torch.onnx.export(
                Called(model, inputs).eval(),
                arguments,
                path,
                dynamo=True,
                opset_version=opset,
                external_data=False,
                dynamic_shapes=shapes,
                **names,  # type: ignore[arg-type]
            )
        else:
            axes = {name: {0: "batch", 1: "sequence"} for name in (*inputs, *outputs)}
            torch.onnx.export(
                Called(model, inputs).eval(),
                arguments,
                path,
                dynamo=False,
                opset_version=opset or 17,
                dynamic_axes=axes if dynamic else None,
                **names,  # type: ignore[arg-type]
            )
    return path


OUTPUTS = {
    "bert": ("last_hidden_state", "pooler_output"),
    "span": ("start_logits", "end_logits"),
    "classify": ("logits",),
    "tokens": ("logits",),
    "pretraining": ("prediction_logits", "seq_relationship_logits"),
    "roberta": ("last_hidden_state", "pooler_output"),
    "roberta-classify": ("logits",),
    "distilbert": ("start_logits", "end_logits"),
    "electra": ("logits",),
    "mpnet": ("last_hidden_state", "pooler_output"),
}


@pytest.fixture(scope="session")
def exported(
    make: Callable[..., nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The file of a name like `span:eager`, `bert:sdpa:dynamo` or `bert:sdpa:dynamo:23`."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def exported(name: str) -> Path:
        kind, attention, exporter, opset = [*name.split(":"), "", ""][:4]
        names = INPUTS if kind not in ("distilbert", "mpnet") else INPUTS[:2]
        return export(
            make(kind, attention),
            folder / f"{name.replace(':', '-')}.onnx",
            OUTPUTS[kind],
            inputs=names,
            dynamo=exporter == "dynamo",
            opset=int(opset) if opset else None,
        )

    return exported


@pytest.fixture(scope="session")
def sequences() -> list[Tokens]:
    """Of uneven length, one as long as the model allows."""
    rng = np.random.default_rng(7)
    return [
        Tokens(rng.integers(3, WORDS, n), (np.arange(n) >= n / 2).astype(np.int64))
        for n in (5, LONGEST, 1, 9, 3, 12)
    ]


@pytest.fixture(scope="session")
def alone_answers(sequences: list[Tokens]) -> Callable[[Path], Answers]:
    """What a model that is not packed says of each of `sequences`."""
    return cache(lambda path: alone(path, sequences))


def alone(path: Path, sequences: Sequence[Tokens]) -> Answers:
    """What a model that is not packed says of each sequence, run by itself."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    taken = {value.name for value in session.get_inputs()}
    result = []
    for tokens in sequences:
        options = zip(INPUTS, (tokens.ids, np.ones_like(tokens.ids), tokens.types), strict=True)
        feeds = {name: column[None] for name, column in options if name in taken}
        results = session.run(names, feeds)
        result.append({n: np.asarray(r)[0] for n, r in zip(names, results, strict=True)})
    return result


def far_off(loaded: Answers, reference: Answers) -> float:
    """The largest difference."""
    assert [list(item) for item in loaded] == [list(item) for item in reference]
    return max(
        float(np.abs(a[name].astype(np.float64) - b[name]).max())
        for a, b in zip(loaded, reference, strict=True)
        for name in a
    )
