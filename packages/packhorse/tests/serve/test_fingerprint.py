"""The fingerprint in `/info` and in the header of every answer that a model computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import packhorse

from .bodies import TOKENS_ONLY
from .test_shortcut import GOOD

HEADER = "x-packhorse-fingerprint"


@pytest.fixture(scope="module")
def encoder(checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that was loaded from files, with a default prompt and another."""
    folder = tmp_path_factory.mktemp("model") / "prompted"
    shutil.copytree(checkpoint_folder, folder)
    assert (folder / "modules.json").is_file()
    settings = {
        "prompts": {"query": "good horse ", "document": "bad mule "},
        "default_prompt_name": "query",
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return packhorse.load(folder, device="cpu")


@pytest.fixture(scope="module")
def loaded(serving: Any, encoder: Any) -> Any:
    return serving(encoders=[encoder])


def test_info_has_the_fingerprint_and_its_parts(loaded: Any, encoder: Any) -> None:
    (model,) = loaded.get("/info").json()["models"]
    served = loaded.models.default.encoder
    assert model["fingerprint"] == served.fingerprint
    assert model["fingerprint_parts"] == served.fingerprint_parts().parts
    assert model["fingerprint_parts"]["prompt"] == "good horse "


def test_answers_have_the_fingerprint_of_their_prompt(loaded: Any) -> None:
    served = loaded.models.default.encoder
    expected = {
        prompt: str(served.fingerprint_parts(prompt=prompt))
        for prompt in ("", "good horse ", "bad mule ")
    }
    assert len(set(expected.values())) == 3

    def header(path: str, **body: Any) -> str:
        response = loaded.post(path, body)
        assert response.status_code == 200, response.text
        return response.headers[HEADER]

    assert header("/embed", inputs="the horse") == expected["good horse "] == served.fingerprint
    assert header("/embed", inputs="the horse", prompt_name="document") == expected["bad mule "]
    assert header("/v1/embeddings", input="the horse") == expected["good horse "]
    # Token ids and hidden states get no prompt unless one is named.
    assert header("/embed", inputs=[[2, 5, 3]]) == expected[""]
    assert header("/embed_all", inputs="the horse") == expected[""]
    assert header("/embed_all", inputs="horse", prompt_name="document") == expected["bad mule "]


def test_a_shorter_limit_is_another_fingerprint(loaded: Any, serving: Any, encoder: Any) -> None:
    short = serving(encoders=[encoder], max_input_tokens=16)
    first = loaded.models.default.encoder.fingerprint_parts()
    second = short.models.default.encoder.fingerprint_parts()
    assert first.differences(second) == ["max_length"]
    assert short.post("/embed", {"inputs": "the horse"}).headers[HEADER] == str(second)


@pytest.mark.parametrize("path", GOOD)
def test_every_answer_of_a_model_has_it(served: Any, path: str) -> None:
    response = served.post(path, GOOD[path])
    ran = path not in TOKENS_ONLY
    assert ("x-packhorse-pack" in response.headers) == ran
    assert (HEADER in response.headers) == ran


def test_it_is_on_no_other_answer(loaded: Any) -> None:
    assert HEADER not in loaded.post("/embed", {"inputs": ""}).headers
    assert HEADER not in loaded.get("/health").headers


def test_pages_of_other_origins_may_read_it(serving: Any, encoder: Any) -> None:
    served = serving(encoders=[encoder], cors_origin=("https://example.org",))
    origin = {"origin": "https://example.org"}
    response = served.post("/embed", {"inputs": "the horse"}, headers=origin)
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert HEADER in exposed
    assert HEADER in response.headers
