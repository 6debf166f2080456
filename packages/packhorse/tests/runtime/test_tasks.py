"""Options of the tasks: long texts, vectors before they are normalized, words to choose among."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest

from packhorse.errors import CheckpointError, InputError
from packhorse.runtime.encoder import Encoder, TruncationWarning
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.tasks import TASKS

LONG = "the old brown horse carries sacks to market and the cat sat on the red mat . " * 6
SHORT = "a mule with no load"


@pytest.fixture(scope="module")
def tiny(make_encoder) -> Encoder:
    """With the head that makes its vectors, as `load` gives it."""
    encoder = make_encoder()
    return replace(encoder, embedder=encoder.backend.model.heads["embed"])


def test_the_table_names_what_there_is(tiny: Encoder, quiet_runtime) -> None:
    """Methods, commands and routes are written elsewhere; the table must agree with them."""
    pytest.importorskip("fastapi")
    from fastapi import FastAPI

    from packhorse.cli.flags import RunFlags
    from packhorse.cli.tasks import TASKS as COMMANDS
    from packhorse.serve import hosting
    from packhorse.serve.dialects import huggingface, packhorse_api, shared_paths, tei
    from packhorse.serve.settings import ServeSettings

    assert all(callable(getattr(Encoder, spec.method)) for spec in TASKS.values())
    assert {spec.method for spec in TASKS.values()} == {t for t, s in TASKS.items() if s.prepare}
    commands = {spec.command for spec in TASKS.values() if spec.command}
    choices = get_args(get_args(get_type_hints(RunFlags, include_extras=True)["task"])[0])
    assert commands == set(COMMANDS) == set(choices)
    settings = ServeSettings(model=("tiny",))
    opened = replace(tiny, digests={"weights": "of no file", "config": "of no file"})
    served = hosting.serve_model(opened, settings, publish=False)
    try:
        app = FastAPI()
        for dialect in (packhorse_api, tei, huggingface, shared_paths):
            dialect.add(app, hosting.ServedModels([served]), settings)
        assert {spec.route for spec in TASKS.values()} <= {route.path for route in app.routes}  # type: ignore[attr-defined]
    finally:
        served.runner.close()
    needed = {spec.head for spec in TASKS.values()} - {"hidden"}
    assert needed <= set(tiny.heads), "a head that no model has"


def test_a_task_needs_its_head(tiny: Encoder) -> None:
    bare = replace(tiny, heads=())
    for task, spec in TASKS.items():
        if spec.prepare is None:
            with pytest.raises(InputError, match=f"unknown task '{task}'"):
                tiny.prepare(task, [SHORT])
        elif spec.head != "hidden":
            with pytest.raises(CheckpointError, match=f"no '{spec.head}' head .it has: none"):
                bare.prepare(task, [SHORT])
    assert len(bare.prepare("hidden", [SHORT])) == 1


def chunks(encoder: Encoder, text: str) -> list[tuple[str, int]]:
    """The parts of the text that fit, and their tokens."""
    windows = encoder.tokenizer.windows([text], encoder.max_length)[0]
    offsets = [window.offsets[window.spans[0]] for window in windows]
    return [(text[part[0][0] : part[-1][1]], len(part)) for part in offsets]


def test_only_who_does_not_ask_for_truncation_is_warned(tiny: Encoder) -> None:
    with pytest.warns(TruncationWarning, match="1 of 2 texts were cut to 48 tokens"):
        cut = tiny.embed([LONG, SHORT])
    assert np.array_equal(tiny.embed([LONG, SHORT], long="truncate"), cut)
    with pytest.raises(InputError, match="text 1 is too long"):
        tiny.embed([SHORT, LONG], long="error")
    with pytest.raises(InputError, match="long is 'cut'"):
        tiny.embed([SHORT], long="cut")  # type: ignore


def test_the_end_or_the_beginning_is_cut(tiny: Encoder) -> None:
    (first, _), *_ = chunks(tiny, LONG)
    assert np.allclose(tiny.embed([LONG], long="truncate"), tiny.embed([first]), atol=1e-6)
    tokens = tiny.tokenizer.encode([LONG], 10_000)[0]
    end = LONG[tokens.offsets[tokens.spans[0]][-46][0] :]
    assert np.allclose(tiny.embed([LONG], long="truncate_left"), tiny.embed([end]), atol=1e-6)


def test_chunks_are_averaged_by_their_tokens(tiny: Encoder) -> None:
    parts = chunks(tiny, LONG)
    assert len(parts) == 3 and parts[-1][1] < parts[0][1], "else weights would not matter"
    weights = [size for _, size in parts]
    raw = tiny.embed([text for text, _ in parts])
    mean = np.average(raw, axis=0, weights=weights)
    vectors = tiny.embed([LONG, SHORT], long="chunk")
    assert np.allclose(vectors[0], mean / np.linalg.norm(mean), atol=1e-6)
    assert not np.allclose(vectors[0], raw.mean(0) / np.linalg.norm(raw.mean(0)), atol=1e-6)
    assert np.allclose(vectors[1], tiny.embed([SHORT])[0], atol=1e-6)
    plain = tiny.embed([LONG], long="chunk", normalize=False)[0]
    raw = tiny.embed([text for text, _ in parts], normalize=False)
    assert np.allclose(plain, np.average(raw, axis=0, weights=weights), atol=1e-5)


def test_scores_names_and_words_of_chunks(tiny: Encoder, make_encoder) -> None:
    parts = chunks(tiny, LONG)
    logits = [tiny.classify([text], problem="raw")[0].scores for text, _ in parts]
    mean = np.average(
        [[row[label] for label in tiny.labels] for row in logits], 0, [n for _, n in parts]
    )
    scores = tiny.classify([LONG], long="chunk")[0].scores
    power = np.exp(mean - mean.max())
    assert np.allclose([scores[label] for label in tiny.labels], power / power.sum(), atol=1e-6)

    tagger = make_encoder("label")
    entities = tagger.label([LONG], long="chunk")[0]
    assert all(LONG[item.start : item.end] == item.text for item in entities)
    assert len(entities) == sum(len(item) for item in tagger.label([text for text, _ in parts]))
    masked = LONG + "the [MASK]"
    ((word,),) = tiny.fill([masked], top_k=1, long="chunk")[0]
    assert (
        word.text == LONG + "the " + word.word == LONG + "the " + tiny.tokenizer.decode([word.id])
    )


def test_pairs_and_states_have_no_chunks(tiny: Encoder) -> None:
    with pytest.raises(InputError, match="a pair cannot be run in chunks"):
        tiny.classify([(SHORT, LONG)], long="chunk")
    with pytest.raises(InputError, match="cannot run documents in chunks"):
        tiny.prepare("rerank", [SHORT], documents=[LONG], long="chunk")
    with pytest.raises(InputError, match="chunks of a text"):
        tiny.hidden([LONG], long="chunk")


def test_vectors_as_they_are_before_they_are_normalized(tiny: Encoder) -> None:
    raw = tiny.embed([LONG, SHORT], normalize=False, long="truncate")
    unit = tiny.embed([LONG, SHORT], long="truncate")
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert not np.allclose(lengths, 1) and np.allclose(raw / lengths, unit, atol=1e-6)
    assert np.allclose(tiny.embed([SHORT], normalize=True), unit[1:], atol=1e-6)
    with pytest.raises(CheckpointError, match="computes its vectors itself"):
        replace(tiny, embedder=None).embed([SHORT], normalize=False)


def test_a_model_that_does_not_normalize_can_be_told_to(tiny: Encoder, make_encoder) -> None:
    head = tiny.embedder
    assert head is not None
    head.normalize = False
    try:
        raw = tiny.embed([SHORT])
        assert not np.allclose(np.linalg.norm(raw), 1)
        assert np.array_equal(raw, tiny.embed([SHORT], normalize=False))
        assert np.allclose(tiny.embed([SHORT], normalize=True), raw / np.linalg.norm(raw))
    finally:
        head.normalize = True


def test_words_among_targets(tiny: Encoder) -> None:
    text = "the [MASK] carries"
    score_of = {item.word: item.score for item in tiny.fill([text], top_k=100)[0][0]}
    words = tiny.fill([text], targets=["cat", "mule", "cat"])[0][0]
    assert {item.word: item.score for item in words} == {w: score_of[w] for w in ("cat", "mule")}
    assert words[0].score >= words[1].score
    for targets, says in [([], "empty"), (["cat", " "], "no token")]:
        with pytest.raises(InputError, match=says):
            tiny.fill([text], targets=targets)


def test_tokens_for_themselves(make_encoder) -> None:
    tagger = make_encoder("label")
    tokens = tagger.label(["the cat sat"], aggregation="none")[0]
    assert {item.label for item in tokens} <= set(tagger.labels) - {"O"}
    assert [item.text for item in tokens] == [
        w for w in ["the", "cat", "sat"] if w in {item.text for item in tokens}
    ]


def test_a_prompt_before_states(tiny: Encoder) -> None:
    (states,) = tiny.hidden(["the cat"], prompt="query")
    assert np.allclose(states.states, tiny.hidden(["who saw the cat"])[0].states, atol=1e-6)
    assert len(tiny.hidden(["the cat"])[0].states) == 4


def test_the_runner_takes_the_same_options(tiny: Encoder, quiet_runtime) -> None:
    with PackRunner(tiny, timeout=0) as runner:
        for options in ({"long": "chunk"}, {"long": "truncate_left"}, {"normalize": False}):
            text = SHORT if "normalize" in options else LONG
            answer = runner.submit(text, **options).result(300)
            assert np.allclose(answer, tiny.embed([text], **options)[0], atol=1e-5)
