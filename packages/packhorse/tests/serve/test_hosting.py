"""Opening models: the cache of prepared weights, and the options of a TensorFlow checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packhorse.runtime.loading import prepared_limits
from packhorse.serve import hosting
from packhorse.serve.settings import ServeSettings


@pytest.mark.parametrize("variable", [None, "9"])
def test_prepared_products_are_few(
    checkpoint_folder: Path, variable: str | None, monkeypatch, threads
) -> None:
    names = [*prepared_limits()]
    for name in names:
        monkeypatch.setenv(name, variable or "")
        if variable is None:
            monkeypatch.delenv(name)
    models = hosting.open_models(ServeSettings(model=(f"tiny={checkpoint_folder}",), threads=1))
    models.close()
    assert [os.environ[name] for name in names] == [variable or "64"] * 2


def test_the_gelu_of_a_tensorflow_checkpoint_can_be_set(
    checkpoint_folder: Path, cli, tmp_path: Path, threads
) -> None:
    assert cli("convert", checkpoint_folder, tmp_path / "tf1", "--to", "tf1").code == 0
    prefix = tmp_path / "tf1" / "bert_model.ckpt"
    for form, activation in (("erf", "gelu"), ("tanh", "gelu_tanh")):
        settings = ServeSettings(model=(f"tf={prefix}",), gelu=form, ignore=("x/*",), threads=1)
        models = hosting.open_models(settings)
        models.close()
        assert models.default.encoder.backend.model.bert.config.activation == activation
