"""Collections as BEIR lays them out, and SQuAD made into one; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packhorse.data.tasks.retrieval import from_questions, read_collection
from packhorse.data.tasks.squad import Gold, SquadQuestion
from packhorse.errors import InputError

HEADER = "query-id\tcorpus-id\tscore\n"


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    (tmp_path / "qrels").mkdir()
    documents = [
        {"_id": "1", "title": "Mules", "text": "carry sacks", "metadata": {}},
        {"_id": "2", "title": "", "text": 'a "horse" '},
        {"_id": "3", "text": ""},
    ]
    queries = [{"_id": "a", "text": "who carries?"}, {"_id": "b", "text": "unjudged"}]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "qrels" / "test.tsv").write_text(HEADER + "a\t1\t2\na\t2\t0\n")
    return tmp_path


def test_as_beir_lays_it_out(beir: Path) -> None:
    result = read_collection(beir)
    assert result.documents == {"1": "Mules carry sacks", "2": 'a "horse"', "3": ""}
    assert result.queries == {"a": "who carries?"}  # one without a judgement cannot be scored
    assert result.judgments == {"a": {"1": 2, "2": 0}}


def test_the_split(beir: Path) -> None:
    (beir / "qrels" / "dev.tsv").write_text(HEADER + "b\t3\t1\n")
    assert list(read_collection(beir).queries) == ["a"]
    assert list(read_collection(beir, "dev").queries) == ["b"]
    (beir / "qrels" / "test.tsv").unlink()
    assert list(read_collection(beir).queries) == ["b"]  # the only one there is
    with pytest.raises(InputError, match=r"no train\.tsv; splits that are there: dev"):
        read_collection(beir, "train")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("qrels/test.tsv", HEADER + "a\t9\t1\n", r"line 2: '9' is not in .*corpus\.jsonl"),
        ("qrels/test.tsv", HEADER + "z\t1\t1\n", r"line 2: 'z' is not in .*queries\.jsonl"),
        ("qrels/test.tsv", HEADER + "a\t1\tyes\n", "'yes' is not a whole number"),
        ("qrels/test.tsv", "q\td\ts\na\t1\t1\n", "no column 'query-id'; BEIR has"),
        ("qrels/test.tsv", HEADER, "holds no judgments"),
        ("corpus.jsonl", "", "corpus.jsonl holds no texts"),
        ("corpus.jsonl", '{"_id": "1"}', "line 1: 'text' is missing"),
        ("corpus.jsonl", '{"_id": 1, "text": "x"}', "'_id' is 1, not a text"),
        ("queries.jsonl", '{"_id": "a", "text": "x"}\n' * 2, "two have the id 'a'"),
        ("queries.jsonl", "not json", "not JSON"),
    ],
)
def test_what_is_refused(beir: Path, name: str, text: str, complaint: str) -> None:
    (beir / name).write_text(text)
    with pytest.raises(InputError, match=complaint):
        read_collection(beir)


def test_a_missing_file_is_named(beir: Path) -> None:
    (beir / "queries.jsonl").unlink()
    with pytest.raises(InputError, match=r"queries\.jsonl cannot be read"):
        read_collection(beir)


def test_questions_look_for_their_paragraphs() -> None:
    def asked(id: str, context: str, impossible: bool = False) -> SquadQuestion:
        return SquadQuestion(
            id, f"{id}?", context, () if impossible else (Gold("x", 0),), impossible
        )

    everything = [
        asked("a", "one"),
        asked("b", "two"),
        asked("c", "one"),
        asked("d", "three", True),
    ]
    result = from_questions(everything)
    assert list(result.documents.values()) == ["one", "two", "three"]
    assert result.queries == {"a": "a?", "b": "b?", "c": "c?"}
    assert [result.documents[next(iter(result.judgments[id]))] for id in "abc"] == [
        *("one", "two", "one")
    ]
    retained = result.first(2)
    assert (
        list(retained.queries) == list(retained.judgments) == ["a", "b"]
        and len(retained.documents) == 3
    )
    with pytest.raises(InputError, match="no question with an answer"):
        from_questions(everything[3:])


def test_the_real_squad(shared_data: Path, tmp_path: Path) -> None:
    result = read_collection(shared_data / "squad" / "dev-v1.1.json.zip")
    assert (len(result.documents), len(result.queries)) == (2067, 10570)
    with pytest.raises(InputError, match="a file has no splits"):
        read_collection(shared_data / "squad" / "dev-v1.1.json.zip", "test")
