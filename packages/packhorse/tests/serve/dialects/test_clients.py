"""The official clients, as installed, against our server.

They specify what they send and read: a response that they cannot unpack fails here.
"""

from __future__ import annotations

import numpy as np
import pytest

TEXTS = ["The horse carries the sacks to market.", "A mule, with no load.", "naïve café 日本 🐴"]
CONTEXT = "the old brown horse carries sacks to market and the cat sat on the red mat ."


def close(values: object, expected: object) -> bool:
    return np.allclose(np.asarray(values, np.float64), np.asarray(expected), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def openai(server):
    client = pytest.importorskip("openai").OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    )
    yield client
    client.close()


@pytest.fixture(scope="module")
def hub(server):
    """Make an InferenceClient of a model by its URL; tests are offline except for this."""
    from huggingface_hub import InferenceClient, close_session, constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield lambda name="": InferenceClient(
            model=f"{server.url}/models/{name}" if name else server.url
        )
        close_session()


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_openai_embeddings(openai, server, encoding):
    options = {"encoding_format": encoding} if encoding else {}
    response = openai.embeddings.create(model="mini", input=TEXTS, **options)
    vectors = [row.embedding for row in response.data]
    if encoding == "base64":
        import base64

        vectors = [np.frombuffer(base64.b64decode(encoded), "<f4") for encoded in vectors]
    encoder = server.encoder("mini")
    assert close(vectors, encoder.embed(TEXTS))
    assert [row.index for row in response.data] == [0, 1, 2] and response.model == "mini"
    assert response.usage.prompt_tokens == sum(map(len, encoder.tokenize(TEXTS)))


def test_openai_takes_token_ids_and_cuts_dimensions(openai, server):
    encoder = server.encoder("mini")
    ids = [encoding.ids.tolist() for encoding in encoder.tokenize(TEXTS)]
    whole = encoder.embed(TEXTS)
    for inputs, expected in [(ids, whole), (ids[0], whole[:1]), (TEXTS[0], whole[:1])]:
        response = openai.embeddings.create(model="mini", input=inputs)
        assert close([row.embedding for row in response.data], expected)
    short = openai.embeddings.create(model="mini", input=TEXTS, dimensions=64)
    expected = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
    assert close([row.embedding for row in short.data], expected)


def test_openai_models_and_errors(openai):
    from openai import APIStatusError, BadRequestError, NotFoundError, UnprocessableEntityError

    assert [model.id for model in openai.models.list()][:2] == ["mini", "tiny"]
    assert openai.models.retrieve("ranker").owned_by == "packhorse"
    with pytest.raises(NotFoundError, match="there are: mini"):
        openai.embeddings.create(model="gpt", input="a")
    with pytest.raises(BadRequestError, match="no input"):
        openai.embeddings.create(model="mini", input=[])
    with pytest.raises(UnprocessableEntityError, match="from 0 to 30521"):
        openai.embeddings.create(model="mini", input=[[101, 40_000, 102]])
    with pytest.raises(APIStatusError, match="it supports: classify") as refused:
        openai.embeddings.create(model="judge", input="a")
    assert refused.value.status_code == 424


def test_openai_takes_as_many_inputs_as_openai(openai, server):
    encoder = server.encoder("tiny")
    texts = [f"sacks {'to market ' * (i % 60)}." for i in range(2048)]  # many are too long
    response = openai.embeddings.with_raw_response.create(model="tiny", input=texts)
    vectors = [row.embedding for row in response.parse().data]
    assert close(vectors, encoder.embed(texts, long="truncate"))
    cut = sum(bool(e.truncated) for e in encoder.tokenizer.encode(texts, encoder.max_length))
    assert response.headers["x-packhorse-truncated"] == str(cut)


def test_langchain_sends_a_thousand_texts_at_once(server):
    langchain = pytest.importorskip("langchain_openai")
    client = langchain.OpenAIEmbeddings(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
    )
    assert client.chunk_size == 1000
    texts = [f"sacks {'to market ' * (i % 60)}." for i in range(1500)]
    assert close(
        client.embed_documents(texts), server.encoder("tiny").embed(texts, long="truncate")
    )


def test_openai_long_texts_in_extra_body(openai, server):
    encoder = server.encoder("tiny")
    text = "sacks to market " * 30
    from openai import APIStatusError

    cut = openai.embeddings.create(model="tiny", input=text)
    assert close(cut.data[0].embedding, encoder.embed([text], long="truncate")[0])
    with pytest.raises(APIStatusError) as refused:
        openai.embeddings.create(model="tiny", input=text, extra_body={"truncate": False})
    assert refused.value.status_code == 413
    for long in ("truncate", "chunk"):
        response = openai.embeddings.create(model="tiny", input=text, extra_body={"long": long})
        assert close(response.data[0].embedding, encoder.embed([text], long=long)[0])


@pytest.fixture(scope="module")
def cohere(server):
    """Make a client of the class of that name; its sockets are closed afterwards."""
    import httpx

    module = pytest.importorskip("cohere")
    with httpx.Client() as http:
        yield lambda name: getattr(module, name)(
            api_key="none", base_url=server.url, httpx_client=http
        )


