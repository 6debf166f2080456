"""The fine-tuning example runs padded and packed, and both learn the same."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_trainer.py"


def test_padded_and_packed_learn_the_same(
    minilm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    config = AutoConfig.from_pretrained(minilm)
    config.update({"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 64})
    config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    AutoModel.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path)
    main = runpy.run_path(str(EXAMPLE))["main"]
    few = ["--compare", "--rounds", "1", "--steps", "5", "--batch", "4"]
    main(["--model", str(tmp_path), *few])
    output = capsys.readouterr().out
    losses = re.findall(r"^p\w+: [\d.]+ sequences/s, loss ([\d.]+)$", output, re.M)
    assert len(losses) == 2 and len(set(losses)) == 1
    assert re.search(r"^packed is \d+\.\d\d times as fast$", output, re.M)


def test_a_file_of_sentences(tmp_path: Path) -> None:
    file = tmp_path / "task.tsv"
    file.write_text('sentence\tlabel\na "quoted word\t1\nplain\t0\n', "utf-8")
    read = runpy.run_path(str(EXAMPLE))["sentences"]
    assert sorted(read(file, 9)) == [('a "quoted word', 1), ("plain", 0)]
    sentences = read(None, 40)
    assert len({len(text.split()) for text, _ in sentences}) > 8
    assert all(("good" in text) == (label == 1) for text, label in sentences)
