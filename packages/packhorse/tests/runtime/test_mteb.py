"""MTEB's runner takes an encoder as it is, and finds what it finds with sentence-transformers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import packhorse

PAIRS = [
    ("A man is eating food.", "Someone eats a meal.", 4.5),
    ("A man is eating food.", "The market fell today.", 0.0),
    ("Rain falls on the old town.", "It is raining in the city.", 3.5),
    ("The dog sleeps.", "The dog sleeps for hours. " * 50, 3.0),
    ("A girl plays the violin.", "A girl plays a guitar.", 2.5),
    ("How tall is the tower?", "The tower was built in 1889.", 1.5),
    ("He wrote a letter.", "She bakes bread.", 0.5),
]
PROMPTS = {"query": "query: ", "document": "", "Retrieval-document": "title: ", "STS": "same: "}


# What the library and its dependencies warn of is not ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::packhorse.runtime.sentences.PromptWarning"),
]


@pytest.fixture(scope="module")
def mteb() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("mteb")


@pytest.fixture(scope="module")
def tasks(mteb: ModuleType) -> list[Any]:
    """Two tasks with data of their own: pairs of sentences, and a search among documents."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.sts import AbsTaskSTS

    def about(name: Any, kind: Any, score: str) -> Any:
        return mteb.TaskMetadata(
            name=name,
            description="Made by a test.",
            type=kind,
            category="t2t",
            modalities=["text"],
            dataset={"path": "none", "revision": "1"},
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score=score,
        )

    class LocalPairs(AbsTaskSTS):
        metadata = about("LocalPairs", "STS", "cosine_spearman")

        def load_data(self, *_: Any, **__: Any) -> None:
            rows = [
                dict(zip(("sentence1", "sentence2", "score"), pair, strict=True)) for pair in PAIRS
            ]
            self.dataset: Any = {"test": Dataset.from_list(rows)}
            self.data_loaded = True

    class LocalSearch(AbsTaskRetrieval):
        metadata = about("LocalSearch", "Retrieval", "ndcg_at_10")

        def load_data(self, *_: Any, **__: Any) -> None:
            documents = {f"d{i}": {"text": pair[1]} for i, pair in enumerate(PAIRS)}
            self.corpus = {"test": documents}
            self.queries = {"test": {f"q{i}": pair[0] for i, pair in enumerate(PAIRS)}}
            relevant = {f"q{i}": {f"d{i}": 1, f"d{(i + 1) % 7}": 1} for i in range(len(PAIRS))}
            self.relevant_docs = {"test": relevant}
            self.convert_v1_dataset_format_to_v2(None)
            self.data_loaded = True

    return [LocalPairs(), LocalSearch()]


def scores(mteb: ModuleType, model: Any, tasks: list[Any]) -> dict[str, dict[str, float]]:
    """All that the runner found, by task."""
    results = mteb.evaluate(model, tasks, cache=None, show_progress_bar=False)
    scores_by_task = {task.task_name: task.scores["test"][0] for task in results.task_results}
    return {
        name: {key: value for key, value in scores_of_task.items() if isinstance(value, float)}
        for name, scores_of_task in scores_by_task.items()
    }


@pytest.mark.parametrize("prompts", [{}, PROMPTS], ids=["plain", "prompts"])
def test_scores_are_those_of_sentence_transformers(
    mteb: ModuleType, tasks: list[Any], minilm: Path, prompts: dict[str, str]
) -> None:
    from sentence_transformers import SentenceTransformer

    model = replace(packhorse.load(minilm, device="cpu", dtype="fp32"), prompts=prompts)
    actual = scores(mteb, model, tasks)
    expected = scores(mteb, SentenceTransformer(str(minilm), device="cpu", prompts=prompts), tasks)
    assert list(actual) == ["LocalPairs", "LocalSearch"]
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, abs=5e-5, nan_ok=True)
    assert len(actual["LocalPairs"]) >= 8 and len(actual["LocalSearch"]) > 40
    assert (
        0.2
        < actual["LocalPairs"]["cosine_spearman"]
        < 1
        > actual["LocalSearch"]["ndcg_at_10"]
        > 0.2
    )


def test_the_runner_sees_what_the_model_says(mteb: ModuleType, minilm: Path) -> None:
    model = packhorse.load(minilm, device="cpu", dtype="bf16")
    meta = model.mteb_model_meta
    assert isinstance(model, mteb.EncoderProtocol)
    assert not isinstance(model, mteb.CrossEncoderProtocol | mteb.SearchProtocol)
    assert meta.name == "local/model" and meta.embed_dim == 384 and meta.max_tokens == 256
    assert meta.similarity_fn_name.value == "cosine"
    assert "bf16" in meta.experiment_name  # results are kept apart by number format
    task = SimpleNamespace(name="Any", type="STS")
    vectors = model.encode([{"text": ["a", "b"]}], task_metadata=task, prompt_type=None)
    assert isinstance(vectors, np.ndarray) and vectors.shape == (2, 384)


def test_the_prompt_is_chosen_as_the_runner_chooses(minilm: Path) -> None:
    from mteb.models.abs_encoder import get_prompt_name
    from mteb.types import PromptType

    from packhorse.runtime.sentences import prompt_of_task

    task: Any = SimpleNamespace(name="SciFact", type="Retrieval")
    names = ["SciFact-query", "SciFact", "Retrieval-document", "Retrieval", "query", "document"]
    for count in range(len(names) + 1):
        prompts = {name: name for name in names[count:]}
        for kind in (None, PromptType.query, PromptType.document):
            expected = get_prompt_name({"query": "", "document": ""} | prompts, task, kind)
            assert prompt_of_task(prompts, task, kind) == expected
