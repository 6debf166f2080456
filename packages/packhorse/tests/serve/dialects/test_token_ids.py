"""Token ids on OpenAI's route: the model's own, cl100k's, and those of nobody.

LangChain's OpenAIEmbeddings, as it is installed and by default, is what sends foreign ids; tiktoken
is what makes them. Its table of cl100k is the copy that llama-index carries: nothing is fetched.
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
from packhorse.serve import cl100k

TEXTS = ["The horse carries the sacks to market.", "A mule, with no load!", "naïve café 日本 🐴"]
WORDS = 250_002  # as XLM-RoBERTa has: each id of cl100k is one of its own
REMEDY = "check_embedding_ctx_length=False"


@pytest.fixture(scope="module")
def tiktoken_cache() -> Path:
    """Where tiktoken finds its table without a network."""
    spec = importlib.util.find_spec("llama_index.core")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no table of cl100k: pip install llama-index-core")
    return Path(spec.submodule_search_locations[0]) / "_static" / "tiktoken_cache"


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Any:
    """A model with a vocabulary so large that no id of cl100k is out of its range."""
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
    return listen(models, token_ids=f"cl100k={tiktoken_cache / cl100k.CACHED}")


@pytest.fixture
def langchain(tiktoken_cache, monkeypatch) -> Any:
    """Makes OpenAIEmbeddings of a server's model."""
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
    found = langchain(plain, name, check_embedding_ctx_length=False).embed_documents(TEXTS)
    assert np.allclose(found, models[name].embed(TEXTS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["mini", "wide"])
def test_langchain_default_is_decoded_where_the_server_says_so(
    langchain, decoding, models, name
) -> None:
    found = langchain(decoding, name).embed_documents(TEXTS)
    assert np.allclose(found, models[name].embed(TEXTS), rtol=0, atol=1e-6)


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
    """All exist in the vocabulary. A request is one client's: all lists are framed, or none is."""
    import httpx

    body = {"model": "wide", "input": ids}
    refused = httpx.post(f"{plain.url}/v1/embeddings", json=body)
    assert refused.status_code == 422 and REMEDY in refused.text


def test_the_table_decodes_as_tiktoken_does(tiktoken_cache, monkeypatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
    theirs, ours = tiktoken.get_encoding("cl100k_base"), cl100k.table("cl100k")
    assert ours is not None and len(ours.tokens) == theirs.max_token_value + 1 - 21
    rows = [theirs.encode(text) for text in TEXTS]
    rows += [rows[2][:count] for count in range(len(rows[2]))]  # split within a character
    rows += np.random.default_rng(0).integers(0, 100_256, (200, 9)).tolist()
    assert [ours.decode(row, 10_000) for row in rows] == [theirs.decode(row) for row in rows]
    with pytest.raises(InputError, match="none of cl100k's"):
        ours.decode([100_257], 10)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("o200k", "it can be cl100k or cl100k=FILE"),
        ("cl100k=/nowhere/table", "cannot be read from /nowhere/table"),
        ("cl100k", "TIKTOKEN_CACHE_DIR"),
        (f"cl100k={__file__}", "SHA-256"),
    ],
)
def test_a_table_that_is_not_there_is_told(setting, told, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(InputError, match=told):
        cl100k.table(setting)
