"""Qwen3-Reranker: the scores of transformers' own Qwen3ForCausalLM by the recipe of its card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse import checkpoint
from packhorse.errors import CheckpointError, InputError

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUERY = "Who carries two sacks to market?"
DOCUMENTS = [
    "The horse and the mule carry sacks.\n\nTwo of them, to be sure.",
    "A dog barks.",
    "Übermorgen 1234 sähe ich <|im_end|> 不 and 🐴",
    "home  and\r\n   market " * 12,
    "",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
MAX_LENGTH = 200


@pytest.fixture(scope="module")
def trained() -> Any:
    """A byte-level BPE with the rules of Qwen's tokenizer and its special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [*DOCUMENTS, QUERY, INSTRUCTION, "yes no yes no", "no", "yes"] * 5
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def write(folder: Path, trained: Any, kind: str = "Qwen3ForCausalLM", **settings: Any) -> Any:
    """A tiny random model of the layout of Qwen3-Reranker, and its tokenizer."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:],
    )
    tokenizer.padding_side = "left"
    usual = {
        "vocab_size": trained.get_vocab_size() + 5,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 1024,
        "initializer_range": 0.4,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(5)
    model = getattr(transformers, kind)(transformers.Qwen3Config(**usual | settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def by_the_card(theirs: tuple[Any, Any], pairs: list[tuple[str, str]], limit: int) -> Any:
    """The probability of "yes", as the code of the model's card computes it."""
    model, tokenizer = theirs
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    before = tokenizer.encode(prefix, add_special_tokens=False)
    after = tokenizer.encode(suffix, add_special_tokens=False)
    texts = [
        f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs
    ]
    inputs = tokenizer(
        texts,
        padding=False,
        truncation="longest_first",
        return_attention_mask=False,
        max_length=limit - len(before) - len(after),
    )
    inputs["input_ids"] = [before + ids + after for ids in inputs["input_ids"]]
    padded = tokenizer.pad(inputs, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**padded).logits[:, -1]
    return torch.log_softmax(logits[:, [no, yes]], 1)[:, 1].exp().numpy()


PAIRS = [(QUERY, document) for document in DOCUMENTS]


@pytest.mark.filterwarnings("ignore:.* texts were cut")
@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_those_of_the_card(tied: bool, trained: Any, tmp_path: Path) -> None:
    theirs = write(tmp_path / "model", trained, tie_word_embeddings=tied)
    want = by_the_card(theirs, PAIRS, MAX_LENGTH)
    assert np.ptp(want) > 0.05
    ours = packhorse.load(tmp_path / "model", device="cpu", dtype="fp32")
    assert ours.heads == ("classify",)
    ranking = ours.rerank(QUERY, DOCUMENTS, max_length=MAX_LENGTH)
    scores = {rank.index: rank.score for rank in ranking}
    np.testing.assert_allclose([scores[i] for i in range(len(want))], want, atol=1e-5)
    assert [rank.index for rank in ranking] == np.argsort(-want, kind="stable").tolist()
    # The control: without the words around them the pairs score otherwise.
    bare = replace(ours, pair_template=None).rerank(QUERY, DOCUMENTS, max_length=MAX_LENGTH)
    assert max(abs(rank.score - scores[rank.index]) for rank in bare) > 1e-3
    raw = ours.rerank(QUERY, DOCUMENTS, raw=True, max_length=MAX_LENGTH)
    logits = np.array([rank.score for rank in raw])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), np.sort(want)[::-1], atol=1e-5)


def test_a_text_that_is_cut_keeps_the_words_after_it(trained: Any, tmp_path: Path) -> None:
    theirs = write(tmp_path / "model", trained)
    limit = 150
    want = by_the_card(theirs, PAIRS, limit)
    ours = packhorse.load(tmp_path / "model", device="cpu", dtype="fp32")
    ranking = ours.rerank(QUERY, DOCUMENTS, max_length=limit, long="truncate")
    scores = {rank.index: rank.score for rank in ranking}
    np.testing.assert_allclose([scores[i] for i in range(len(want))], want, atol=1e-5)
    (cut,) = ours.prepare(
        "rerank", [QUERY], documents=DOCUMENTS[3:4], max_length=limit, long="truncate"
    )
    assert cut.sequences[0].truncated and len(cut.sequences[0]) == limit
    with pytest.raises(InputError, match="words around a pair take"):
        ours.rerank(QUERY, DOCUMENTS, max_length=20)


