"""Labels of words: transformers' loss on the same batch, seqeval's F1, whole runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse import checkpoint
from packhorse.checkpoint import names
from packhorse.data.tasks import targets
from packhorse.data.tasks.tagged import (
    UNLABELED,
    TaggedTexts,
    entities,
    entity_scores,
    read_tagged,
)
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.train.job import assemble
from packhorse.train.loop import train
from packhorse.train.objectives import Tag
from packhorse.train.settings import TrainSettings

LABELS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
SENTENCES = [
    (["good", "horse", "w1"], ["O", "B-PER", "I-PER"]),
    (["mule", "cart-road", "w2", "w3", "nice"], ["B-LOC", "I-LOC", "O", "O", "B-PER"]),
    (["bad"], ["O"]),
    (["horsecart", "mule,", "w4", "road"], ["B-PER", "O", "O", "B-LOC"]),
]


def conll(path: Path, repeats: int = 1) -> Path:
    lines = ["-DOCSTART- -X- -X- O", ""]
    for words, tags in SENTENCES * repeats:
        lines += [f"{word} NN {tag}" for word, tag in zip(words, tags, strict=True)]
        lines.append("")
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A vocabulary in which some words are several tokens."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = ("good", "horse", "##cart", "mule", "cart", "road", "bad", "nice", "-", ",", "w", "##1")
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *words, "##2", "##3", "##4"]) + "\n")
    return tmp_path / "vocab.txt"


def by_their_example(tokenizer: Any, tagged: TaggedTexts) -> Any:
    """What the token classification example of transformers makes of the words."""
    batch = tokenizer(tagged.words, is_split_into_words=True, padding=True, return_tensors="pt")
    rows = []
    for number, tags in enumerate(tagged.tags):
        before, row = None, []
        for word in batch.word_ids(number):
            row.append(-100 if word is None or word == before else tags[word])
            before = word
        rows.append(row)
    return {**batch, "labels": torch.tensor(rows)}


def test_loss_and_gradients_are_those_of_transformers(pieces: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=len(LABELS),
        initializer_range=0.2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    reference = transformers.BertForTokenClassification(config).double().eval()
    reference.save_pretrained(tmp_path / "model")
    tagged = read_tagged(conll(tmp_path / "a.conll"))
    assert tagged.labels == LABELS
    padded = by_their_example(transformers.BertTokenizerFast(str(pieces)), tagged)
    loss = reference(**padded).loss
    loss.backward()
    task = targets.tagging_task(tagged, Tokenizer.load(pieces))
    for row in (0, 16):
        loader = targets.TaskLoader(task, examples=4, epochs=1, shuffle=False, row=row)
        (batch,) = loader
        for number, part in enumerate(batch.packed.split(batch.targets)):
            theirs = padded["labels"][number][padded["attention_mask"][number].bool()]
            assert part.tolist() == theirs.tolist()
        model = checkpoint.load(tmp_path / "model", dtype=torch.float64).model
        objective = Tag(LABELS)
        ours, stats = objective.loss(model, batch)
        assert ours.item() == pytest.approx(loss.item(), rel=1e-10)
        assert int(objective.weigh(batch)) == 13 == int(stats.sums[0, 1])
        ours.backward()
        table = names.table(names.BERT)
        theirs_by_name = {n: p.grad for n, p in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            expected = torch.cat([theirs_by_name[part] for part in names.sources(name, table)])
            assert torch.allclose(parameter.grad, expected, rtol=1e-8, atol=1e-11), name
    # The control: a label for every token of a word is another loss.
    every = batch.targets.clone()
    every[(every == UNLABELED) & (batch.packed.ids > 4)] = 0
    wrong = torch.nn.functional.cross_entropy(model(batch.packed, "tokens")[0], every)
    assert abs(wrong.item() - loss.item()) > 1e-3


def test_a_step_in_parts_is_the_step(tiny: Path, tmp_path: Path) -> None:
    model = checkpoint.load(tiny).model
    tagged = read_tagged(conll(tmp_path / "a.conll"))
    task = targets.tagging_task(tagged, checkpoint.tokenizer(checkpoint.load(tiny)))
    head = torch.nn.Linear(32, 5)

    class Tagger(torch.nn.Module):
        def forward(self, packed: Any, *heads: str) -> list[torch.Tensor]:
            return [head(model(packed, "hidden")[0])]

    losses = []
    for parts in (1, 3):
        batches = list(targets.TaskLoader(task, examples=4, epochs=1, parts=parts, shuffle=False))
        totals = torch.stack([Tag().weigh(batch) for batch in batches]).sum(0)
        losses.append(sum(Tag().loss(Tagger(), b, totals)[0].item() for b in batches))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_entities_are_those_of_seqeval() -> None:
    theirs = pytest.importorskip("seqeval.metrics", reason="seqeval is not installed")

    random = np.random.default_rng(0)
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-PER", "S-LOC", "I-MISC", "B-MI-SC"]
    truth = [random.choice(labels, random.integers(1, 12)).tolist() for _ in range(300)]
    guess = [
        [label if random.random() < 0.7 else str(random.choice(labels)) for label in row]
        for row in truth
    ]
    scores = entity_scores(truth, guess)
    for name, value in scores.items():
        expected = getattr(theirs, f"{name}_score")(truth, guess)
        assert value == pytest.approx(expected, abs=1e-12)
    assert 0.2 < scores["f1"] < 0.9


def test_entities() -> None:
    """What seqeval says of these, for where it is not installed."""
    found = entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-PER", "O", "S-LOC"])
    assert found == {
        ("PER", 0, 1),
        ("LOC", 3, 3),
        ("LOC", 4, 4),
        ("PER", 5, 5),
        ("LOC", 7, 7),
    }
    assert entity_scores([["B-PER", "I-PER"]], [["B-PER", "O"]])["f1"] == 0


@pytest.fixture
def of(tiny: Path, tmp_path: Path) -> Callable[..., TrainSettings]:
    data = str(conll(tmp_path / "train.conll", repeats=4))
    usual = {"task": "tag", "model": str(tiny), "train": data, "eval": data, "device": "cpu"}
    usual |= {"batch": 8, "steps": 50, "learning_rate": 5e-3, "compile": "off", "dropout": 0.0}
    return lambda **options: TrainSettings(**{**usual, **options})


def test_a_run_whose_model_transformers_opens(of: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    outcome = train(assemble(of()), tmp_path / "run")
    assert outcome.evaluation["f1"] > 0.9 and outcome.model is not None
    reference = transformers.AutoModelForTokenClassification.from_pretrained(outcome.model).eval()
    assert reference.config.id2label == dict(enumerate(LABELS))
    words = transformers.AutoTokenizer.from_pretrained(outcome.model)
    text = "good horse w1 road"
    with torch.no_grad():
        expected = reference(**words(text, return_tensors="pt")).logits[0]
    loaded = checkpoint.load(outcome.model)
    (encoding,) = checkpoint.tokenizer(loaded).encode([text])
    (logits,) = loaded.model(packhorse.Packed.build([encoding]), "tokens")
    assert (logits - expected).abs().max() < 1e-5
    further = assemble(of(model=str(outcome.model), steps=1))  # it keeps its head
    assert further.checkpoint.labels == LABELS and not any(
        "new weights" in n for n in further.notes
    )


def test_a_run_that_was_stopped_goes_on_to_the_bit(of: Any, tmp_path: Path) -> None:
    settings = of(steps=6, dropout=0.1, micro_tokens=30, eval_every=2)
    train(assemble(settings), tmp_path / "whole")
    for steps in (2, 2):
        calls = count()
        wish = lambda calls=calls, steps=steps: signal.SIGTERM if next(calls) >= steps else 0  # noqa: E731
        train(assemble(settings), tmp_path / "cut", stop_signal=wish)
    assert train(assemble(settings), tmp_path / "cut").step == 6
    for name in ("model/model.safetensors", "log.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_lists_of_words(tmp_path: Path) -> None:
    rows = [{"tokens": words, "ner_tags": tags} for words, tags in SENTENCES]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = read_tagged(conll(tmp_path / "a.conll"))
    assert read_tagged(tmp_path / "a.jsonl") == plain
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")
    feature = datasets.Sequence(datasets.ClassLabel(names=list(LABELS)))
    table = datasets.Dataset.from_dict(
        {"tokens": [w for w, _ in SENTENCES], "ner_tags": [t for _, t in SENTENCES]},
        features=datasets.Features(
            {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": feature}
        ),
    )
    table.save_to_disk(tmp_path / "saved")
    assert read_tagged(tmp_path / "saved") == plain


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "ner_tags": ["O", "O"]}, "1 words and 2 labels"),
        ({"tokens": ["a b", "c"], "ner_tags": ["O", "X"]}, "is no word"),
        ({"tokens": "a", "ner_tags": ["O"]}, "is no list"),
        ({"tokens": ["a"]}, "two columns, such as tokens and ner_tags"),
        ({"tokens": ["a"], "ner_tags": ["O"]}, "too few labels"),
        ({"tokens": [], "ner_tags": []}, "no sentences"),
        ({"tokens": ["a", "b"], "ner_tags": ["", "O"]}, "'' is no label"),
        ({"tokens": ["a", "b"], "ner_tags": [None, "O"]}, "None is no label"),
        ({"tokens": ["a", "b"], "ner_tags": [["O"], ["O"]]}, "is no label"),
    ],
)
def test_what_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=message):
        read_tagged(tmp_path / "a.jsonl")


def test_a_hash_is_a_word_where_it_has_a_label(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("# text = # 3 is\n# NN O\n3 CD B-X\n\nis VB O\n# NN O\n")
    assert read_tagged(tmp_path / "a.conll").words == [["#", "3"], ["is", "#"]]


def test_universal_dependencies(tmp_path: Path) -> None:
    """Words and parts of speech, not the first and the last column of the ten."""
    rest = "\t_" * 6
    lines = ["# sent_id = 1", f"1-2\tdon't\t_\t_{rest}", f"1\tdo\tdo\tAUX{rest}"]
    lines += [f"2\tn't\tnot\tPART{rest}", f"2.1\tgo\tgo\tVERB{rest}", "", ""]
    (tmp_path / "a.conllu").write_text("\n".join(lines))
    tagged = read_tagged(tmp_path / "a.conllu")
    assert (tagged.words, tagged.labels) == ([["do", "n't"]], ("AUX", "PART"))
    (tmp_path / "b.conllu").write_text("good O\n")
    with pytest.raises(InputError, match=r"line 1: 1 cells; \.conllu has 10"):
        read_tagged(tmp_path / "b.conllu")


def test_a_token_may_begin_with_the_blank_before_its_word(tmp_path: Path) -> None:
    """As those of byte-level vocabularies, ModernBERT's for one."""
    tokenizers = pytest.importorskip("tokenizers")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    pieces = (*special, "a", "b", "c", "d", "e", "\u0120", "\u0120c", "\u0120d")
    merges = [("\u0120", "c"), ("\u0120", "d")]
    words = tokenizers.Tokenizer(
        tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.add_special_tokens(list(special))
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    words.save(str(tmp_path / "tokenizer.json"))
    tagged = TaggedTexts([["ab", "c", "de"]], [[0, 1, 2]], ("X", "Y", "Z"))
    (example,) = targets.tagging_task(tagged, Tokenizer.load(tmp_path / "tokenizer.json")).examples
    none = UNLABELED
    assert example.target == (none, 0, none, 1, 2, none, none)  # a b _c _d e


def test_labels_that_are_numbers_keep_their_order(of: Any, tmp_path: Path) -> None:
    row = {"tokens": [f"w{i}" for i in range(11)], "ner_tags": list(range(11))}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    job = assemble(of(train=str(tmp_path / "a.jsonl"), eval=""))
    assert job.checkpoint.labels == tuple(map(str, range(11)))
    assert any("labels are numbers: f1 counts entities by names" in n for n in job.notes)
    assert not any("labels are numbers" in n for n in assemble(of()).notes)


def test_words_without_a_token_are_refused(of: Any, tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("\u200b O\n\ufeff B-X\n")
    with pytest.raises(InputError, match="no word of the data has a token"):
        assemble(of(train=str(tmp_path / "a.conll"), eval=""))


def test_words_that_are_cut_are_told_of_both_files(of: Any) -> None:
    notes = assemble(of(max_length=4)).notes
    assert any("12 of 16 examples were truncated" in n for n in notes), notes
    assert any("evaluation: 12 of 16 examples were truncated" in n for n in notes), notes


def test_conll_files_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("good O\nhorse\n")
    with pytest.raises(InputError, match=r"line 2: 'horse' has no label"):
        read_tagged(tmp_path / "a.conll")
    with pytest.raises(InputError, match="cannot be read"):
        read_tagged(tmp_path / "none.conll")
    with pytest.raises(InputError, match="label 'B-LOC' is none of O, B-PER"):
        read_tagged(conll(tmp_path / "b.conll"), labels=("O", "B-PER", "I-PER"))
