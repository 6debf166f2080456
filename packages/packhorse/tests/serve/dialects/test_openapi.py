"""The description of the API: committed, complete, and true under fuzzing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis")
COMMITTED = Path(__file__).resolve().parents[5] / "docs" / "openapi.json"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# Routes about the process, which have their own tests.
ELSEWHERE = ("/health", "/ping", "/ready", "/metrics", "/engine", "/docs")
OPERATIONS = [
    (path, method)
    for path, methods in json.loads(COMMITTED.read_bytes())["paths"].items()
    for method in methods
    if path not in ELSEWHERE and (path, method) != ("/", "get")
]


@pytest.fixture(scope="module")
def described(server):
    """The API description of the running server, to be called over its port."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_the_committed_description_is_what_is_served():
    from packhorse.serve import openapi

    assert COMMITTED.read_bytes() == openapi.document(), (
        "the API has changed; where it should: python -m packhorse.serve.openapi docs/openapi.json"
    )


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_route_has_an_example_and_a_shape_for_errors(path, method):
    document = json.loads(COMMITTED.read_bytes())
    operation = document["paths"][path][method]
    assert operation["description"] and operation["tags"]
    for status, response in operation["responses"].items():
        content = response["content"]["application/json"]["schema"]
        assert "$ref" in content, f"{status} of {path} has no shape"
    if method == "post":
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        schemas = document["components"]["schemas"]
        schema = schemas[body["$ref"].rpartition("/")[2]]
        for alternative in schema.get("oneOf", [schema]):
            if "$ref" in alternative:
                alternative = schemas[alternative["$ref"].rpartition("/")[2]]
            names = list(alternative.get("required", ()))
            if "texts" in alternative.get("properties", ()):  # Cohere's may be in another field
                names.append("texts")
            for name in names:
                assert exemplified(alternative["properties"][name], schemas), f"{path}: {name}"


def exemplified(schema: dict, schemas: dict) -> bool:
    """Return whether a schema has an example, or all of its parts have."""
    if "$ref" in schema:
        inner = schemas[schema["$ref"].rpartition("/")[2]]
        return all(exemplified(inner["properties"][name], schemas) for name in inner["required"])
    return "examples" in schema


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_is_sent_is_answered_as_described(described, path, method):
    fuzz(described[path][method])


def fuzz(operation) -> None:
    """A few bodies that fit the schema, and a few that do not."""
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])
    checks = [getattr(schemathesis.checks, name) for name in CHECKS]

    @settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases)
    def answered(case):
        case.call_and_validate(checks=checks)

    answered()


@pytest.mark.parametrize(
    ("says", "message"), [("a text", "violates schema"), (None, "Server error")]
)
def test_an_answer_that_is_not_as_described_is_caught(says, message):
    """The control: otherwise the tests above would prove nothing."""
    from fastapi import FastAPI
    from starlette.responses import JSONResponse

    app = FastAPI()

    @app.post("/embed", response_model=list[float])
    async def embed(body: dict[str, str]) -> JSONResponse:
        return JSONResponse(says, 200 if says else 500)

    described = schemathesis.openapi.from_asgi("/openapi.json", app)
    with pytest.raises(BaseException, match=message):
        fuzz(described["/embed"]["post"])


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_lot_is_answered_as_described(server, tmp_path):
    """Examples, all limits (coverage), and random valid and invalid bodies.

    PACKHORSE_FUZZ_EXAMPLES per route: 2,000 take half an hour of one core.
    """
    examples = os.environ.get("PACKHORSE_FUZZ_EXAMPLES", "2000")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
    command += [f"{server.url}/openapi.json", "--phases", "examples,coverage,fuzzing"]
    command += ["--mode", "all", "--max-examples", examples, "--checks", ",".join(CHECKS)]
    command += [f"--exclude-path={path}" for path in ELSEWHERE]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:]
