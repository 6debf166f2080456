"""Hard negatives: those that sentence-transformers' miner finds, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse.cli import main
from packhorse.data.tasks.pairs import read_groups
from packhorse.errors import InputError
from packhorse.runtime.mining import MiningOptions, mine
from packhorse.runtime.teaching import Teacher

WORDS = ("good", "fine", "nice", "bad", "poor", "ugly", "horse", "mule", "cart", "road")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sentence encoder as sentence-transformers writes one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    import torch
    from sentence_transformers import SentenceTransformer

    home = tmp_path_factory.mktemp("miner")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    (home / "bert").mkdir()
    (home / "bert" / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=15,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
        initializer_range=0.5,
    )
    transformers.BertModel(config).save_pretrained(home / "bert")
    transformers.BertTokenizerFast(str(home / "bert" / "vocab.txt")).save_pretrained(home / "bert")
    SentenceTransformer(str(home / "bert"), device="cpu").save(str(home / "model"))
    return home / "model"


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    rng = np.random.default_rng(1)
    texts = list(dict.fromkeys(" ".join(rng.choice(WORDS, 4)) for _ in range(90)))
    pairs = [(texts[i], texts[i + 1]) for i in range(0, 78, 2)]
    return [*pairs, (texts[0], texts[81])]  # an anchor with two positives


def positives(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for anchor, positive in pairs:
        grouped.setdefault(anchor, []).append(positive)
    return grouped


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"margin": 0.02}, {"absolute_margin": 0.02}),
        ({"relative_margin": 0.05}, {"relative_margin": 0.05}),
        ({"max_score": 0.7, "min_score": 0.1}, {"max_score": 0.7, "min_score": 0.1}),
    ],
    ids=str,
)
def test_those_of_sentence_transformers(
    folder: Path, pairs: list[tuple[str, str]], ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    anchors, answers = zip(*pairs, strict=True)
    table = datasets.Dataset.from_dict({"anchor": list(anchors), "positive": list(answers)})
    model = SentenceTransformer(str(folder), device="cpu")
    found = mine_hard_negatives(
        table,
        model,
        num_negatives=3,
        output_format="triplet",
        verbose=False,
        range_max=60,
        **theirs,
    )
    expected: dict[str, list[str]] = {}
    for row in found.to_list():
        listed = expected.setdefault(row["anchor"], [])
        if row["negative"] not in listed:
            listed.append(row["negative"])
    encoder = packhorse.load(folder, device="cpu", dtype="fp32")
    mined = list(mine(encoder, positives(pairs), options=MiningOptions(3, depth=60, **ours)))
    actual = {group.anchor: list(group.negatives) for group in mined if group.negatives}
    assert actual == expected and len(actual) > 5
    first = mined[0]
    assert len(first.positives) == 2 and not set(first.positives) & set(first.negatives)
    vectors = encoder.embed([first.anchor, *first.positives, *first.negatives])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = [*first.positive_scores, *first.negative_scores]
    assert scores == pytest.approx((unit[1:] @ unit[0]).tolist(), abs=1e-5)


def test_an_anchor_is_no_negative_of_itself(folder: Path) -> None:
    encoder = packhorse.load(folder, device="cpu", dtype="fp32")
    both = {"good horse": ["nice mule"], "bad cart": ["good horse"], "ugly road": ["poor mule"]}
    found = {group.anchor: group.negatives for group in mine(encoder, both)}
    assert set(found["good horse"]) == {"poor mule"}
    assert set(found["bad cart"]) == {"nice mule", "poor mule"}


def test_skip_and_random_sampling(folder: Path, pairs: list[tuple[str, str]]) -> None:
    encoder = packhorse.load(folder, device="cpu", dtype="fp32")
    every = next(mine(encoder, positives(pairs), options=MiningOptions(30, depth=30)))
    later = next(mine(encoder, positives(pairs), options=MiningOptions(5, depth=30, skip=4)))
    assert later.negatives == every.negatives[4:9]
    options = MiningOptions(5, depth=30, sampling="random", seed=3)
    drawn, again = (next(mine(encoder, positives(pairs), options=options)) for _ in range(2))
    assert drawn == again and drawn.negatives != every.negatives[:5]
    assert set(drawn.negatives) <= set(every.negatives)
    with pytest.raises(InputError, match="between skip and depth"):
        MiningOptions(5, depth=4, skip=4)
    with pytest.raises(InputError, match="margin is nan; it must be a finite number"):
        MiningOptions(margin=float("nan"))


def test_another_judge_decides(folder: Path, pairs: list[tuple[str, str]]) -> None:
    """With a teacher, order and scores are its own; here dot products, which are longer."""
    encoder = packhorse.load(folder, device="cpu", dtype="fp32")
    teacher = Teacher(encoder)
    group = next(mine(encoder, positives(pairs), (), MiningOptions(40, depth=40), teacher))
    vectors = encoder.embed([group.anchor, *group.negatives])
    assert group.negative_scores == pytest.approx((vectors[1:] @ vectors[0]).tolist(), rel=1e-5)
    assert list(group.negative_scores) == sorted(group.negative_scores, reverse=True)


def test_the_command(
    folder: Path, pairs: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "pairs.jsonl", tmp_path / "mined.jsonl"
    lines = [json.dumps({"anchor": a, "positive": p}) for a, p in pairs]
    source.write_text("\n".join(lines) + "\n")
    (tmp_path / "more.txt").write_text("ugly road cart mule horse\n")
    command = ["data", "mine", str(source), str(out), "--model", str(folder), "--device", "cpu"]
    more = ["--corpus", str(tmp_path / "more.txt"), "--negatives", "2", "--json"]
    assert main([*command, *more]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["anchors"] == len(positives(pairs)) == said["rows"] and said["left_out"] == 0
    groups = read_groups(out, scored=True)
    assert len(groups) == len(pairs) and all(len(group.texts) == 4 for group in groups)
    assert all(len(group.scores) == 3 for group in groups)
    assert main([*command, *more]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*command, *more, "--overwrite", "--layout", "columns"]) == 0
    row = json.loads(out.read_text().splitlines()[0])
    assert list(row) == ["anchor", "positive", "negative_1", "negative_2"]
    before = out.read_bytes()
    assert main([*command, "--overwrite", "--max-score", "-1"]) == 2
    assert "lower the margins" in capsys.readouterr().err
    assert out.read_bytes() == before and not list(tmp_path.glob(".*partial"))
