"""Labeled spans by every aggregation: transformers' pipeline is the measure."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers as tk

import packhorse
from packhorse.errors import InputError
from packhorse.runtime.encoder import Encoder

TEXT = (
    "Charlemagne packhorses carried, sacks to Woldingham; Grünwald's mules (unladen) saw O'Brien "
    "and Kingston-upon-Hull. naïve 東京 unhurriedly?"
)
WORDS = TEXT.split()
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ROLES = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
MODELS = {"wordpiece": "Bert", "bytelevel": "Roberta", "unigram": "XLMRoberta"}
AGGREGATIONS = ("none", "simple", "first", "average", "max")


def library_tokenizer(kind: str) -> tk.Tokenizer:
    """A tokenizer of each kind that splits most of the words."""
    options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "wordpiece":
        built = tk.Tokenizer(tk.models.WordPiece(unk_token="<unk>"))
        built.normalizer = tk.normalizers.BertNormalizer(lowercase=True)
        built.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
        built.decoder = tk.decoders.WordPiece()
        trainer = tk.trainers.WordPieceTrainer(vocab_size=120, **options)
    elif kind == "bytelevel":
        built = tk.Tokenizer(tk.models.BPE())
        built.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = tk.decoders.ByteLevel()
        alphabet = tk.pre_tokenizers.ByteLevel.alphabet()
        trainer = tk.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, **options)
    else:
        built = tk.Tokenizer(tk.models.Unigram())
        built.pre_tokenizer = tk.pre_tokenizers.Metaspace()
        built.decoder = tk.decoders.Metaspace()
        trainer = tk.trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **options)
    built.train_from_iterator([TEXT] * 3, trainer)
    if kind == "bytelevel":
        # Without a prefix space, as above: otherwise each window's first token keeps its blank.
        built.post_processor = tk.processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), add_prefix_space=False
        )
    else:
        built.post_processor = tk.processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B </s>",
            special_tokens=[("<s>", 0), ("</s>", 2)],
        )
    return built


@pytest.fixture(scope="module", params=MODELS)
def tagger(request: Any, tmp_path_factory: Any) -> tuple[Encoder, Any]:
    """A tiny model of token classification, here and in transformers' pipeline."""
    transformers = pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp(request.param)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library_tokenizer(request.param),
        model_max_length=120,
        **{f"{role}_token": token for role, token in ROLES.items()},
    )
    tokenizer.save_pretrained(folder)
    name = MODELS[request.param]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        pad_token_id=1,
        id2label=dict(enumerate(LABELS)),
        label2id={label: i for i, label in enumerate(LABELS)},
    )
    transformers.set_seed(3)
    model = getattr(transformers, f"{name}ForTokenClassification")(config).eval()
    model.classifier.weight.data *= 20  # so that neighbors have different labels
    model.save_pretrained(folder)
    pipeline = transformers.pipeline("token-classification", model=str(folder), device="cpu")
    return packhorse.load(folder, device="cpu"), pipeline


@pytest.mark.parametrize("aggregation", AGGREGATIONS[2:])
def test_words_are_labeled_as_in_transformers(
    tagger: tuple[Encoder, Any], aggregation: Any
) -> None:
    encoder, pipeline = tagger
    choices = random.Random(4)
    texts = [" ".join(choices.choices([*WORDS, "ж"], k=9)) for _ in range(20)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the tokenizer does not support real words
        expected = pipeline(texts, aggregation_strategy=aggregation)
    entities = encoder.label(texts, aggregation=aggregation)
    for text, ours, row in zip(texts, entities, expected, strict=True):
        # A blank that is a token of its own can be a name there, with an empty span.
        theirs = [item for item in row if item["start"] < item["end"]]
        spans = [(entity.label, entity.start, entity.end) for entity in ours]
        assert spans == [(item["entity_group"], item["start"], item["end"]) for item in theirs]
        assert [text[entity.start : entity.end] for entity in ours] == [e.text for e in ours]
        scores = [float(item["score"]) for item in theirs]
        assert [entity.score for entity in ours] == pytest.approx(scores, abs=1e-5)
    assert sum(map(len, entities)) > 40
    assert any(" " in entity.text for row in entities for entity in row)


@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
@pytest.mark.parametrize("stride", [0, 7, 40, 110])
def test_long_texts_are_read_in_windows_as_in_transformers(
    tagger: tuple[Encoder, Any], aggregation: Any, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, pipeline = tagger
    if aggregation == "simple":
        if pipeline.model.config.model_type == "roberta":
            pytest.skip("a blank that is a token of its own ends an entity, and there does not")
        # By "B-" the second piece of a split word begins an entity there, and never here.
        labels = tuple(label.replace("B-", "I-X") for label in LABELS)
        encoder = replace(encoder, labels=labels)
        monkeypatch.setattr(pipeline.model.config, "id2label", dict(enumerate(labels)))
    choices = random.Random(stride)
    texts = [" ".join(choices.choices(WORDS, k=count)) for count in (3, 120, 160)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = pipeline(texts, aggregation_strategy=aggregation, stride=stride)
    entities = encoder.label(texts, aggregation=aggregation, stride=stride)
    for text, ours, row in zip(texts, entities, expected, strict=True):
        theirs = [item for item in row if item["start"] < item["end"]]
        spans = [(entity.label, entity.start, entity.end) for entity in ours]
        assert spans == [(item["entity_group"], item["start"], item["end"]) for item in theirs]
        assert [text[entity.start : entity.end] for entity in ours] == [e.text for e in ours]
        scores = [float(item["score"]) for item in theirs]
        assert [entity.score for entity in ours] == pytest.approx(scores, abs=1e-5)
    assert entities[2][-1].end > len(texts[2]) - 200
    # The controls: without windows the end is not read, and windows find some spans twice.
    cut = encoder.label(texts[2:], aggregation=aggregation, long="truncate")[0]
    assert cut[-1].end < len(texts[2]) / 2
    if stride:
        chunks = encoder.label(texts[2:], aggregation=aggregation, long="chunk")[0]
        assert chunks != entities[2]


def test_stride_without_entities_to_join(tagger: tuple[Encoder, Any]) -> None:
    encoder, pipeline = tagger
    with pytest.raises(ValueError, match="stride"):
        pipeline(TEXT, aggregation_strategy="none", stride=5)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"aggregation": "none"}, "only entities are joined"),
        ({"long": "chunk"}, "leave out long"),
        ({"stride": 118}, "stride is 118; text 0 allows 0 to 117"),
        ({"stride": -1}, "stride is -1"),
    ]
    for options, message in refused:
        with pytest.raises(InputError, match=message):
            encoder.label([TEXT], **{"stride": 5, **options})


def test_aggregations_differ(tagger: tuple[Encoder, Any]) -> None:
    """Otherwise the test above would not tell one from another."""
    encoder, _ = tagger
    results = [str(encoder.label([TEXT], aggregation=name)) for name in AGGREGATIONS]
    assert len(set(results)) == len(AGGREGATIONS)


def test_unknown_aggregation(tagger: tuple[Encoder, Any]) -> None:
    wrong: Any = "median"
    with pytest.raises(InputError, match="aggregation is 'median'; use one of none, simple, first"):
        tagger[0].label(["a"], aggregation=wrong)
