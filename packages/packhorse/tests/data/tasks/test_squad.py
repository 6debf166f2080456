"""SQuAD files: the real one, every way to pack it, and every way to break it."""

from __future__ import annotations

import copy
import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.data.tasks import squad
from packhorse.data.tasks.squad import (
    Gold,
    SquadQuestion,
    read_predictions,
    read_squad,
    write_predictions,
)
from packhorse.errors import InputError

CONTEXT = "Sacks of 茶 are carried by a 🐎, or by a mule."
V1 = {"id": "q1", "question": "Who?", "answers": [{"text": "a 🐎", "answer_start": 26}] * 2}
V2 = {"id": "q2", "question": "Why?", "is_impossible": True, "answers": [], "plausible_answers": 1}


def document(*questions: dict[str, Any], context: Any = CONTEXT) -> dict[str, Any]:
    return {"version": "any", "data": [{"paragraphs": [{"context": context, "qas": [*questions]}]}]}


def zipped(text: bytes, name: str = "dev.json", kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr("__MACOSX/._dev.json", b"\0\5\26\7")
        archive.writestr(name, text)
    return buffer.getvalue()


def test_the_real_development_set(shared_data: Path) -> None:
    questions = list(read_squad(shared_data / "squad" / "dev-v1.1.json.zip"))
    assert len(questions) == 10_570 and not any(q.impossible for q in questions)
    assert sum(len(q.answers) for q in questions) == 34_726
    assert sum(len(q.misplaced()) for q in questions) == 0
    assert questions[0].answers[0] == Gold("Denver Broncos", 177)
    assert questions[1].context is questions[0].context  # one text for all that is asked about it


def test_both_versions_by_what_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    path.write_text(json.dumps(document(V1, V2)))
    first, second = read_squad(path)
    assert first == SquadQuestion("q1", "Who?", CONTEXT, (Gold("a 🐎", 26),) * 2)
    assert second == SquadQuestion("q2", "Why?", CONTEXT, (), impossible=True)
    assert first.misplaced() == []


def test_a_misplaced_answer_is_found(tmp_path: Path) -> None:
    path = tmp_path / "utf16.json"
    moved = copy.deepcopy(V1)
    moved["answers"][0] = {"text": "a mule", "answer_start": 38}  # the horse is two units there
    path.write_text(json.dumps(document(moved)))
    (question,) = read_squad(path)
    assert question.misplaced() == [Gold("a mule", 38)]


@pytest.mark.parametrize(
    "pack",
    [
        lambda text: text,
        lambda text: b"\xef\xbb\xbf" + text,
        gzip.compress,
        zipped,
        lambda text: zipped(text, "in/a/folder.json", zipfile.ZIP_STORED),
    ],
)
def test_every_wrapping(tmp_path: Path, pack) -> None:
    path = tmp_path / "dev"
    path.write_bytes(pack(json.dumps(document(V1), ensure_ascii=False).encode()))
    assert [question.id for question in read_squad(path)] == ["q1"]


def without(key: str, question: dict[str, Any] = V1) -> dict[str, Any]:
    return {name: value for name, value in question.items() if name != key}


def answering(**gold: Any) -> dict[str, Any]:
    return {**V1, "answers": [{"text": "a", "answer_start": 0, **gold}]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "'data' is missing"),
        ({"data": {}}, "'data' is {}"),
        ({"data": [1]}, "article 0: 'paragraphs' is missing"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "article 0, paragraph 0: 'context' is missing"),
        (document(V1, context=["x"]), "'context' is"),
        (document(without("id")), "paragraph 0, a question: 'id' is missing"),
        (document({**V1, "id": 7}), "'id' is 7; a SQuAD file has a str there"),
        (document(without("question")), "question 'q1': 'question' is missing"),
        (document(without("answers")), "question 'q1': 'answers' is missing"),
        (document({**V1, "answers": []}), "'q1': without an answer, yet not impossible"),
        (document({**V1, "is_impossible": True}), "'q1': impossible, yet has answers"),
        (document({**V1, "is_impossible": 1}), "'is_impossible' is 1"),
        (document(answering(text=None)), "question 'q1': 'text' is missing"),
        (document(answering(text="")), "not an answer and its place"),
        (document(answering(answer_start=-1)), "not an answer and its place"),
        (document(answering(answer_start=True)), "'answer_start' is True"),
        (document(answering(answer_start=1.5)), "'answer_start' is 1.5"),
        (document(V1, V1), "question 'q1': two have this id"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: Any, complaint: str) -> None:
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        list(read_squad(path))
    assert str(path) in str(error.value) and complaint in str(error.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (gzip.compress(b"{}", mtime=0)[:-9], "damaged"),
        (b"\x1f\x8b\x08 and so on", "cannot be read|damaged"),
        (zipped(b"{}")[:40], "damaged"),
        (zipped(b"{}", "dé.json").replace("é".encode(), b"\xff\xff"), "damaged"),
        (zipped(b"{}", "dev.txt"), "0 JSON files"),
        (zipped(b"{}", kind=zipfile.ZIP_BZIP2), "unusual way"),
    ],
    ids=range(9),  # not by content: an archive tells the time
)
def test_damaged_files(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "dev.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint):
        list(read_squad(path))


def test_a_bomb_does_not_go_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squad, "LIMIT", 1 << 20)
    for pack in (gzip.compress, zipped, bytes):
        path = tmp_path / "bomb"
        path.write_bytes(pack(b" " * ((1 << 20) + 1)))
        with pytest.raises(InputError, match="more than 1 MiB"):
            list(read_squad(path))
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="cannot be read"):
            list(read_squad(missing))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_is_an_input_error_or_nothing(tmp_path: Path, data: st.DataObject) -> None:
    text = json.dumps(document(V1)).encode()
    whole = bytearray(data.draw(st.sampled_from([text, zipped(text), gzip.compress(text)])))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "dev"
    path.write_bytes(whole[: data.draw(st.integers(len(whole) // 2, len(whole)))])
    try:
        assert len(list(read_squad(path))) <= 1
    except InputError as error:
        assert str(path) in str(error)


def test_predictions_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    predictions = {"q1": "a 🐎", "q2": "", "q3": 'a "quoted"\nline'}
    write_predictions(path, {"old": "text"})
    write_predictions(path, predictions)
    assert read_predictions(path) == predictions == json.loads(path.read_text("utf-8"))
    assert [result.name for result in tmp_path.iterdir()] == ["predictions.json"]


def test_predictions_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    write_predictions(path, {"q1": "kept"})
    with pytest.raises(TypeError):
        write_predictions(path, {"q1": "lost", "q2": object()})  # pyright: ignore[reportArgumentType]
    assert read_predictions(path) == {"q1": "kept"}
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(InputError, match="cannot be written"):
        write_predictions(tmp_path / "no" / "folder.json", {})


def test_predictions_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    for content, complaint in [("[]", "not predictions"), ('{"q1": ["a"]}', "question 'q1'")]:
        path.write_text(content)
        with pytest.raises(InputError, match=complaint):
            read_predictions(path)
