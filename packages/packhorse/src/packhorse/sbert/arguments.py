"""What the constructors of the three classes have in common: arguments, and the files they name.

An argument without a meaning here, such as an attention implementation of transformers, is accepted
and logged once as ignored, so that users need to change nothing but an import.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from packhorse import device as devices
from packhorse.checkpoint import hub
from packhorse.errors import CheckpointError, InputError, PackhorseError
from packhorse.runtime.sentences import SIMILARITIES
from packhorse.sbert.acceleration import accelerate

logger = logging.getLogger(__name__)

DTYPES = ("dtype", "torch_dtype")
LOGGED: set[str] = set()  # names of the arguments that are in the log


def log_ignored(name: str, reason: str) -> None:
    """Log, once per process, that an argument is ignored."""
    if name not in LOGGED:
        LOGGED.add(name)
        logger.warning("%s is ignored: %s", name, reason)


def library_class(kind: str) -> Any:
    """Return sentence-transformers' own class of this name."""
    try:
        import sentence_transformers
    except ImportError as error:
        raise InputError(
            "modules= takes modules of sentence-transformers, which is not installed"
        ) from error
    return getattr(sentence_transformers, kind)


def of_modules(kind: str, modules: Any, options: Mapping[str, Any]) -> Any:
    """Return the library's own model of these modules, accelerated if it can be."""
    model = library_class(kind)(modules=modules, **options)
    try:
        return accelerate(model)
    except PackhorseError as error:
        logger.warning("the model of these modules is not accelerated: %s", error)
        return model


def locate(
    name: str | None,
    *,
    organization: str | None,
    revision: str | None,
    cache_folder: str | None,
    token: bool | str | None,
    local_files_only: bool,
) -> Path:
    """Return the folder of a model, downloaded if necessary; a file or a prefix stays as it is."""
    if not name:
        raise InputError("no model was named; pass a folder or a hub id such as org/name")
    options = {"cache_dir": cache_folder, "token": token, "local_files_only": local_files_only}
    source = str(name)
    is_path = Path(source).expanduser().exists()
    if not is_path and organization and "/" not in source:
        source = f"{organization}/{source}"
    if revision is not None and not is_path:
        source = f"{source}@{revision}"
    try:
        return hub.resolve(source, **{key: value for key, value in options.items() if value})
    except CheckpointError as error:
        # sentence-transformers raises an OSError for a name that is nowhere, and code catches it.
        raise ModelNotFoundError(str(error)) from error


class ModelNotFoundError(PackhorseError, OSError):
    """A model is neither a folder nor on the hub."""


def dtype_of(options: Mapping[str, Any], folder_dtype: Any, device: torch.device) -> torch.dtype:
    """Return the number format that `model_kwargs` ask for; by default float32, as there."""
    named = next((options[key] for key in DTYPES if options.get(key) is not None), None)
    if named is None:
        return torch.float32
    if named == "auto":
        named = folder_dtype or "float32"
    name = str(named).removeprefix("torch.")  # transformers says "float16", and we "fp16"
    return devices.parse_dtype(getattr(torch, name, name))


def log_ignored_options(
    backend: str,
    model_kwargs: Mapping[str, Any],
    processor_kwargs: Mapping[str, Any],
    config_kwargs: Mapping[str, Any],
    trust_remote_code: bool,
    processor_known: Sequence[str],
) -> None:
    """Log each option that belongs to transformers and has no effect here."""
    if backend != "torch":
        log_ignored(f"backend={backend!r}", "Packhorse runs the model itself")
    if trust_remote_code:
        log_ignored("trust_remote_code", "no code from a model's folder ever runs")
    for group, options, known in (
        ("model_kwargs", model_kwargs, DTYPES),
        ("processor_kwargs", processor_kwargs, processor_known),
        ("config_kwargs", config_kwargs, ()),
    ):
        for name in options:
            if name not in known:
                log_ignored(f"{group}[{name!r}]", "it is an option of transformers")


def rename_argument(old_name: str, old_value: Any, name: str, value: Any) -> Any:
    """Return the value of an argument that has an older name too."""
    if old_value is None:
        return value
    tell_renamed(old_name, name)
    return old_value if value is None else value


def tell_renamed(old_name: str, name: str) -> None:
    """Log that an argument has another name today, which comes first."""
    logger.warning(
        "the `%s` argument was renamed and is now deprecated: write `%s`", old_name, name
    )


def similarity_name(value: Any) -> str:
    """Return the name of a similarity, which may be a name or sentence-transformers' enum."""
    name = getattr(value, "value", value)
    if name not in SIMILARITIES:
        raise InputError(
            f"similarity_fn_name is {name!r}; use one of {', '.join(SIMILARITIES)} (a vector per "
            "token, as of a MultiVectorEncoder, is compared by packhorse.load(…).rerank)"
        )
    return name
