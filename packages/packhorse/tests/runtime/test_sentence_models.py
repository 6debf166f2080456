"""Models that sentence-transformers made and saved give its vectors here, module by module."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import packhorse
from packhorse import checkpoint
from packhorse.checkpoint.sentence import POOLING_FLAGS
from packhorse.errors import InputError
from packhorse.model.vectors import ACTIVATIONS

WIDTH = 32
POOLINGS = tuple(POOLING_FLAGS.values())  # those that sentence-transformers has too
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the horse mule carries two sacks to market and home :"
TEXTS = [
    "the horse",
    "the mule carries two sacks to market and the horse carries two sacks home",
    "mule",
    "two sacks to market",
    "",
    "home and home and home and market",
]
PROMPTS = {"query": "the market : ", "document": "", "other": "two"}
Parts = list[Any]
Build = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def st() -> Iterator[ModuleType]:
    """The library; what it and its dependencies warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").logging.disable_progress_bar()
        yield pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def bert(st: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random BERT and its tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=24,
    )
    torch.manual_seed(3)
    model = transformers.BertModel(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS.split()))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def build(st: ModuleType, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Save a model with the modules that `parts` makes; the saved one opened again, its folder."""
    from sentence_transformers.sentence_transformer import modules

    transformer = modules.Transformer(str(bert), max_seq_length=20)

    def build(
        pooling: Any = "mean",
        parts: Callable[[ModuleType], Parts] = lambda modules: [],
        include_prompt: bool = True,
        old: bool = False,
        **settings: Any,
    ) -> tuple[Any, Path]:
        torch.manual_seed(5)
        pooled = modules.Pooling(WIDTH, pooling_mode=pooling, include_prompt=include_prompt)
        all_modules = [transformer, pooled, *parts(modules)]
        for weight in (w for part in all_modules[1:] for w in part.parameters()):
            nn.init.normal_(weight, std=0.3)
        folder = tmp_path_factory.mktemp("model")
        model = st.SentenceTransformer(modules=all_modules, device="cpu", **settings)
        model.save(str(folder), create_model_card=False)
        if old:
            _as_release_two(folder)
        return st.SentenceTransformer(str(folder), device="cpu"), folder

    return build


def _as_release_two(folder: Path) -> None:
    """The names and flags under which release 2 wrote the same model."""
    listed = json.loads((folder / "modules.json").read_text())
    for module in listed:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (folder / "modules.json").write_text(json.dumps(listed))
    path = folder / "1_Pooling" / "config.json"
    now = json.loads(path.read_text())
    modes = now["pooling_mode"]
    modes = [modes] if isinstance(modes, str) else modes
    flags = {f"pooling_mode_{name}": mode in modes for name, mode in OLD_FLAGS.items()}
    config = {"include_prompt": now["include_prompt"], "word_embedding_dimension": WIDTH}
    path.write_text(json.dumps(config | flags))


OLD_FLAGS = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}


def reference_vectors(model: Any, **options: Any) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Softmax without a dimension
        return model.encode(TEXTS, show_progress_bar=False, **options)


def far(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max())


def one_dense(activation: str) -> Callable[[ModuleType], Parts]:
    bias = ACTIVATION_NAMES.index(activation) % 2 == 0
    return lambda modules: [modules.Dense(WIDTH, 6, bias, getattr(nn, activation)())]


ACTIVATION_NAMES = list(ACTIVATIONS)


def test_every_activation_of_torch_is_there() -> None:
    """All of its module of activations that need no argument and take vectors."""
    named = [getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__]
    others = {"Threshold", "MultiheadAttention", "Softmax2d"}  # need arguments, or pictures
    assert {kind.__name__ for kind in named} - others | {"Identity"} == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_dense_with_every_activation(activation: str, build: Build) -> None:
    model, folder = build(parts=one_dense(activation))
    encoder = packhorse.load(folder, device="cpu")
    expected = reference_vectors(model)
    assert encoder.width == expected.shape[1] == (3 if activation == "GLU" else 6)
    assert far(encoder.embed(TEXTS), expected) <= 1e-5


def several(modules: ModuleType) -> Parts:
    """Dense layers in a row, residuals with and without a projection, norms, and all between."""
    return [
        modules.Dense(2 * WIDTH, 16, False, nn.GELU(), use_residual=True),
        modules.LayerNorm(16),
        modules.Normalize(),
        modules.Dense(16, 16, True, nn.ReLU(), use_residual=True),
        modules.Dropout(0.3),
        modules.Dense(16, 9, True, nn.PReLU()),
        modules.LayerNorm(9),
        modules.Normalize(),
    ]


@pytest.mark.parametrize("old", [False, True])
def test_several_modules_in_every_format_and_back(old: bool, build: Build, tmp_path: Path) -> None:
    model, folder = build(("cls", "lasttoken"), several, old=old)
    expected = reference_vectors(model)
    encoder = packhorse.load(folder, device="cpu")
    assert encoder.width == 9
    assert far(encoder.embed(TEXTS), expected) <= 1e-5
    alone = np.concatenate([encoder.embed([text]) for text in TEXTS])
    assert far(alone, expected) <= 1e-5
    unnormalized = encoder.embed(TEXTS, normalize=False)
    assert far(unnormalized / np.linalg.norm(unnormalized, axis=1)[:, None], expected) <= 1e-5
    assert far(packhorse.load(folder, device="cpu", dtype="bf16").embed(TEXTS), expected) <= 0.05
    fixed = packhorse.load(folder, device="cpu", invariant=True, budget=64)
    assert far(fixed.embed(TEXTS), expected) <= 1e-5
    singly = np.concatenate([fixed.embed([text]) for text in TEXTS])
    assert np.array_equal(fixed.embed(TEXTS), singly)
    with packhorse.PackRunner(encoder) as runner:
        answers = [runner.submit(text) for text in TEXTS]
        assert far(np.stack([answer.result(60) for answer in answers]), expected) <= 1e-5
    checkpoint.write(tmp_path / "ours", checkpoint.load(folder))
    again = type(model)(str(tmp_path / "ours"), device="cpu")
    assert far(reference_vectors(again), expected) <= 1e-6
    assert far(packhorse.load(tmp_path / "ours", device="cpu").embed(TEXTS), expected) <= 1e-5


MODES: list[Any] = [*POOLINGS, ("lasttoken", "mean", "cls"), POOLINGS]


def test_every_pooling_of_theirs_is_here(st: ModuleType) -> None:
    from sentence_transformers.sentence_transformer import modules

    assert set(modules.Pooling.POOLING_MODES) == set(POOLINGS)


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_pooling_with_and_without_its_prompt(
    mode: Any, include_prompt: bool, build: Build
) -> None:
    settings = {"prompts": PROMPTS, "default_prompt_name": "query"}
    model, folder = build(mode, include_prompt=include_prompt, **settings)
    encoder = packhorse.load(folder, device="cpu")
    for name in ("query", "document", "other", None):
        expected = reference_vectors(model, prompt_name=name)
        assert far(encoder.embed(TEXTS, prompt=name), expected) <= 1e-5
        assert far(encoder.encode(TEXTS, prompt_name=name), expected) <= 1e-5
    with_other_prompt = reference_vectors(model, prompt="home home home")
    assert far(encoder.encode(TEXTS, prompt="home home home"), with_other_prompt) <= 1e-5
    alone = np.concatenate([encoder.embed([text]) for text in TEXTS])
    assert far(alone, reference_vectors(model)) <= 1e-5


def test_prompts_that_are_not_pooled_on_every_path(build: Build, tmp_path: Path) -> None:
    settings = {"prompts": PROMPTS, "default_prompt_name": "query"}
    model, folder = build(POOLINGS, include_prompt=False, old=True, **settings)
    expected = reference_vectors(model)
    model.set_pooling_include_prompt(True)
    assert far(reference_vectors(model), expected) > 1e-3  # a prompt that is pooled would show
    encoder = packhorse.load(folder, device="cpu")
    fixed = packhorse.load(folder, device="cpu", invariant=True, budget=64)
    assert far(fixed.embed(TEXTS), expected) <= 1e-5
    singly = np.concatenate([fixed.embed([text]) for text in TEXTS])
    assert np.array_equal(fixed.embed(TEXTS), singly)
    rows = packhorse.load(folder, device="cpu", kernel="mask", budget=64)
    assert rows.capacity and far(rows.embed(TEXTS), expected) <= 1e-5
    with packhorse.PackRunner(encoder) as runner:
        answers = [runner.submit(text) for text in TEXTS]
        assert far(np.stack([answer.result(60) for answer in answers]), expected) <= 1e-5
    with pytest.raises(InputError, match="cut at its beginning, but there stands the prompt"):
        encoder.embed([TEXTS[1] * 3], long="truncate_left")
    checkpoint.write(tmp_path / "ours", checkpoint.load(folder))
    again = type(model)(str(tmp_path / "ours"), device="cpu")
    assert far(reference_vectors(again), expected) <= 1e-6


def test_over_http(build: Build) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from packhorse.serve.app import create, guarded
    from packhorse.serve.hosting import ServedModels, serve_model
    from packhorse.serve.settings import ServeSettings

    settings = {"prompts": PROMPTS, "default_prompt_name": "query"}
    model, folder = build(("max", "weightedmean"), several, include_prompt=False, **settings)
    chosen = ServeSettings()
    hosts = ServedModels([serve_model(packhorse.load(folder, device="cpu"), chosen, publish=False)])
    app, _ = guarded(create(chosen, hosts))

    async def ask(**fields: Any) -> np.ndarray:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post("/embed", json={"inputs": FULL, **fields})
            return np.array(response.raise_for_status().json())

    try:
        for name in (None, "other"):
            fields = {} if name is None else {"prompt_name": name}
            expected = reference_vectors(model, prompt_name=name)[
                [TEXTS.index(text) for text in FULL]
            ]
            assert far(asyncio.run(ask(**fields)), expected) <= 1e-5
    finally:
        hosts.close(drain=False)


FULL = [text for text in TEXTS if text]


@pytest.mark.slow  # compiles
def test_compiled_buckets(build: Build) -> None:
    settings = {"prompts": PROMPTS, "default_prompt_name": "query"}
    model, folder = build(("max", "weightedmean"), several, include_prompt=False, **settings)
    encoder = packhorse.load(folder, device="cpu", graphs=True)
    assert far(encoder.embed(TEXTS), reference_vectors(model)) <= 1e-5
