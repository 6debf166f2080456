"""Real client libraries with their defaults against a running `packhorse serve`.

PACKHORSE_TEST_CLIENTS names the folder of their environments, which are made there on first use
(1: a folder of the user's cache). Each script of `clients/` runs once, in its environment; every
method is a test that compares what it returned with `packhorse.load` of the model that was served.
A method that does not work must be listed in `clients/differences.toml` with its reason, and one
that is listed must not work. When all have run, `docs/reference/clients.md` is written anew.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse.cache import private_folder
from packhorse.serve.dialects import token_ids

from . import client_scripts
from .client_scripts import FOLDER, PAGE, Row

VARIABLE = "PACKHORSE_TEST_CLIENTS"
# What clients send by default must be answered however busy the machine is.
SECONDS = 1800
TEXTS = ["The horse carries the sacks to market.", "A mule, with no load.", "naïve café 日本 🐴"]
MANY = [f"load number {number}" for number in range(2048)]
LONG = "The horse carries the sacks to market. " * 100
QUERY = "who carries sacks to market"
DOCUMENTS = ["hello", "the mule carries sacks to market", "a bad horse", "good good market"]
STATEMENT = "the good horse carries bad sacks to market"
CONTEXT = "the mule carries sacks to market and the horse is good"
QUESTION = "what carries sacks"
MASKED = "the horse carries [MASK] to market"
# By the head that the fixture `tiny` gives them.
SMALL_MODELS = {
    "judge": "classify",  # before the ranker: gRPC's Predict takes the first that can classify
    "ranker": "rerank",
    "tagger": "tokens",
    "reader": "span",
    "filler": "mlm",
}


class Models:
    """The models that are served, loaded here as well: what every answer is compared with."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    @cache  # noqa: B019 - lives as long as the module
    def load(self, name: str) -> Any:
        return packhorse.load(self.folders[name], device="cpu", dtype="fp32")

    @cache  # noqa: B019
    def expected(self, kind: str) -> Any:
        """The answer to a method of this kind."""
        return getattr(self, kind.replace(",", "").replace(" ", "_"))()

    def vectors(self) -> Any:
        return self.load("mini").embed(TEXTS)

    def vector(self) -> Any:
        return self.vectors()[0]

    def short_vectors(self) -> Any:
        short = self.vectors()[:, :64]
        return short / np.linalg.norm(short, axis=1, keepdims=True)

    def raw_vectors(self) -> Any:
        return self.load("mini").embed(TEXTS, normalize=False)

    def raw_vector(self) -> Any:
        return self.raw_vectors()[0]

    def compact_vectors(self) -> dict[str, Any]:
        from packhorse.runtime.precision import quantize, unit_ranges

        vectors = self.vectors()
        ranges = unit_ranges(vectors.shape[1])
        return {
            precision: quantize(vectors, precision, ranges)
            for precision in ("int8", "uint8", "binary", "ubinary")
        }

    def many(self) -> Any:
        return self.load("mini").embed(MANY)

    def long(self) -> Any:
        return self.load("mini").embed([LONG], long="truncate")[0]

    def similarities(self) -> list[float]:
        first, *others = self.vectors()
        return [float(first @ vector) for vector in others]

    def ranking(self) -> list[tuple[int, float]]:
        ranking = self.load("ranker").rerank(QUERY, DOCUMENTS, raw=True)
        return [(ranked.index, 1 / (1 + np.exp(-ranked.score))) for ranked in ranking]

    def first_two(self) -> list[tuple[int, float]]:
        return self.ranking()[:2]

    def labels(self) -> dict[str, float]:
        return self.load("judge").classify([STATEMENT])[0].scores

    def labels_of_a_pair(self) -> dict[str, float]:
        return self.load("judge").classify([(QUESTION, STATEMENT)])[0].scores

    def entities(self) -> list[tuple[str, str, int, int]]:
        entities = self.load("tagger").label([STATEMENT])[0]
        return [(entity.label, entity.text, entity.start, entity.end) for entity in entities]

    def entities_first(self) -> list[tuple[str, str, int, int]]:
        entities = self.load("tagger").label([STATEMENT], aggregation="first")[0]
        return [(entity.label, entity.text, entity.start, entity.end) for entity in entities]

    def answer(self) -> tuple[str, int, int]:
        # As transformers' pipeline, which is what this API runs.
        options: dict[str, Any] = {"scoring": "pipeline", "max_answer_tokens": 15}
        best = self.load("reader").answer([(QUESTION, CONTEXT)], **options)[0][0]
        return best.text, best.start, best.end

    def words(self) -> list[str]:
        return [word.word for word in self.load("filler").fill([MASKED])[0][0]]

    def tokens(self) -> list[int]:
        return self.load("mini").tokenize(TEXTS[:1])[0].ids.tolist()

    def states(self) -> Any:
        return self.load("mini").hidden(TEXTS[:1])[0].states

    def decoded(self) -> str:
        return self.load("mini").tokenizer.decode(self.tokens(), True)

    def tokens_of_the_text(self) -> list[int]:
        return self.tokens()[1:-1]  # without [CLS] and [SEP]

    def unknown_model(self) -> str:
        return f"no model of that name is served; there are: {', '.join(self.folders)}"

    def models(self) -> list[str]:
        return list(self.folders)

    def model(self) -> str:
        return "mini"

    def health(self) -> bool:
        return True


