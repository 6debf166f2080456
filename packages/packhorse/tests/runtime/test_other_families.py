"""ALBERT and DeBERTa as users run them: encoder, fixed bits, compiled buckets, server, command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse import executable
from packhorse.cli import main
from packhorse.errors import KernelError
from packhorse.serve import hosting
from packhorse.serve.settings import ServeSettings

pytestmark = pytest.mark.machine

FAMILIES = ("Albert", "DebertaV2")
TEXTS = ["a horse carries sacks", "the mule", "to the market, with no load! " * 2, "Ünïted sacks"]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[0]), (TEXTS[1], TEXTS[3])]
OWN: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_size": 16, "hidden_act": "gelu_new"},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
}


def write_unigram(folder: Path) -> None:
    """A tokenizer of the kind that both families have: sentencepiece's unigram, as JSON."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["<pad>", "[CLS]", "[SEP]", "<unk>", "[MASK]"]
    pieces = ["▁", "▁the", "▁a", "horse", "▁horse", "sack", "s", "▁sacks", "▁carries", "mule"]
    letters = list("abcdefghijklmnopqrstuvwxyz,.!")
    scored = [(word, 0.0) for word in special]
    scored += [(piece, -2.0 - n / 10) for n, piece in enumerate(pieces)]
    scored += [(letter, -6.0 - n / 10) for n, letter in enumerate(letters) if letter != "s"]
    built = Tokenizer(models.Unigram(scored, unk_id=3))
    built.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    built.add_special_tokens(special)
    built.save(str(folder / "tokenizer.json"))
    named = {"cls": "[CLS]", "sep": "[SEP]", "pad": "<pad>", "mask": "[MASK]", "unk": "<unk>"}
    settings = {f"{role}_token": token for role, token in named.items()}
    settings |= {"model_max_length": 96, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture(scope="module")
def made(
    transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Any]]:
    """A folder of a classifier with random weights, and the model of transformers that wrote it."""
    models: dict[str, tuple[Path, Any]] = {}

    def make(family: str) -> tuple[Path, Any]:
        if family not in models:
            folder = tmp_path_factory.mktemp(family)
            config = getattr(transformers, f"{family}Config")(
                vocab_size=60,
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=48,
                max_position_embeddings=128,
                num_labels=3,
                problem_type="multi_label_classification",
                **OWN[family],
            )
            torch.manual_seed(3)
            model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            model.save_pretrained(folder)
            write_unigram(folder)
            models[family] = folder, model
        return models[family]

    return make


def expected(transformers: ModuleType, folder: Path, model: Any) -> np.ndarray:
    """The sigmoids of transformers for a padded batch of the pairs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    first, second = zip(*PAIRS, strict=True)
    inputs = tokenizer(
        list(first), list(second), padding=True, return_tensors="pt", return_token_type_ids=True
    )
    if model.config.type_vocab_size == 0:
        inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        return model(**inputs).logits.sigmoid().numpy()


def scores(rows: Any) -> np.ndarray:
    """The scores by label, in the order of the labels."""
    return np.array([[row[f"LABEL_{number}"] for number in range(3)] for row in rows])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"invariant": True}, {"dtype": "bf16"}], ids=str)
def test_pairs_are_classified_as_by_transformers(
    family: str, options: dict[str, Any], made: Any, transformers: ModuleType
) -> None:
    folder, model = made(family)
    want = expected(transformers, folder, model)
    encoder = packhorse.load(folder, device="cpu", **options)
    assert encoder.max_length == 96
    near = 2e-3 if "dtype" in options else 1e-5
    actual = scores([row.scores for row in encoder.classify(PAIRS)])
    np.testing.assert_allclose(actual, want, atol=near)
    assert np.abs(actual - np.roll(want, 1, 0)).max() > 5 * near  # the control: another pair's
    alone = np.concatenate([scores([encoder.classify([pair])[0].scores]) for pair in PAIRS])
    if "invariant" in options:
        assert np.array_equal(alone, actual)
    else:
        np.testing.assert_allclose(alone, actual, atol=near)


def test_a_kernel_that_does_not_know_distances_is_refused(made: Any) -> None:
    folder, _ = made("DebertaV2")
    encoder = packhorse.load(folder, device="cpu")
    assert encoder.kernel == "bucketed" and "disentangled" in encoder.reason
    for name in ("native", "mask"):
        with pytest.raises(KernelError, match="use 'bucketed'"):
            packhorse.load(folder, device="cpu", kernel=name)
    assert packhorse.load(folder, device="cpu", kernel="repack").kernel == "repack"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_buckets(family: str, made: Any, transformers: ModuleType) -> None:
    if reason := executable.why_uncompiled():
        pytest.skip(reason)
    folder, model = made(family)
    encoder = packhorse.load(folder, device="cpu", kernel="bucketed", graphs=True)
    actual = scores([row.scores for row in encoder.classify(PAIRS)])
    np.testing.assert_allclose(actual, expected(transformers, folder, model), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_behind_the_server(
    family: str, made: Any, transformers: ModuleType, quiet_runtime: Any
) -> None:
    folder, model = made(family)
    settings = ServeSettings(model=(str(folder),), threads=1, batch_tokens=512)
    hosts = hosting.open_models(settings)
    try:
        runner = hosts.default.runner
        together = scores([row.scores for row in runner.run(PAIRS, "classify")])
        np.testing.assert_allclose(together, expected(transformers, folder, model), atol=1e-5)
        alone = scores([runner.submit(pair, "classify").result().scores for pair in PAIRS])
        np.testing.assert_allclose(alone, together, atol=1e-5)
    finally:
        hosts.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_from_the_shell(
    family: str, made: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, model = made(family)
    assert main(["inspect", str(folder), "--json"]) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert said["runs"] and said["family"] == model.config.model_type
    assert main(["convert", str(folder), str(tmp_path / "copy")]) == 0
    capfd.readouterr()
    assert main(["convert", str(folder), str(tmp_path / "tf"), "--to", "tf1"]) == 2
    assert "cannot be written as 'tf1'" in capfd.readouterr().err
    results: list[Any] = []
    for place in (folder, tmp_path / "copy"):
        assert main(["run", TEXTS[0], "--model", str(place), "--task", "classify", "--json"]) == 0
        results.append(json.loads(capfd.readouterr().out.splitlines()[-1])["results"])
    assert results[0] == results[1]
