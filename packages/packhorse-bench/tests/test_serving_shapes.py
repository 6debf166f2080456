"""Loops of requests of known size: against a running server, and against one that is started."""

from __future__ import annotations

import csv
import math
import re
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import torch

pytest.importorskip("fastapi")

from packhorse.errors import InputError
from packhorse.reports import random_model
from packhorse_bench import serving_shapes, serving_shapes_report
from packhorse_bench.serving_figures import LoadSetup, LoopComparison, LoopRow, ServingSetup
from packhorse_bench.serving_load import GeneratorTeam, LoadJob
from packhorse_bench.serving_search import Effort
from packhorse_bench.serving_servers import Endpoint, parse_url, with_served_model
from packhorse_bench.serving_shapes import LoopStage, MeasuredServer
from packhorse_bench.serving_texts import Shape

SHORT = ("--device", "cpu", "--threads", 1, "--short", 0.5, "--warm", 0.1, "--repeats", 1)
SHORT += ("--generators", 2, "--connections", 4, "--json")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of the random model's own vocabulary."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(f"w{i} w{i + 1} w{2 * i}" for i in range(200)) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def port(tiny_folder: Path) -> Iterator[int]:
    """The whole server in this process, on a real port."""
    import uvicorn

    from packhorse.serve.app import guarded
    from packhorse.serve.life import bind, configuration, local_app
    from packhorse.serve.settings import ServeSettings

    settings = ServeSettings(model=(f"tiny={tiny_folder}",), port=0, device="cpu")
    bound = bind(settings, settings.port)
    with local_app(settings) as (app, _):
        outer, _ = guarded(app)
        server = uvicorn.Server(configuration(outer, settings))
        thread = Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield bound.getsockname()[1]
        server.should_exit = True
        thread.join()
    bound.close()


@pytest.mark.slow
def test_running_servers_in_both_dialects(
    cli, port: int, tiny_folder: Path, texts: Path, tmp_path: Path
) -> None:
    note, table = tmp_path / "note.md", tmp_path / "a.csv"
    result = cli(
        *("bench", "serve", "--model", tiny_folder, "--texts", texts, *SHORT),
        *("--shape", "10x3", "--loop", "open", "--lone", "--note", note, "--csv", table),
        *("--url", f"tei=http://127.0.0.1:{port}/embed", "--url", f"http://127.0.0.1:{port}"),
    )
    assert result.code == 0, result.err
    rows = result.document["rows"]
    measured = [row for row in rows if row["problem"] is None]
    loops = [("closed", None), ("open", 0.8), ("lone", 0), ("lone", 0.5), ("lone", 0.8)]
    for name in ("tei", f"127.0.0.1:{port}"):
        own = [row for row in measured if row["server"] == name]
        assert [(row["loop"], row["load"]) for row in own] == loops
        for row in own:
            texts_a_request = 1 if row["loop"] == "lone" else 3
            tokens = 12 if row["loop"] == "lone" else 30
            assert row["requests_per_second"] > 0 and row["errors"] == ""
            assert row["texts_per_second"] == texts_a_request * row["requests_per_second"]
            assert row["tokens_per_second"] == tokens * row["requests_per_second"]
            assert 0 < row["p50_ms"] <= row["p99_ms"] and row["cosine_min"] > 0.99999
            assert row["server_cores"] is None and row["gpu_busy"] is None
    assert any(0 < row["fill"] <= 1 for row in measured if row["fill"] is not None)
    missing = [row["server"] for row in rows if row["problem"] is not None]
    assert missing == ["text-embeddings-inference", "vLLM"]
    text = note.read_text("utf-8")
    assert "| vLLM | missing |" in text and "running already: tei, 127.0.0.1" in text
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(measured) and set(lines[0]) == {f.name for f in fields(LoopRow)}