def test_cohere_reranks(cohere, server):
    from cohere.errors import NotFoundError

    documents = ["the cat", "a mule carries sacks", "what ?", "bad bad hat"]
    expected = server.encoder("ranker").rerank("who carries sacks", documents, raw=True)
    scores = [1 / (1 + np.exp(-ranked.score)) for ranked in expected]
    old = cohere("Client").rerank(
        query="who carries sacks",
        documents=[*documents[:2], *({"text": text} for text in documents[2:])],
        return_documents=True,
    )
    assert [ranked.index for ranked in old.results] == [ranked.index for ranked in expected]
    assert close([ranked.relevance_score for ranked in old.results], scores)
    assert [ranked.document.text for ranked in old.results] == [ranked.text for ranked in expected]
    new = cohere("ClientV2").rerank(
        model="ranker", query="who carries sacks", documents=documents, top_n=2
    )
    assert [ranked.index for ranked in new.results] == [ranked.index for ranked in expected][:2]
    assert new.meta.billed_units.search_units == 1
    with pytest.raises(NotFoundError, match="there are"):
        cohere("ClientV2").rerank(model="rerank-v3.5", query="a", documents=["b"])


def test_hub_feature_extraction(hub, server):
    encoder = server.encoder("mini")
    assert close(hub().feature_extraction(TEXTS[0]), encoder.embed(TEXTS[:1])[0])
    assert close(hub("mini").feature_extraction(TEXTS), encoder.embed(TEXTS))
    raw = hub().feature_extraction(TEXTS, normalize=False)
    assert not close(np.linalg.norm(raw, axis=1), 1)
    assert close(raw / np.linalg.norm(raw, axis=1, keepdims=True), encoder.embed(TEXTS))
    long = "sacks to market " * 100
    from_left = hub().feature_extraction(long, truncate=True, truncation_direction="left")
    assert close(from_left, encoder.embed([long], long="truncate_left")[0])
    assert hub().feature_extraction("a", dimensions=8).shape == (8,)


def test_hub_sentence_similarity(hub, server):
    similarities = hub().sentence_similarity(TEXTS[0], TEXTS[1:])
    first, *others = server.encoder("mini").embed(TEXTS)
    assert close(similarities, [first @ vector for vector in others])


def test_hub_question_answering(hub, server):
    encoder = server.encoder("reader")
    question = "what carries sacks ?"
    options = {"scoring": "pipeline", "max_answer_tokens": 15}
    best = encoder.answer([(question, CONTEXT)], top_k=3, **options)[0]
    single = hub().question_answering(question, CONTEXT)
    assert (single.answer, single.start, single.end) == (best[0].text, best[0].start, best[0].end)
    assert CONTEXT[single.start : single.end] == single.answer and close(
        single.score, best[0].score
    )
    three = hub("reader").question_answering(question, CONTEXT, top_k=3)
    assert [answer.answer for answer in three] == [answer.text for answer in best]
    expected = encoder.answer([(question, CONTEXT * 8)], stride=8, no_answer=0.0, **options)[0][0]
    wide = hub().question_answering(
        question, CONTEXT * 8, doc_stride=8, handle_impossible_answer=True
    )
    assert (wide.answer, wide.start) == (expected.text, expected.start)


def test_hub_fill_mask(hub, server):
    encoder = server.encoder("filler")
    text = "the horse carries [MASK] to market"
    words = hub("filler").fill_mask(text, top_k=3)
    expected = encoder.fill([text], top_k=3, decoded=True)[0][0]
    assert [(word.token_str, word.token, word.sequence) for word in words] == [
        (word.word, word.id, word.text) for word in expected
    ]
    targeted = hub("filler").fill_mask(text, targets=["cat", "sacks"])
    assert {word.token_str for word in targeted} == {"cat", "sacks"}
    assert targeted[0].score > targeted[1].score


def test_hub_text_classification(hub, server):
    labels = hub("judge").text_classification("a good cat")
    expected = server.encoder("judge").classify(["a good cat"])[0]
    assert {label.label: label.score for label in labels} == pytest.approx(expected.scores)
    assert labels[0].label == expected.label
    raw = hub("judge").text_classification("a good cat", function_to_apply="none", top_k=1)
    assert len(raw) == 1 and raw[0].score != pytest.approx(expected.score)


def test_hub_token_classification(hub, server):
    text = "the old brown horse sat on the red mat"
    entities = hub("tagger").token_classification(text)
    expected = server.encoder("tagger").label([text])[0]
    assert expected and [(e.entity_group, e.word, e.start, e.end) for e in entities] == [
        (e.label, e.text, e.start, e.end) for e in expected
    ]
    tokens = hub("tagger").token_classification(text, aggregation_strategy="none")
    assert len(tokens) > len(entities) and all(e.entity[:2] in ("B-", "I-") for e in tokens)
    unwanted = expected[0].label
    filtered = hub("tagger").token_classification(text, ignore_labels=[unwanted])
    assert len(filtered) == sum(e.label != unwanted for e in expected)


def test_hub_tells_what_is_wrong(hub):
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError) as refused:
        hub("judge").fill_mask("the [MASK]", targets=["cat"])
    assert refused.value.response.status_code == 424
    assert "classify" in refused.value.response.json()["error"]


def test_vectors_do_not_depend_on_what_else_is_in_flight(server, http):
    """Many texts in all dialects at once get the same answers as alone."""
    from concurrent.futures import ThreadPoolExecutor

    texts = [f"{'sacks ' * (7 * n % 40)}load number {n}" for n in range(24)]
    alone = [server.encoder("mini").embed([text])[0] for text in texts]

    def ask(number: int) -> bool:
        text = texts[number]
        if number % 3 == 0:
            vector = http.post("/embed", json={"inputs": [text, "poison"]}).json()[0]
        elif number % 3 == 1:
            body = {"input": text, "model": "mini"}
            vector = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        else:
            vector = http.post("/", json={"inputs": text}).json()
        return close(vector, alone[number])

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(len(texts))))
