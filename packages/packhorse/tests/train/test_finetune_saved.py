"""Fine-tuning on folders that `datasets` saved: the same examples as from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packhorse import checkpoint
from packhorse.data.tasks.targets import TrainingTask
from packhorse.errors import InputError
from packhorse.train import feed
from packhorse.train.settings import TrainSettings

TASKS: dict[str, dict[str, list[Any]]] = {
    "classify": {"sentence": ["good horse", "bad mule", "nice cart"], "label": [1, 0, 1]},
    "similarity": {"sentence1": ["a", "b"], "sentence2": ["b", "b"], "score": [0.5, 1.0]},
    "contrastive": {"first": ["horse", "mule"], "second": ["good horse", "bad mule"]},
}


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")


def _told(task: TrainingTask) -> list[Any]:
    return [
        (example.target, [list(sequence.ids) for sequence in example.sequences])
        for example in task.examples
    ]


@pytest.mark.parametrize("task", TASKS)
def test_the_same_examples(datasets: Any, tiny: Path, tmp_path: Path, task: str) -> None:
    columns, source = TASKS[task], checkpoint.load(tiny)
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(tmp_path / "saved")
    text = ("first", "second") if task == "contrastive" else ()
    options: dict[str, Any] = {"task": task, "model": str(tiny), "text": text, "steps": 1}
    file = feed.read_task(TrainSettings(train=str(tmp_path / "a.jsonl"), **options), source)
    named = {"train": str(tmp_path / "saved/train"), "eval": str(tmp_path / "saved/test")}
    folder = feed.read_task(TrainSettings(**named, **options), source)
    assert _told(folder.train) == _told(file.train)
    assert folder.eval is not None and len(folder.eval.examples) < len(folder.train.examples)
    with pytest.raises(InputError, match="holds splits; name one of them"):
        feed.read_task(TrainSettings(train=str(tmp_path / "saved"), **options), source)
