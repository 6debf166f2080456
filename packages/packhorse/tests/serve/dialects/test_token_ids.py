"""Token ids on OpenAI's route: of the model's vocabulary, of cl100k, and of neither.

LangChain's OpenAIEmbeddings sends ids of cl100k by default, made by tiktoken. The table of cl100k
is the copy in llama-index: nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse.errors import InputError
from packhorse.serve.dialects import token_ids

TEXTS = ["The horse carries the sacks to market.", "A mule, with no load!", "naïve café 日本 🐴"]
WORDS = 250_002  # as XLM-RoBERTa has, so that it includes all ids of cl100k
REMEDY = "check_embedding_ctx_length=False"


@pytest.fixture(scope="module")
def tiktoken_cache() -> Path:
    """A cache directory with the table of cl100k, for tiktoken to use offline."""
    spec = importlib.util.find_spec("llama_index.core")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no table of cl100k: pip install llama-index-core")
    return Path(spec.submodule_search_locations[0]) / "_static" / "tiktoken_cache"


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Any:
    """A model whose vocabulary is so large that it has all ids of cl100k."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("wide")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "horse", "carries", "mule"]
    words += [f"w{number}" for number in range(WORDS - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words))
    return packhorse.load(folder, device="cpu")


@pytest.fixture(scope="module")
def models(encoders, wide) -> dict[str, Any]:
    return {"mini": encoders["mini"], "wide": wide}


@pytest.fixture(scope="module")
def plain(listen, models) -> Any:
    return listen(models)


@pytest.fixture(scope="module")
def decoding(listen, models, tiktoken_cache) -> Any:
    return listen(models, token_ids=f"cl100k={tiktoken_cache / token_ids.CACHED_NAME}")


@pytest.fixture
def langchain(tiktoken_cache, monkeypatch) -> Any:
    """Make OpenAIEmbeddings for a model of a server."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("langchain_openai")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
    clients = []

    def make(server: Any, name: str, **options: Any) -> Any:
        options |= {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        embeddings = module.OpenAIEmbeddings(model=name, tiktoken_model_name="gpt-4", **options)
        clients.append(embeddings.client._client)
        return embeddings

    yield make
    for client in clients:
        client.close()


@pytest.mark.parametrize("name", ["mini", "wide"])
def test_langchain_default_is_refused_with_the_remedy(langchain, plain, name) -> None:
    from openai import UnprocessableEntityError

    with pytest.raises(UnprocessableEntityError, match=REMEDY):
        langchain(plain, name).embed_documents(TEXTS)
    with pytest.raises(UnprocessableEntityError, match=r"\[CLS\] … \[SEP\].*--token-ids cl100k"):
        langchain(plain, name).embed_query(TEXTS[0])


@pytest.mark.parametrize("name", ["mini", "wide"])
def test_langchain_with_the_remedy(langchain, plain, models, name) -> None:
    vectors = langchain(plain, name, check_embedding_ctx_length=False).embed_documents(TEXTS)
    assert np.allclose(vectors, models[name].embed(TEXTS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["mini", "wide"])
def test_langchain_default_is_decoded_where_the_server_says_so(
    langchain, decoding, models, name
) -> None:
    vectors = langchain(decoding, name).embed_documents(TEXTS)
    assert np.allclose(vectors, models[name].embed(TEXTS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["mini", "wide"])
def test_framed_ids_are_the_models_own_on_both(plain, decoding, models, name) -> None:
    import httpx

    ids = [encoding.ids.tolist() for encoding in models[name].tokenize(TEXTS)]
    for server in (plain, decoding):
        body = {"model": name, "input": ids}
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body).json()
        vectors = [row["embedding"] for row in answer["data"]]
        assert np.allclose(vectors, models[name].embed(TEXTS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ids", [[5], [2], [2, 5], [5, 3], [[2, 5, 3], [5, 6]], [3, 5, 2]], ids=str)
def test_ids_are_never_guessed_by_their_range(plain, ids) -> None:
    """All ids exist in the vocabulary. Either all lists of a request are framed, or none counts."""
    import httpx

    body = {"model": "wide", "input": ids}
    refused = httpx.post(f"{plain.url}/v1/embeddings", json=body)
    assert refused.status_code == 422 and REMEDY in refused.text


def test_the_table_decodes_as_tiktoken_does(tiktoken_cache, monkeypatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
    reference = tiktoken.get_encoding("cl100k_base")
    table = token_ids.load_table("cl100k")
    assert table is not None and len(table.tokens) == reference.max_token_value + 1 - 21
    rows = [reference.encode(text) for text in TEXTS]
    rows += [rows[2][:count] for count in range(len(rows[2]))]  # split within a character
    rows += np.random.default_rng(0).integers(0, 100_256, (200, 9)).tolist()
    assert [table.decode(row, 10_000) for row in rows] == [reference.decode(row) for row in rows]
    with pytest.raises(InputError, match="not in the vocabulary of cl100k"):
        table.decode([100_257], 10)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("o200k", "it must be cl100k or cl100k=FILE"),
        ("cl100k=/nowhere/table", "cannot read the table of cl100k from /nowhere/table"),
        ("cl100k", "TIKTOKEN_CACHE_DIR"),
        (f"cl100k={__file__}", "SHA-256"),
    ],
)
def test_a_table_that_is_not_there_is_reported(setting, message, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(InputError, match=message):
        token_ids.load_table(setting)
