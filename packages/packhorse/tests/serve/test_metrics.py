"""Metrics by route, model and status, and that those of several processes add up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from packhorse.serve.hosting import ServedModels
from packhorse.serve.metrics import (
    Metrics,
    RequestRecord,
    families_to_json,
    merge_counters,
    merged_page,
)

DEPLOY = Path(__file__).resolve().parents[4] / "deploy"
# What PromQL itself has in the expressions of the dashboard.
PROMQL = {"histogram_quantile", "sum", "avg", "rate", "by"}


def samples(page: bytes | str) -> dict[str, float]:
    text = page if isinstance(page, str) else page.decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _, _ in lines}) == len(lines), "a time series is there twice"
    return {name: float(value) for name, _, value in lines}


def counted(*requests: tuple[str, str, int]) -> Metrics:
    """The metrics of a process that answered these: route, model, status."""
    metrics = Metrics(ServedModels([]), list)
    for route, name, status in requests:
        model = cast(Any, SimpleNamespace(name=name)) if name else None
        record = RequestRecord(model=model, task="embed" if name else "", offered=2 if name else 0)
        if status == 200 and name:
            record.pack = "fill=1"
            record.inputs = 2
            record.queue_seconds = 0.003
            record.compute_seconds = 0.03
        else:
            record.error = "Overloaded"
        metrics.record(record, route, status)
    return metrics


ONE = counted(("/embed", "a", 200), ("/embed", "b", 200), ("/embed", "a", 429))
TWO = counted(("/embed", "a", 200), ("/predict", "a", 200), ("other", "", 404))


def test_times_have_route_model_and_status() -> None:
    figures = samples(ONE.page())
    labels = '{model="a",route="/embed",status="200"}'
    assert figures[f"packhorse_request_seconds_count{labels}"] == 1
    assert figures[f"packhorse_queue_seconds_sum{labels}"] == pytest.approx(0.003)
    bucket = 'packhorse_compute_seconds_bucket{le="%s",model="a",route="/embed",status="200"}'
    assert (figures[bucket % "0.02"], figures[bucket % "0.05"]) == (0, 1)
    # A request that no model ran for has one time, that of the whole.
    refused = [name for name in figures if 'status="429"' in name and "_count{" in name]
    assert refused == ['packhorse_request_seconds_count{model="a",route="/embed",status="429"}']


def test_processes_add_up() -> None:
    """Every time series of two processes is the sum of what each has; retired fronts included."""
    figures = [samples(process.page()) for process in (ONE, TWO)]
    retired = merge_counters([families_to_json(ONE.requests_only())])
    merged = samples(merged_page([retired, families_to_json(TWO.requests_only())]))
    assert set(merged) == {name for page in figures for name in page if "_created" not in name}
    for name, value in merged.items():
        assert value == pytest.approx(sum(page.get(name, 0.0) for page in figures)), name
    assert merged['packhorse_request_seconds_count{model="a",route="/embed",status="200"}'] == 2
    assert (
        merged['packhorse_request_seconds_bucket{le="+Inf",model="a",route="/embed",status="200"}']
        == 2
    )
    assert merged["te_request_duration_count"] == 4
    assert merged['te_request_failure{err="overloaded"}'] == 2


def test_names_of_text_embeddings_inference(serving) -> None:
    served = serving(names=("tiny", "ranker"), max_batch_inputs=3)
    served.post("/embed", {"inputs": "the cat"})
    served.post("/embed", {"inputs": ["the cat", "a mat"]})
    served.post("/rerank", {"query": "cat", "texts": ["a mat", "the cat"]})
    served.post("/embed", {"inputs": ["cat"] * 4})  # 413
    served.post("/embed", {"inputs": ""})  # 400
    served.get("/health")
    page = served.get("/metrics").text
    figures = samples(page)
    expected = {
        'te_request_count{method="single"}': 1,
        'te_request_count{method="batch"}': 2,
        'te_request_success{method="single"}': 1,
        'te_request_success{method="batch"}': 2,
        'te_request_failure{err="validation"}': 2,
        'te_request_failure{err="inference"}': 0,
        "te_embed_count": 3,
        "te_embed_success": 3,
        "te_predict_count": 2,
        "te_predict_success": 2,
        "te_request_duration_count": 3,
        "te_request_tokenization_duration_count": 3,
        "te_request_queue_duration_count": 3,
        "te_request_inference_duration_count": 3,
        'te_request_duration_bucket{le="+Inf"}': 3,
        "te_queue_size": 0,
    }
    assert {name: figures.get(name) for name in expected} == expected
    assert figures["te_batch_next_size_sum"] == 5
    assert 1 <= figures["te_batch_next_size_count"] <= 5
    ours = sum(
        value for name, value in figures.items() if name.startswith("packhorse_queue_seconds_sum")
    )
    assert figures["te_request_queue_duration_sum"] == pytest.approx(ours)
    buckets = [float(value) for value in re.findall(r"te_request_duration_bucket\S+ (\S+)", page)]
    assert buckets == sorted(buckets) and len(buckets) == 14


def test_the_dashboard_and_the_autoscaler_ask_for_what_there_is(serving) -> None:
    """Every metric in every expression is on /metrics of a server that answered and refused."""
    served = serving()
    served.post("/v1/embeddings", {"input": "the cat " * 40})  # truncated
    served.post("/embed", {"inputs": ""})
    names = {name.split("{")[0] for name in samples(served.get("/metrics").text)}
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    for expression in expressions:
        assert metrics_in(expression), expression
        assert metrics_in(expression) <= names, expression
    assert metrics_in("sum by (le) (rate(packhorse_made_up_total[5m]))") - names
    queries = [entry["query"] for entry in dashboard["templating"]["list"]]
    assert set(re.findall(r"packhorse_\w+", str(queries))) <= names
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    objects = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
    (scaler,) = [entry["spec"] for entry in objects if entry["kind"] == "HorizontalPodAutoscaler"]
    assert [metric["pods"]["metric"]["name"] in names for metric in scaler["metrics"]] == [True]


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in an expression: all but PromQL's own, labels, ranges and texts."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", " ", expression)
    return set(re.findall(r"[A-Za-z_]\w*", bare)) - PROMQL