def test_the_library_without_a_server_is_a_row_too(
    cli, port: int, tiny_folder: Path, texts: Path
) -> None:
    result = cli(
        *("bench", "serve", "--model", tiny_folder, "--texts", texts, *SHORT, "--shape", "10x3"),
        *("--offline", "--url", f"http://127.0.0.1:{port}"),
    )
    assert result.code == 0, result.err
    row = next(row for row in result.document["rows"] if row["loop"] == "offline")
    assert row["server"] == "packhorse, offline" and row["tokens_per_second"] > 0
    assert row["tokens_per_second"] == pytest.approx(30 * row["requests_per_second"])
    assert row["texts_per_second"] == pytest.approx(3 * row["requests_per_second"])


def test_a_server_with_other_vectors_has_no_figures(
    cli, port: int, texts: Path, tmp_path: Path
) -> None:
    other = random_model.write("tiny", tmp_path / "other", seed=1)
    url = f"vllm=http://127.0.0.1:{port}"
    result = cli(
        *("bench", "serve", "--model", other, "--texts", texts, *SHORT, "--shape", "10x1"),
        *("--url", url),
    )
    assert result.code == 0, result.err
    problems = {row["server"]: row["problem"] for row in result.document["rows"]}
    assert problems["vllm"].startswith("its vectors are not those of the model")
    assert set(problems) == {"vllm", "text-embeddings-inference"}


@pytest.mark.slow
def test_our_server_is_started_and_its_cores_are_counted(cli, texts: Path, tmp_path: Path) -> None:
    plot = tmp_path / "a.png"
    result = cli(
        *("bench", "serve", "--config", "tiny", "--texts", texts, *SHORT, "--shape", "10x2"),
        *("--fronts", 0, "--peers", "infinity", "--infinity", tmp_path / "none", "--plot", plot),
    )
    assert result.code == 0, result.err
    ours, *missing = result.document["rows"]
    assert ours["server"] == "packhorse" and ours["problem"] is None, ours["problem"]
    assert ours["cosine_min"] > 0.99999 and ours["tokens_per_second"] > 0
    if Path("/proc/self/stat").exists():
        assert ours["server_cores"] >= 0
    assert [row["server"] for row in missing] == ["infinity", "text-embeddings-inference", "vLLM"]
    assert "make peers" in missing[0]["problem"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--shape", "50"], "--shape 50"),
        (["--shape", ","], "there is no --shape"),
        (["--shape", "513x1"], "the model takes 512 tokens"),
        (["--url", "127.0.0.1:80"], "pass NAME=http://localhost:8080/embed"),
        (["--url", "https://127.0.0.1"], "https is not supported"),
        (["--url", "http://127.0.0.1/predict"], "the path is that of a route"),
        (["--url", "http://127.0.0.1:99999"], "--url http://127.0.0.1:99999"),
        (["--lone", "--warm", "0"], "--warm 0"),
        (["--lone", "--generators", "-1"], "--generators -1"),
        (["--lone", "--connections", "0"], "--connections 0"),
        (["--lone", "--peers", "keras"], "unknown peer 'keras'"),
    ],
)
def test_mistakes_are_one_line(cli, texts: Path, arguments: list[str], part: str) -> None:
    known = () if "--peers" in arguments or "--url" in arguments else ("--peers", "none")
    arguments = ["--config", "tiny", "--device", "cpu", "--texts", str(texts), *known, *arguments]
    result = cli("bench", "serve", *arguments)
    *before, line = result.err.splitlines()
    assert result.code == 2 and line.startswith("packhorse: ") and part in line
    assert not any("packhorse: " in progress for progress in before)


def test_a_loop_that_takes_too_long_says_what_it_waits_for(monkeypatch) -> None:
    lines: list[str] = []
    server = MeasuredServer("slow", Endpoint(1), None, 1.0)
    stage = LoopStage(
        ServingSetup("m"), torch.device("cpu"), GeneratorTeam([]), cast(Any, None), {}, [server],
        problems={}, report_line=lines.append,
    )  # fmt: skip
    in_time = serving_shapes.LateLoop(stage, server, LoadJob(1, 0.0, seconds=60.0))
    in_time("sending: 3 requests have ended")
    assert lines == []
    monkeypatch.setattr(serving_shapes, "LATE_SECONDS", 0.0)
    late = serving_shapes.LateLoop(stage, server, LoadJob(1, 0.0, seconds=0.0))
    late("opening connections, has 120 of 683")
    (line,) = lines
    assert line.startswith("slow: this loop has taken 0 s") and line.endswith("has 120 of 683")


