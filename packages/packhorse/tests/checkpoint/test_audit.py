"""What loading a stranger's model touches, as the interpreter's own audit hooks report it.

In a process of its own, since a hook cannot be taken off again: a model of the same format is
loaded once from elsewhere, so that what Python imports is imported, and then the one under audit.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse import checkpoint

FORMATS = ("hf", "tf1", "onnx", "torch", "frozen", "gguf", "int8", "adapter")
AUDITED = """
import json, sys
seen = []
watched = ("open", "import", "exec", "compile", "pickle.find_class")
abroad = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "ctypes.")

def hook(event, arguments):
    if armed and (event in watched or event.startswith(abroad)):
        seen.append([event, str(arguments[0]) if arguments else ""])

armed = False
sys.addaudithook(hook)
from packhorse import checkpoint
checkpoint.load(sys.argv[1], **json.loads(sys.argv[3]))
armed = True
try:
    checkpoint.load(sys.argv[2], **json.loads(sys.argv[3]))
except checkpoint.CheckpointError:
    pass
armed = False
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def models(save_once: Any, tf: Any, tf_bert: Any, tmp_path_factory: Any) -> dict[str, Path]:
    """One small model in every format, each in a folder of its own."""
    from safetensors.torch import load_file

    home = tmp_path_factory.mktemp("audit")
    loaded = checkpoint.load(save_once)
    for to in ("hf", "tf1", "onnx"):
        checkpoint.write(home / to, loaded, to=to)
    shutil.copytree(home / "hf", home / "torch")
    torch.save(load_file(home / "hf" / "model.safetensors"), home / "torch" / "pytorch_model.bin")
    (home / "torch" / "model.safetensors").unlink()
    built = tf_bert.build(tf)
    tf_bert.save(tf, built, home / "frozen" / "model.ckpt")
    tf_bert.freeze(tf, built, home / "frozen" / "model.pb")
    for path in (home / "frozen").glob("*ckpt*"):
        path.unlink()
    (home / "frozen" / "checkpoint").unlink()
    checkpoint.write(home / "int8", loaded, products=torch.int8)
    (home / "gguf").mkdir()
    shutil.copy(Path(__file__).parent / "ggufs" / "bert.gguf", home / "gguf" / "model.gguf")
    shutil.copytree(home / "hf", home / "adapter" / "base")
    write_adapter(home / "adapter", base=home / "adapter" / "base")
    return {name: home / name for name in FORMATS}


def write_adapter(folder: Path, base: Path | str) -> Path:
    """An adapter of one weight of the model above."""
    from safetensors.torch import save_file

    weight = "base_model.model.encoder.layer.0.attention.self.query"
    narrow = {f"{weight}.lora_A.weight": torch.ones(1, 16)}
    folder.mkdir(exist_ok=True)
    wide = {f"{weight}.lora_B.weight": torch.ones(16, 1)}
    save_file(narrow | wide, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def save_once(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=8)
    folder = tmp_path_factory.mktemp("model")
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def audit(first: Path, second: Path, **options: Any) -> list[list[str]]:
    arguments = [sys.executable, "-c", AUDITED, str(first), str(second), json.dumps(options)]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def strange(seen: list[list[str]], folder: Path) -> list[list[str]]:
    """Events that are not the opening of one of the folder's own files, or of what is open."""
    local = str(folder.resolve())
    return [
        [event, label]
        for event, label in seen
        if not (event == "open" and (label.startswith(local) or label.isdigit()))
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_only_the_folders_own_files(format: str, models: dict[str, Path], tmp_path: Path) -> None:
    second = shutil.copytree(models[format], tmp_path / "other")
    seen = audit(second, models[format])
    assert any(event == "open" for event, _ in seen)
    assert strange(seen, models[format]) == []


def test_an_adapter_opens_the_base_that_it_names(models: dict[str, Path], tmp_path: Path) -> None:
    base = shutil.copytree(models["hf"], tmp_path / "base")
    folder = write_adapter(tmp_path / "lora", base)
    opened = strange(audit(models["adapter"], folder), folder)
    assert opened and strange(opened, base) == []


def test_the_hook_sees_a_file_from_elsewhere(models: dict[str, Path], tmp_path: Path) -> None:
    """The control: a configuration that lies elsewhere, which the user may pass, shows up."""
    second = shutil.copytree(models["hf"], tmp_path / "other")
    elsewhere = shutil.copy(models["hf"] / "config.json", tmp_path / "config.json")
    seen = audit(second, models["hf"], config=str(elsewhere))
    assert ["open", str(elsewhere)] in strange(seen, models["hf"])
