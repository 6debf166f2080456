"""Health, readiness, metrics and logs of the server are true."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import threading
import time
from typing import Any

import pytest

from packhorse.errors import PackhorseError, RankLost
from packhorse.serve import logs
from packhorse.serve.app import STATUS
from packhorse.serve.settings import ServeSettings

TEXT = {"inputs": "the cat sat"}


def kinds(error: type[PackhorseError]) -> set[type[PackhorseError]]:
    return {error}.union(*map(kinds, error.__subclasses__()))


def test_every_kind_of_error_has_a_status() -> None:
    user_errors = [kind for kind in kinds(PackhorseError) if kind.__module__ == "packhorse.errors"]
    user_errors.remove(RankLost)  # only raised in training
    assert len(user_errors) > 6
    for kind in user_errors:
        status = next(STATUS[base] for base in kind.__mro__ if base in STATUS)
        assert status != 500 or kind is PackhorseError or not kind.__doc__, kind


def test_alive_and_ready(served) -> None:
    for path in ("/health", "/ping"):
        answer = served.get(path).json()
        assert answer["status"] == "ok" and answer["unix"] <= time.time()
    assert served.get("/ready").json() == {
        "status": "ready",
        "models": ["tiny", "ranker", "tagger"],
    }


def test_ready_runs_the_model_where_it_was_idle(serving) -> None:
    ran: list[int] = []
    served = serving(before=lambda packed: ran.append(len(packed.ids)), ready_seconds=0.0)
    assert served.get("/ready").status_code == 200
    assert len(ran) == 1
    assert served.get("/health").status_code == 200
    assert len(ran) == 1


def test_ready_believes_a_batch_of_a_moment_ago(serving) -> None:
    ran: list[int] = []
    served = serving(before=lambda packed: ran.append(1), ready_seconds=60.0)
    assert served.post("/embed", TEXT).status_code == 200
    assert served.get("/ready").status_code == 200
    assert len(ran) == 1


def test_health_and_readiness_answer_to_head(serving, listen) -> None:
    import httpx

    served = serving()
    url = f"http://localhost:{listen(served)}"
    for path in ("/health", "/ready"):
        head = httpx.head(f"{url}{path}")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == httpx.get(f"{url}{path}").headers["content-length"]
    served.guard.draining = True
    assert httpx.head(f"{url}/health").status_code == 503


def test_a_model_that_hangs_is_alive_and_not_ready(serving) -> None:
    go = threading.Event()
    served = serving(before=lambda packed: go.wait(60), ready_seconds=0.0)
    begun = time.monotonic()
    assert served.get("/ready").status_code == 503
    assert time.monotonic() - begun < 30
    assert served.get("/health").status_code == 200
    go.set()
    assert served.get("/ready").status_code == 200


def test_a_dead_engine_is_503_everywhere_at_once(serving) -> None:
    def before(packed: Any) -> None:
        raise SystemExit("the device is lost")

    served = serving(before=before)
    begun = time.monotonic()

    async def work(client: Any) -> list[Any]:
        return await asyncio.gather(*[client.post("/embed", json=TEXT) for _ in range(20)])

    logging.getLogger("packhorse.runtime.engine").disabled = True
    try:
        assert {response.status_code for response in served.run(work)} == {503}
    finally:
        logging.getLogger("packhorse.runtime.engine").disabled = False
    later = [served.get("/health"), served.get("/ready"), served.post("/embed", TEXT)]
    assert [response.status_code for response in later] == [503] * 3
    assert {response.json()["error_type"] for response in later} == {"Unhealthy"}
    assert time.monotonic() - begun < 30
    assert 'packhorse_up{model="tiny"} 0.0' in served.get("/metrics").text


def test_draining_refuses_the_new_and_says_so(serving) -> None:
    served = serving()
    served.guard.draining = True
    response = served.post("/embed", TEXT)
    assert (response.status_code, response.headers["connection"]) == (503, "close")
    assert served.get("/health").status_code == 503
    assert served.get("/metrics").status_code == 200


def test_counters_add_up_to_what_was_sent(serving) -> None:
    served = serving(max_batch_inputs=3)
    sent = {200: 7, 400: 2, 404: 3, 413: 4}
    for _ in range(7):
        served.post("/embed", {"inputs": ["the cat", "a mat"]})
    for _ in range(2):
        served.post("/embed", content=b"{", headers={"content-type": "application/json"})
    for number in range(3):
        served.get(f"/made/up/{number}")
    for _ in range(4):
        served.post("/embed", {"inputs": ["cat"] * 4})
    figures = served.get("/metrics").text
    for status, count in sent.items():
        counts = re.findall(rf'packhorse_requests_total{{.*status="{status}"}} (\S+)', figures)
        assert sum(map(float, counts)) == count, status
    assert 'route="other",status="404"' in figures
    assert "/made/up" not in figures
    assert "packhorse_inputs_total 14.0" in figures
    assert "packhorse_input_tokens_total 56.0" in figures
    assert 'packhorse_runner_answered_total{model="tiny"} 14.0' in figures
    answered = '{model="tiny",route="/embed",status="200"} 7.0'
    for name in ("request", "tokenize", "queue", "compute"):
        assert f"packhorse_{name}_seconds_count{answered}" in figures


@pytest.mark.parametrize("form", ["plain", "json"])
def test_logs_hold_no_text_and_no_key(serving, form: str, monkeypatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    settings = ServeSettings(log_format=form, log_requests=True, log_level="debug")
    with _own_logging():
        logs.set_up(settings)
        served = serving(keys=("sesame",))
        for key in ("sesame", "guessed"):
            headers = {"authorization": f"Bearer {key}"}
            served.post("/embed", {"inputs": "brown mule"}, headers=headers)
            served.post("/embed", {"inputs": ["brown"] * 2049}, headers=headers)
            served.post("/embed", {"inputs": {"brown": "mule"}}, headers=headers)
        monkeypatch.setattr(served.models, "find", lambda *arguments: {}["brown"])
        served.post("/embed", {"inputs": "brown mule"}, headers={"authorization": "Bearer sesame"})
    lines = out.getvalue().splitlines()
    assert len(lines) >= 7
    for secret in ("brown", "mule", "sesame", "guessed"):
        assert secret not in out.getvalue()
    assert "KeyError" in out.getvalue()
    assert "TooLarge" in out.getvalue()
    if form == "json":
        records = [json.loads(line) for line in lines]
        assert records[0]["route"] == "/embed"
        assert (records[0]["status"], records[0]["tokens"], records[0]["model"]) == (200, 4, "tiny")


class _own_logging:
    """Restore what `set_up` changes."""

    def __enter__(self) -> None:
        names = ("packhorse", "uvicorn")
        self.before = {
            name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate)
            for name in names
        }

    def __exit__(self, *exception: object) -> None:
        for name, (handlers, propagate) in self.before.items():
            logger = logging.getLogger(name)
            logger.handlers = handlers
            logger.propagate = propagate
            logger.setLevel(logging.NOTSET)
        logs.REQUESTS.disabled = False


def test_requests_are_not_logged_unless_asked(served, caplog) -> None:
    with caplog.at_level("INFO"):
        logs.REQUESTS.disabled = True
        served.post("/embed", TEXT)
        logs.REQUESTS.disabled = False
    assert not [record for record in caplog.records if record.name.startswith("packhorse.serve")]
