"""Tiny models, and the same batch for our models and for those of transformers."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.packing.batch import Packed

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    "horse",
    "pack",
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its own imports warn of is not ours
        import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture
def save(transformers: ModuleType, tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Save a tiny random model of a transformers class: the model and its folder."""

    def save(kind: str, *, to: str = "theirs", shard: str | None = None, **settings: Any):
        config = transformers.BertConfig(**{**SIZES, **settings})
        model = getattr(transformers, kind)(config).eval()
        with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(tmp_path / to, **({"max_shard_size": shard} if shard else {}))
        return model, tmp_path / to

    return save


@pytest.fixture(scope="session")
def sequences() -> list[SimpleNamespace]:
    """Sequences of uneven length, the second half of each of type 1."""
    rng = np.random.default_rng(7)
    lengths = (5, 24, 1, 9)
    return [
        SimpleNamespace(ids=rng.integers(0, 50, n), types=(np.arange(n) >= n / 2).astype(np.int64))
        for n in lengths
    ]


@pytest.fixture(scope="session")
def packed(sequences: list[SimpleNamespace]) -> Packed:
    return Packed.build(sequences)


@pytest.fixture(scope="session")
def reference_run(sequences: list[SimpleNamespace]) -> Callable[[Any, str], torch.Tensor]:
    """An output of a transformers model, one sequence at a time, laid end to end."""

    def run(model: Any, output: str) -> torch.Tensor:
        with torch.inference_mode():
            results = [
                model(
                    input_ids=torch.from_numpy(s.ids)[None],
                    token_type_ids=torch.from_numpy(s.types)[None],
                )[output]
                for s in sequences
            ]
        per_token = results[0].dim() == 3 or output.endswith(("start_logits", "end_logits"))
        return torch.cat([r[0] if per_token else r for r in results])

    return run


@pytest.fixture
def tokenizer() -> Callable[[Path], None]:
    """Put a tiny tokenizer into a folder."""

    def put(folder: Path, **settings: Any) -> None:
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        defaults = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "model_max_length": 24,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(defaults | settings))

    return put


@pytest.fixture(scope="session")
def tf_bert(tf: ModuleType) -> ModuleType:
    """BERT in TensorFlow's own graph code: build, save, freeze, run (see the module)."""
    path = Path(__file__).with_name("tensorflow_bert.py")
    spec = importlib.util.spec_from_file_location("tensorflow_bert", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
