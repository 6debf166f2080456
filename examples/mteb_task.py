"""A task of your own in MTEB, run over Packhorse: the runner takes the encoder as it is.

    pip install packhorse mteb
    python examples/mteb_task.py

Tasks that MTEB has go the same way: `mteb.evaluate(model, mteb.get_tasks(["STSBenchmark"]))`. It
keeps results by a model's name: pass `cache=None` after you trained a folder of the same name anew.
"""

from typing import Any

import mteb
from datasets import Dataset
from mteb.abstasks.sts import AbsTaskSTS

import packhorse

PAIRS = [
    {"sentence1": "A mule carries sacks.", "sentence2": "A pack animal bears a load.", "score": 5},
    {"sentence1": "The harbour froze.", "sentence2": "Ice closed the port.", "score": 4},
    {"sentence1": "Bread needs time.", "sentence2": "The dough has to rest.", "score": 3},
    {"sentence1": "He reads a map.", "sentence2": "She reads a novel.", "score": 2},
    {"sentence1": "The train is late.", "sentence2": "Tomatoes are ripe.", "score": 0},
]


class OurPairs(AbsTaskSTS):
    metadata = mteb.TaskMetadata(
        name="OurPairs",
        description="Pairs of sentences and how alike people found them, from 0 to 5.",
        type="STS",
        category="t2t",
        modalities=["text"],
        dataset={"path": "none", "revision": "1"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )

    def load_data(self, *_: Any, **__: Any) -> None:
        self.dataset: Any = {"test": Dataset.from_list(PAIRS)}
        self.data_loaded = True


def main(model: str = "sentence-transformers/all-MiniLM-L6-v2") -> None:
    encoder: Any = packhorse.load(model)
    result = mteb.evaluate(encoder, [OurPairs()], cache=None)
    for task in result.task_results:
        print(f"{task.task_name}: {task.get_score():.4f}")


if __name__ == "__main__":
    main()