def agree(value: Any, expected: Any) -> bool:
    """Whether the values are the same, numbers to 1e-5."""
    if isinstance(expected, np.ndarray):
        value = np.asarray(value, np.float64)
        return value.shape == expected.shape and np.allclose(value, expected, rtol=0, atol=1e-5)
    if isinstance(expected, float):
        return abs(value - expected) <= 1e-5
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            agree(value[key], part) for key, part in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(agree, value, expected))
    return value == expected


@pytest.fixture(scope="module")
def environments() -> Path:
    """The folder of the environments."""
    name = os.environ.get(VARIABLE)
    if not name:
        pytest.skip(f"{VARIABLE} names no folder for the clients' environments (1: in the cache)")
    folder = private_folder("clients") if name == "1" else Path(name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def tiktoken_cache() -> Path:
    """A folder with OpenAI's table of tokens, for LangChain and for the server."""
    spec = importlib.util.find_spec("llama_index.core")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no table of cl100k: pip install llama-index-core (make test does)")
    return Path(spec.submodule_search_locations[0]) / "_static" / "tiktoken_cache"


@pytest.fixture(scope="module")
def models(minilm: Path, tiny: Callable[[str], Path]) -> Models:
    folders = {name: tiny(head) for name, head in SMALL_MODELS.items()}
    # Some clients send only names that Cohere's models have.
    return Models({"mini": minilm, **folders, "embed-english-v3.0": minilm})


@pytest.fixture(scope="module")
def grpc_port() -> int:
    """A port that was free a moment ago: gRPC binds by itself and takes no 0."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


@pytest.fixture(scope="module")
def url(models: Models, grpc_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server of all models, with its default settings and gRPC."""
    words = [f"--model={name}={path}" for name, path in models.folders.items()]
    words.append(f"--grpc-port={grpc_port}")
    with running_server(tmp_path_factory.mktemp("server"), words) as url:
        yield url


@pytest.fixture(scope="module")
def decoding_url(
    minilm: Path, tiktoken_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The base URL of a server that decodes the token ids of OpenAI's models."""
    table = tiktoken_cache / token_ids.CACHED_NAME
    words = [f"--model=mini={minilm}", f"--token-ids=cl100k={table}"]
    with running_server(tmp_path_factory.mktemp("decoding"), words) as url:
        yield url


@contextmanager
def running_server(folder: Path, words: list[str]) -> Iterator[str]:
    """Run `packhorse serve` with these arguments; yield its base URL."""
    options = ["--json", "--port", "0", "--threads", "1", "--device", "cpu"]
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "packhorse", "serve", *options, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PACKHORSE_RUNTIME": str(folder)},
            text=True,
        )
    assert process.stdout is not None
    with process.stdout:
        try:
            line = process.stdout.readline()
            assert line, (folder / "stderr").read_text("utf-8")
            yield f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def answers(
    url: str,
    grpc_port: int,
    decoding_url: str,
    tiktoken_cache: Path,
    environments: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Row], dict[str, Any]]:
    """What a script wrote, by method; it runs when the first of its methods is asked for."""
    folder = tmp_path_factory.mktemp("results")
    inputs = folder / "inputs.json"
    inputs.write_text(
        json.dumps(
            {
                "url": url,
                "grpc_address": f"127.0.0.1:{grpc_port}",
                "decoding_url": decoding_url,
                "texts": TEXTS,
                "many": MANY,
                "long": LONG,
                "query": QUERY,
                "documents": DOCUMENTS,
                "statement": STATEMENT,
                "question": QUESTION,
                "context": CONTEXT,
                "masked": MASKED,
            }
        ),
        "utf-8",
    )

    @cache
    def run(group: str, script: str, needs: str) -> dict[str, Any]:
        if needs and needs not in os.environ:
            pytest.skip(f"{needs} is not set")
        results = folder / f"{group}-{script}.json"
        interpreter, scripts = prepare(FOLDER / group, environments / group)
        (file,) = scripts.glob(f"client_{script}.*")
        completed = subprocess.run(
            [interpreter, str(file), str(inputs), str(results)],
            cwd=folder,
            env=environment(folder, tiktoken_cache, needs),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert results.exists(), completed.stdout + completed.stderr
        return json.loads(results.read_text("utf-8"))

    return lambda row: run(row.group, row.script, row.needs)


def prepare(group: Path, folder: Path) -> tuple[str, Path]:
    """Install the group's packages unless they are there; return interpreter and script folder."""
    is_node = (group / "package.json").exists()
    requirements = group / ("package.json" if is_node else "requirements.txt")
    stamp = folder / "installed"
    if is_node and not shutil.which("npm"):
        pytest.skip("no npm on PATH")
    if not stamp.exists() or stamp.read_bytes() != requirements.read_bytes():
        if stamp.exists():  # else it may be a folder of somebody else, and mkdir fails
            shutil.rmtree(folder)
        folder.mkdir()
        stamp.touch()
        if is_node:
            shutil.copy(requirements, folder)
            install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        else:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            install += ["--requirement", str(requirements)]
        subprocess.run(install, cwd=folder, check=True, timeout=SECONDS)
        shutil.copy(requirements, stamp)
    if not is_node:
        return str(folder / "bin" / "python"), group
    # An import in JavaScript looks for packages beside the script, not in the working folder.
    scripts = folder / "scripts"
    shutil.copytree(group, scripts, dirs_exist_ok=True)
    return "node", scripts


def environment(folder: Path, tiktoken_cache: Path, needs: str) -> dict[str, str]:
    """The variables of a script: nothing of ours but the harness, nothing sent to their makers."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", needs) if name in os.environ}
    return kept | {
        "HOME": str(folder),
        "PYTHONPATH": str(FOLDER),
        "PYTHONDONTWRITEBYTECODE": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OMP_NUM_THREADS": "1",
        "TIKTOKEN_CACHE_DIR": str(tiktoken_cache),
    }


@pytest.fixture(scope="module")
def works() -> Iterator[dict[str, bool]]:
    works: dict[str, bool] = {}
    yield works
    if works.keys() == {row.id for row in client_scripts.rows()}:
        PAGE.write_text(client_scripts.page(works), "utf-8")


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("row", client_scripts.rows(), ids=lambda row: row.id)
def test_a_method_answers_as_the_library(
    row: Row,
    environments: Path,
    answers: Callable[[Row], dict[str, Any]],
    models: Models,
    works: dict[str, bool],
) -> None:
    answer = answers(row)[row.method]
    known = [
        difference
        for difference in client_scripts.differences()
        if (difference.client, difference.method) == (row.client, row.method)
    ]
    is_right = "value" in answer and agree(answer["value"], models.expected(row.kind))
    works[row.id] = is_right
    if not known:
        assert is_right, answer.get("error", answer)
        return
    assert not is_right, "it works: take it out of differences.toml"
    assert re.search(known[0].error, answer.get("error", "")), answer


def test_a_wrong_answer_would_be_noticed(models: Models, environments: Path) -> None:
    """The control: vectors in another order, a swapped rank and a missing label do not agree."""
    vectors = models.expected("vectors")
    assert agree(vectors.tolist(), vectors) and not agree(vectors[::-1].tolist(), vectors)
    ranking = models.expected("ranking")
    assert not agree([ranking[1], ranking[0], *ranking[2:]], ranking)
    assert not agree(dict(list(models.expected("labels").items())[:1]), models.expected("labels"))
