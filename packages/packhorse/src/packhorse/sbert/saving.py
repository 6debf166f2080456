"""Write a model as a folder with the settings that were changed, and upload it to the hub.

Weights never change here, so they are copied from the folder they came from; those of another
format become safetensors first. The files around them are those that sentence-transformers reads,
all releases from 2 to 6.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packhorse import checkpoint
from packhorse.checkpoint import files, hf, sentence
from packhorse.checkpoint.hub import PATTERNS
from packhorse.runtime.encoder import Encoder
from packhorse.tokens.tokenizer import Tokenizer

TRANSFORMER = "sentence_transformers.models.Transformer"
RANKER = {"transformer_task": "sequence-classification", "module_output_name": "scores"}


def save(
    folder: Path,
    *,
    source: Path,
    encoder: Encoder,
    settings: dict[str, Any],
    max_length: int | None,
    tokenizer: Tokenizer | None,
    include_prompt: bool | None,
    card: tuple[str, str] | None,
) -> None:
    """Write the folder; files of the same name that are there already are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary:
        origin = source
        if not source.is_dir() or hf.format_of(_transformer(source)) != "safetensors":
            origin = Path(temporary) / "model"
            checkpoint.write(origin, checkpoint.load(source))
        if origin.resolve() != folder.resolve():
            _copy(origin, folder)
    transformer = _transformer(folder)
    if "classify" in encoder.heads and not files.exists(folder, sentence.MODULES):
        module = {"idx": 0, "name": "0", "path": "", "type": TRANSFORMER}
        files.write_json(folder, sentence.MODULES, [module])
        files.write_json(folder, sentence.TRANSFORMER_SETTINGS[0], RANKER)
    elif encoder.embedder is not None and not files.exists(folder, sentence.MODULES):
        layout = sentence.SentenceLayout(folder, folder, settings=settings)
        width = encoder.width // len(encoder.embedder.pooling)
        sentence.write(folder, layout, encoder.embedder, width, encoder.max_length)
    files.write_json(folder, sentence.SETTINGS, settings)
    if max_length is not None:
        _update(transformer, "tokenizer_config.json", {"model_max_length": max_length})
        if "embed" in encoder.heads:
            _update(transformer, sentence.TRANSFORMER_SETTINGS[0], {"max_seq_length": max_length})
    if include_prompt is not None:
        for pooling in folder.glob("*_Pooling"):
            _update(pooling, "config.json", {"include_prompt": include_prompt})
    if tokenizer is not None:
        library = tokenizer.copy_library()
        (transformer / "tokenizer.json").write_text(library.to_str(), "utf-8")
    _cast(transformer, encoder)
    if card is not None and not (folder / "README.md").exists():
        (folder / "README.md").write_text(_card(*card), "utf-8")


def _transformer(folder: Path) -> Path:
    layout = sentence.read(folder)
    return layout.transformer if layout else folder


def _copy(source: Path, target: Path) -> None:
    """Copy what the hub would send, and a README; the links of the hub's cache become files."""
    for pattern in [*PATTERNS, "README.md"]:
        for path in source.glob(pattern):
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def _update(folder: Path, name: str, changes: dict[str, Any]) -> None:
    files.write_json(folder, name, files.read_object(folder, name, optional=True) | changes)


def _cast(folder: Path, encoder: Encoder) -> None:
    """Give the weights the encoder's number format, if they have another."""
    contents = hf.read(folder)
    floating = {t.dtype for t in contents.tensors.values() if t.is_floating_point()}
    if floating == {encoder.dtype}:
        return
    cast = {
        name: tensor.to(encoder.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in contents.tensors.items()
    }
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    hf.write_tensors(folder / hf.WEIGHTS, cast)
    _update(folder, hf.CONFIG, {"dtype": str(encoder.dtype).removeprefix("torch.")})


def _card(name: str, kind: str) -> str:
    return (
        f"# {name}\n\n```python\nimport packhorse\n\n"
        f'model = packhorse.{kind}("{name}")\n```\n\n'
        f"It is a {kind} of sentence-transformers too.\n"
    )


def push(
    save_to: Callable[..., None],
    repository: str,
    *,
    token: str | None,
    private: bool | None,
    message: str | None,
    folder: str | None,
    exist_ok: bool,
    revision: str | None,
    create_pr: bool,
) -> str:
    """Upload a model to the hub; return the address of the commit, or of the discussion."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    created = api.create_repo(
        repo_id=repository,
        private=private,
        repo_type=None,
        exist_ok=exist_ok or revision is not None,
    )
    repository = created.repo_id
    if revision is not None:
        api.create_branch(repo_id=repository, branch=revision, exist_ok=True)
    with TemporaryDirectory() as temporary:
        if folder is None:
            save_to(temporary, model_name=repository)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder or temporary,
            commit_message=message or "Add a model",
            revision=revision,
            create_pr=create_pr,
        )
    return commit.pr_url or commit.commit_url if create_pr else commit.commit_url