def test_urls_name_a_server_and_a_route(port: int) -> None:
    assert parse_url("tei=http://[::1]:81/embed") == ("tei", Endpoint(81, "::1", "/embed"))
    assert parse_url("http://example.com") == (
        "example.com:80",
        Endpoint(80, "example.com", "/v1/embeddings"),
    )
    name, endpoint = parse_url(f"http://localhost:{port}/v1/embeddings/")
    assert name == f"localhost:{port}" and with_served_model(endpoint).model == "tiny"
    silent = Endpoint(1)
    assert with_served_model(silent) == silent  # nobody lists a model there


def test_connections_keep_a_device_busy() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    shapes = [Shape(50, 1), Shape(50, 16), Shape(512, 16)]
    assert [serving_shapes.default_connections(shape, gpu) for shape in shapes] == [2048, 327, 32]
    assert [serving_shapes.default_connections(shape, cpu) for shape in shapes] == [327, 20, 4]


def test_a_gpu_has_the_number_that_its_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert serving_shapes.gpu_number(torch.device("cpu")) is None
    assert serving_shapes.gpu_number(torch.device("cuda")) == 0
    assert serving_shapes.gpu_number(torch.device("cuda:1")) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert serving_shapes.gpu_number(torch.device("cuda:1")) == 5


def test_no_rounds_are_refused() -> None:
    setup = ServingSetup("m", effort=Effort(repeats=0), load=LoadSetup(shapes=(Shape(50, 1),)))
    with pytest.raises(InputError, match="--repeats 0"):
        serving_shapes.measure(setup)


def loop_row(**more: object) -> LoopRow:
    figures = {"shape": "50x1", "loop": "closed", "connections": 8, "generator_share": 0.5}
    return LoopRow("packhorse", **{**figures, **more})  # type: ignore[arg-type]


def comparison(*rows: LoopRow) -> LoopComparison:
    return LoopComparison(rows, rows, torch.device("cpu"), "fp32", 1, 2, False, (), 3.0)


def test_a_generator_that_was_the_limit_is_in_the_table_and_the_remarks() -> None:
    usual, busy = comparison(loop_row()), comparison(loop_row(generator_share=0.95))
    assert "50%" in [cell.strip() for cell in serving_shapes_report.table(usual).rows[0]]
    assert not any("warning" in line for line in serving_shapes_report.remarks(usual))
    assert "95% (limit)" in serving_shapes_report.table(busy).rows[0]
    (warning,) = (line for line in serving_shapes_report.remarks(busy) if "warning" in line)
    assert "pass more --generators" in warning


def test_loops_have_names_and_unknown_figures_a_dash() -> None:
    rows = [loop_row(), loop_row(loop="open", load=0.8), loop_row(loop="lone", load=0.0)]
    rows += [loop_row(loop="lone", load=0.5, p99_ms=math.inf, errors="2 429", gpu_busy=0.97)]
    names = [serving_shapes_report.loop_name(row) for row in rows]
    assert names == ["closed, 8 connections", "open, at 80%", "lone, idle", "lone, at 50%"]
    assert serving_shapes_report.loop_name(loop_row(loop="open")) == "open, at --rate"
    cells = [cell.strip() for cell in serving_shapes_report.table(comparison(*rows)).rows[3]]
    assert {"2 429", "97%", "inf", "-"} <= set(cells)
    remarks = serving_shapes_report.remarks(comparison(*rows))
    assert any(re.match("lone: one client", line) for line in remarks)
