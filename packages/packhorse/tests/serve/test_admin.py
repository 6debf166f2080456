"""Models that come and go while the server runs; `processes/test_admin.py` has fronts."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse.errors import InputError
from packhorse.reports import random_model
from packhorse.serve.settings import ServeSettings, resolve

from .processes.test_processes import wait_for

ADMIN = {"authorization": "Bearer sesame"}
CLIENT = {"authorization": "Bearer of-a-client"}
TEXTS = ["w1 w2 w3", "w4"]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> Path:
    """A model of the same size with other weights."""
    return random_model.write("tiny", tmp_path_factory.mktemp("other") / "tiny", seed=1)


@pytest.fixture(scope="module")
def narrow_folder(tmp_path_factory) -> Path:
    """A model whose hidden states are half as wide."""
    folder = tmp_path_factory.mktemp("narrow") / "narrow"
    narrow = random_model.BertConfig(2048, hidden_size=32, layers=1, heads=2, intermediate_size=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_model.CONFIGS, "narrow", narrow)
        return random_model.write("narrow", folder)


def names(served: Any) -> list[str]:
    """The served models, as every route that lists them does."""
    listed = served.get("/admin/models", headers=ADMIN).json()["models"]
    expected = [model["name"] for model in listed]
    info = served.get("/info").json()["models"]
    assert [model["name"] for model in info] == expected
    assert [model["id"] for model in served.get("/v1/models").json()["data"]] == expected
    assert [model["id"] for model in served.get("/models").json()["data"]] == expected
    assert [engine["name"] for engine in served.get("/engine").json()["models"]] == expected
    figures = served.get("/metrics").text
    up = [line for line in figures.splitlines() if line.startswith("packhorse_up{")]
    assert up == [f'packhorse_up{{model="{name}"}} 1.0' for name in expected]
    return expected


def vectors(served: Any, model: str) -> Any:
    response = served.post("/v1/embeddings", {"model": model, "input": TEXTS})
    assert response.status_code == 200, response.text
    return [row["embedding"] for row in response.json()["data"]]


def post(served: Any, name: str, source: Any, **fields: Any) -> Any:
    body = {"name": name, "model": str(source), **fields}
    return served.post("/admin/models", body, headers=ADMIN)


def test_off_by_default(serving) -> None:
    served = serving()
    for method in ("GET", "POST"):
        response = served.ask(method, "/admin/models", json={}, headers=ADMIN)
        assert response.status_code == 404
    assert served.ask("DELETE", "/admin/models/tiny", headers=ADMIN).status_code == 404


def test_its_key_opens_it_and_nothing_else(serving) -> None:
    served = serving(keys=("of-a-client",), admin_key="sesame")
    for headers in ({}, CLIENT, {"authorization": "Bearer sesam"}):
        for method, path in (("GET", "/admin/models"), ("DELETE", "/admin/models/tiny")):
            response = served.ask(method, path, headers=headers)
            assert response.status_code == 401, (headers, path)
            assert response.headers["www-authenticate"].startswith("Bearer")
    assert served.get("/admin/models", headers=ADMIN).status_code == 200
    assert served.get("/info", headers=ADMIN).status_code == 401
    assert served.get("/info", headers=CLIENT).status_code == 200
    # Without API keys, other routes need none, and a page under another name still reads nothing.
    open_to_all = serving(admin_key="sesame")
    assert open_to_all.get("/info").status_code == 200
    assert open_to_all.get("/admin/models").status_code == 401
    foreign = {**ADMIN, "host": "evil.example"}
    assert open_to_all.get("/admin/models", headers=foreign).status_code == 403


def test_models_are_added_replaced_and_removed(
    serving, checkpoint_folder, other_folder, narrow_folder
) -> None:
    served = serving(admin_key="sesame")
    added = post(served, "new", checkpoint_folder)
    assert added.status_code == 200, added.text
    assert added.json()["model"]["source"] == str(checkpoint_folder)
    assert added.json()["replaced"] is None and added.json()["warnings"] == []
    assert names(served) == ["tiny", "new"]
    first = packhorse.load(checkpoint_folder, device="cpu")
    assert added.json()["model"]["fingerprint"] == first.fingerprint
    np.testing.assert_allclose(vectors(served, "new"), first.embed(TEXTS), atol=1e-5)
    # Only on request.
    assert "set replace" in post(served, "new", other_folder).json()["error"]
    same = post(served, "new", checkpoint_folder, replace=True)
    assert same.status_code == 200 and same.json()["warnings"] == []
    replaced = post(served, "new", other_folder, replace=True).json()
    assert replaced["replaced"]["fingerprint"] == first.fingerprint
    assert "the fingerprint is another one" in replaced["warnings"][0]
    second = packhorse.load(other_folder, device="cpu").embed(TEXTS)
    np.testing.assert_allclose(vectors(served, "new"), second, atol=1e-5)
    assert np.abs(second - first.embed(TEXTS)).max() > 1e-2  # the control: another model
    narrow = post(served, "new", narrow_folder, replace=True).json()
    assert "hidden states have 32 numbers and had 64" in narrow["warnings"][0]
    assert {len(vector) for vector in vectors(served, "new")} == {32}
    removed = served.ask("DELETE", "/admin/models/new", headers=ADMIN)
    assert removed.status_code == 200
    assert removed.json()["replaced"]["source"] == str(narrow_folder)
    assert names(served) == ["tiny"]


@pytest.mark.parametrize("name", ["", "a b", "a=b", "x" * 201, 'a"b', "a\n"])
def test_names_that_cannot_be_used(serving, checkpoint_folder, name) -> None:
    served = serving(admin_key="sesame")
    assert post(served, name, checkpoint_folder).status_code == 422


def test_what_cannot_be_opened_changes_nothing(serving, checkpoint_folder, tmp_path) -> None:
    served = serving(admin_key="sesame")
    post(served, "new", checkpoint_folder)
    before = vectors(served, "new")
    (tmp_path / "config.json").write_text("{")
    for source in (tmp_path / "nowhere", tmp_path):
        response = post(served, "new", source, replace=True)
        assert response.status_code in (422, 424) and response.json()["error"]
    assert names(served) == ["tiny", "new"]
    assert vectors(served, "new") == before
    assert served.ask("DELETE", "/admin/models/none", headers=ADMIN).status_code == 404
    served.ask("DELETE", "/admin/models/new", headers=ADMIN)
    last = served.ask("DELETE", "/admin/models/tiny", headers=ADMIN)
    assert last.status_code == 422 and "only model" in last.json()["error"]
    assert names(served) == ["tiny"]


def test_requests_under_way_finish_and_then_its_memory_is_free(
    serving, checkpoint_folder, other_folder
) -> None:
    running = threading.Event()
    go = threading.Event()

    def wait(_: Any) -> None:
        running.set()
        assert go.wait(60)

    served = serving(names=("ranker",), admin_key="sesame")
    post(served, "new", checkpoint_folder)
    model = served.models.named("new")
    expected = model.encoder.embed(TEXTS)
    # Its batches wait from now on.
    backend = model.encoder.backend
    plain = type(backend).__call__

    class Waiting(type(backend)):
        def __call__(self, *arguments: Any) -> Any:
            wait(None)
            return plain(self, *arguments)

    backend.__class__ = Waiting
    gone = [weakref.ref(model.encoder), weakref.ref(backend.model), weakref.ref(model.runner)]
    del model, backend
    body = json.dumps({"name": "new", "model": str(other_folder), "replace": True})
    texts = {"model": "new", "input": TEXTS}

    async def work(client: Any) -> None:
        under_way = asyncio.ensure_future(client.post("/v1/embeddings", json=texts))
        await asyncio.to_thread(running.wait, 60)
        headers = {**ADMIN, "content-type": "application/json"}
        replaced = await client.post("/admin/models", content=body, headers=headers)
        assert replaced.status_code == 200, replaced.text
        # The new model answers while the old one still has a request.
        assert (await client.post("/v1/embeddings", json=texts)).status_code == 200
        assert not under_way.done() and all(reference() is not None for reference in gone)
        go.set()
        answer = await under_way
        assert answer.status_code == 200
        rows = [row["embedding"] for row in answer.json()["data"]]
        np.testing.assert_allclose(rows, expected, atol=1e-5)

    served.run(work)
    wait_for(lambda: all(reference() is None for reference in gone))
    assert served.post("/v1/embeddings", texts).status_code == 200


def test_the_file_of_the_key(tmp_path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    flags = {"admin_key_file": str(file)}
    for text in ("", "one\ntwo\n"):
        file.write_text(text)
        with pytest.raises(InputError):
            resolve(None, {}, flags)
    file.write_text("sesame\n")
    assert resolve(None, {}, flags).admin_key == "sesame"
    assert "sesame" not in repr(resolve(None, {}, flags)) + resolve(None, {}, flags).toml()
    with pytest.raises(InputError, match="an API key too"):
        resolve(None, {"PACKHORSE_API_KEY": "sesame"}, flags)
    file.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        resolve(None, {}, flags)
    with pytest.raises(InputError, match="--engine local"):
        ServeSettings(engine="ray", admin_key_file="x")