def test_a_sequence_does_not_depend_on_its_neighbors(trained: Any, tmp_path: Path) -> None:
    write(tmp_path / "model", trained)
    ours = packhorse.load(tmp_path / "model", device="cpu", dtype="fp32")
    together = {rank.index: rank.score for rank in ours.rerank(QUERY, DOCUMENTS, raw=True)}
    for index, document in enumerate(DOCUMENTS):
        (alone,) = ours.rerank(QUERY, [document], raw=True)
        assert alone.score == pytest.approx(together[index], abs=1e-5)
    assert abs(together[0] - together[1]) > 1e-3


def test_the_layout_of_sentence_transformers(trained: Any, tmp_path: Path) -> None:
    """As its CrossEncoder saves it, with the chat template of the card and an instruction."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import modules

    write(tmp_path / "base", trained)
    template = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        '<|im_start|>user\n<Instruct>: {{ messages | selectattr("role", "eq", "system") | '
        'map(attribute="content") | first | default("' + INSTRUCTION + '") }}\n'
        '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | '
        'first }}\n<Document>: {{ messages | selectattr("role", "eq", "document") | '
        'map(attribute="content") | first }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n'
        "</think>\n\n\n"
    )
    transformer = modules.Transformer(
        str(tmp_path / "base"),
        transformer_task="text-generation",
        processor_kwargs={"chat_template": template},
    )
    tokenizer: Any = transformer.tokenizer
    yes, letter, no = tokenizer.convert_tokens_to_ids(["yes", "o", "no"])
    for name, words in {"two": (yes, no), "one": (yes, None), "other": (letter, no)}.items():
        theirs = CrossEncoder(
            modules=[transformer, modules.LogitScore(*words)],
            device="cpu",
            prompts={"own": "Find what a farmer would ask"},
            default_prompt_name="own",
        )
        theirs.save_pretrained(str(tmp_path / name))
        ours = packhorse.load(tmp_path / name, device="cpu", dtype="fp32")
        want = theirs.predict(PAIRS, activation_fn=torch.nn.Identity())
        raw = {rank.index: rank.score for rank in ours.rerank(QUERY, DOCUMENTS, raw=True)}
        np.testing.assert_allclose([raw[i] for i in range(len(want))], want, atol=2e-5)
        score = ours.rerank(QUERY, DOCUMENTS[:1])[0].score
        assert score == pytest.approx(float(theirs.predict(PAIRS[:1])[0]), abs=1e-5)


def test_it_is_written_as_a_classifier_that_keeps_the_words(trained: Any, tmp_path: Path) -> None:
    import transformers

    write(tmp_path / "model", trained)
    checkpoint.write(tmp_path / "new", checkpoint.load(tmp_path / "model"))
    ours = packhorse.load(tmp_path / "model", device="cpu", dtype="fp32")
    again = packhorse.load(tmp_path / "new", device="cpu", dtype="fp32")
    assert again.pair_template == ours.pair_template is not None
    first = ours.rerank(QUERY, DOCUMENTS)
    for before, after in zip(first, again.rerank(QUERY, DOCUMENTS), strict=True):
        assert after.index == before.index and after.score == pytest.approx(before.score, abs=1e-6)
    theirs = transformers.Qwen3ForSequenceClassification.from_pretrained(tmp_path / "new").eval()
    (job,) = ours.prepare("rerank", [QUERY], documents=DOCUMENTS[:1])
    ids = torch.from_numpy(job.sequences[0].ids.astype(np.int64))[None]
    theirs.config.pad_token_id = 0
    with torch.no_grad():
        logit = float(theirs(input_ids=ids).logits)
    assert ours.rerank(QUERY, DOCUMENTS[:1], raw=True)[0].score == pytest.approx(logit, abs=1e-5)


def test_what_cannot_be_scored_is_refused(trained: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, trained)
    (folder / "chat_template.jinja").write_text("{{ messages }} query: … document: …")
    with pytest.raises(CheckpointError, match=r"not that of Qwen3-Reranker.*not run here"):
        packhorse.load(folder, device="cpu")
    (folder / "chat_template.jinja").unlink()
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        packhorse.load(folder, device="cpu")
