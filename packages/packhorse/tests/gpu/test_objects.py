"""On CUDA: sentence-transformers' objects, ours and accelerated ones, and files as jobs.

The oracle is always the library itself on the CPU.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import packhorse

from ..runtime import retrieval_models as models
from ..runtime.retrieval_models import TEXTS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # what the libraries warn of is not ours
]
PAIRS = [("the horse", text) for text in TEXTS]
KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")
# Against fp32 on the CPU; word weights reach 100, and are compared by their largest.
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 3e-1}


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """fp32 products in fp32: TF32 would hide differences under its own."""
    previous = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = previous


@pytest.fixture(scope="module")
def st() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def folders(st: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind, as the library saves it."""
    from sentence_transformers.sentence_transformer import modules

    home = tmp_path_factory.mktemp("models")
    base = models.bert(home / "bert", "BertModel")
    parts = [modules.Transformer(str(base)), modules.Pooling(32, "mean"), modules.Dense(32, 16)]
    st.SentenceTransformer(modules=parts, device="cpu").save_pretrained(
        str(home / "SentenceTransformer")
    )
    torch.manual_seed(0)
    st.CrossEncoder(str(base), num_labels=1, device="cpu").save_pretrained(
        str(home / "CrossEncoder")
    )
    models.splade(models.bert(home / "mlm"), home / "SparseEncoder", "max", "relu")
    models.stanford(base, home / "multi")
    return {kind: home / kind for kind in (*KINDS, "multi")}


def computed(model: Any, **options: Any) -> np.ndarray:
    """Vectors, scores or word weights of the texts, dense and on the CPU."""
    if type(model).__name__ == "CrossEncoder":
        return model.predict(PAIRS, **options)
    rows = model.encode(TEXTS, **options)
    return rows.to_dense().cpu().float().numpy() if isinstance(rows, torch.Tensor) else rows


def far(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, by the largest number if that is above 1."""
    assert actual.shape == expected.shape
    difference = np.abs(actual.astype(np.float64) - expected).max()
    return float(difference / max(1.0, np.abs(expected).max()))


@pytest.fixture(scope="module")
def theirs(st: ModuleType, folders: dict[str, Path]) -> dict[str, np.ndarray]:
    """What the library computes on the CPU."""
    return {kind: computed(getattr(st, kind)(str(folders[kind]), device="cpu")) for kind in KINDS}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_our_classes(
    kind: str, dtype: torch.dtype, folders: dict[str, Path], theirs: dict[str, np.ndarray]
) -> None:
    model = getattr(packhorse, kind)(str(folders[kind]), model_kwargs={"dtype": dtype})
    assert model.device.type == "cuda", "without a device the GPU is taken"
    assert far(computed(model), theirs[kind]) <= LIMITS[dtype]
    if dtype == torch.float32:  # the control: another weight is seen
        with torch.inference_mode():
            max(model.parameters(), key=torch.numel).mul_(1.5)
        assert far(computed(model), theirs[kind]) > LIMITS[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, folders: dict[str, Path], theirs: dict[str, np.ndarray]) -> None:
    model = getattr(packhorse, kind)(str(folders[kind]), device="cpu")
    assert far(computed(model.cuda()), theirs[kind]) <= LIMITS[torch.float32]
    assert next(model.parameters()).device.type == "cuda"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.device.type == "cuda"
        assert far(computed(other), theirs[kind]) <= LIMITS[torch.float32]
    tensors = computed(model.half())
    assert far(tensors, theirs[kind]) <= LIMITS[torch.float16]
    assert far(computed(model.float().cpu()), theirs[kind]) <= 1e-5
    if kind != "CrossEncoder":
        rows = model.to("cuda").encode(TEXTS, convert_to_tensor=True)
        assert rows.device.type == "cuda"


@pytest.mark.parametrize("kind", KINDS)
def test_accelerated(
    kind: str, st: ModuleType, folders: dict[str, Path], theirs: dict[str, np.ndarray]
) -> None:
    pytest.importorskip("sentence_transformers", minversion="6.2")
    model = getattr(st, kind)(str(folders[kind]), device="cuda")
    packhorse.accelerate(model)
    assert far(computed(model), theirs[kind]) <= LIMITS[torch.float32]
    assert model._inference._encoder is not None, "the library's own method ran"


def test_a_pool_of_devices(folders: dict[str, Path], theirs: dict[str, np.ndarray]) -> None:
    model = packhorse.SentenceTransformer(str(folders["SentenceTransformer"]))
    vectors = model.encode(TEXTS, device=["cuda:0", "cpu"], chunk_size=2)
    assert far(vectors, theirs["SentenceTransformer"]) <= LIMITS[torch.float32]


RUNS = {
    "embed": ("SentenceTransformer", [], "npy"),
    "int8": ("SentenceTransformer", ["--precision", "int8"], "npy"),
    "binary": ("SentenceTransformer", ["--precision", "binary"], "npy"),
    "sparse": ("SparseEncoder", [], "jsonl"),
    "multi": ("multi", [], "jsonl"),
    "hidden": ("SentenceTransformer", [], "jsonl"),
}


@pytest.mark.parametrize("name", RUNS)
def test_files_as_jobs(
    name: str, folders: dict[str, Path], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """The rows of the GPU are the CPU's, also of one GPU taken twice."""
    kind, flags, ending = RUNS[name]
    texts = tmp_path / "texts.jsonl"
    lines = [{"number": number, "text": TEXTS[number % 5]} for number in range(23)]
    texts.write_text("\n".join(map(json.dumps, lines)))
    task = name if name in ("sparse", "multi", "hidden") else "embed"
    command = ["run", "--task", task, "-m", folders[kind], "--input", texts, "--dtype", "fp32"]
    command += ["--chunk", 4, *flags]
    devices = (["--device", "cpu"], ["--device", "cuda"], ["--devices", "cuda:0,cuda:0"])
    files = [tmp_path / f"{number}.{ending}" for number in range(len(devices))]
    for path, choice in zip(files, devices, strict=True):
        result = cli(*command, *choice, "--out", path)
        assert result.code == 0, result.err
    expected, *others = map(numbers_of, files)
    assert len(expected) == len(lines)
    for rows in others:
        for actual, wanted in zip(rows, expected, strict=True):
            if name == "binary":  # a number near 0 has either sign
                assert np.unpackbits((actual ^ wanted).view(np.uint8)).mean() <= 0.02
            else:
                assert far(actual, wanted) <= (1.0 / 127 if name == "int8" else 1e-4)
    ends = [row.ravel()[-2:] for row in expected]
    assert any(far(end, ends[0]) > 1e-3 for end in ends), "the texts cannot be told apart"


def numbers_of(path: Path) -> list[np.ndarray]:
    """A row of numbers for each text of a file of results."""
    if path.suffix == ".npy":
        return list(np.load(path))
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [row["number"] for row in rows] == list(range(len(rows)))
    result: list[np.ndarray] = []
    for row in rows:
        if "indices" in row:  # by the word's number: words of nearly no weight may change places
            weights = np.zeros(len(models.VOCABULARY))
            weights[row["indices"]] = row["weights"]
            result.append(weights)
        else:
            key = next(key for key in ("vectors", "vector", "hidden", "states") if key in row)
            result.append(np.array(row[key]))
    return result
