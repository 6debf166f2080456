"""A saved executor: one safetensors file with a JSON header. Nothing is pickled.

PopTorch pickles the module and appends machine code. Here a file describes what the step was built
for (input shapes, options), and with `export_model` contains the weights, the optimizer's state and
the *names* of both classes. A class is looked up among those that the running script has imported;
it is never imported or unpickled, so opening a file runs no code of the file's choosing. Compiled
code is not in the file: it comes from the user's own cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten, treespec_dumps, treespec_loads

from packhorse.atomic import new_file
from packhorse.errors import CheckpointError, InputError

HEADER_KEY = "packhorse.port"
FORMAT = 1
DEFAULT_NAME = "model.poptorch"  # if the path is a folder


@dataclass(frozen=True)
class SavedExecutor:
    """The contents of a file."""

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]


def shapes(leaves: Sequence[Any]) -> list[dict[str, Any]]:
    """Shapes and dtypes of inputs, as plain values for JSON."""
    return [
        {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        if isinstance(x, Tensor)
        else {"value": x if isinstance(x, bool | int | float | str | None) else str(x)}
        for x in leaves
    ]


def described(leaves: list[dict[str, Any]], spec: TreeSpec) -> dict[str, Any]:
    """Inputs for the header: `shapes`, and how they were nested."""
    try:
        return {"leaves": leaves, "spec": treespec_dumps(spec)}
    except (TypeError, NotImplementedError) as error:
        raise InputError(
            "inputs of a class of your own cannot be saved; pass tensors, or tuples, lists and"
            " dictionaries of them"
        ) from error


def examples(executor_file: SavedExecutor, device: torch.device) -> Any:
    """Zeros of the shapes that a step was built for."""
    inputs = executor_file.header["inputs"]
    leaves = [
        leaf["value"]
        if "value" in leaf
        else torch.zeros(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device=device)
        for leaf in inputs["leaves"]
    ]
    return tree_unflatten(leaves, treespec_loads(inputs["spec"]))


def write(
    filename: str | PathLike[str],
    header: dict[str, Any],
    rng: list[Any] | None,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Write the file atomically; `header` has "training", "options" and "inputs" (`shapes`)."""
    from safetensors.torch import save

    path = Path(filename)
    path = path / DEFAULT_NAME if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    model_class = None if model is None else _class_name(model)
    header = {**header, "format": FORMAT, "model": model_class}
    tensors: dict[str, Tensor] = {}
    if rng is not None:
        header["seed"] = rng[0]
        tensors["rng"] = rng[1]
    if model is not None:
        header |= {"looks": _fingerprint(model), "mode": model.training}
        tensors |= {f"model.{name}": value for name, value in model.state_dict().items()}
        if optimizer is not None:
            header["optimizer"] = _describe_optimizer(optimizer, model, tensors)
    contents = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with new_file(path) as file:
        file.write(save(contents, {HEADER_KEY: json.dumps(header)}))


def _describe_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Settings by group and state by weight; the state's tensors are added to `tensors`."""
    names = {id(p): name for name, p in model.named_parameters()}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        for key, value in state.items() if name else ():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}|{key}"] = value
            elif isinstance(value, bool | int | float | None):
                plain.setdefault(str(name), {})[key] = value
    groups = [
        {
            "params": [names[id(p)] for p in group["params"] if id(p) in names],
            **{key: value for key, value in group.items() if _is_json(value) and key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return {"class": _class_name(optimizer), "groups": groups, "state": plain}


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return isinstance(value, bool | int | float | str | None)


def read(filename: str | PathLike[str]) -> SavedExecutor:
    """Open a file that `write` wrote."""
    from safetensors import SafetensorError, safe_open

    path = Path(filename)
    path = path / DEFAULT_NAME if path.is_dir() else path
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(HEADER_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(text) if text else {}
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; save one with model.save(…)") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an executor that was saved here ({error}). One that PopTorch wrote"
            " holds pickles and IPU code: save the weights with torch.save there, load them with"
            " model.load_state_dict here"
        ) from error
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by model.save(…), or by a newer version")
    return SavedExecutor(path, header, tensors)


def check(executor_file: SavedExecutor, training: bool, options: dict[str, Any]) -> None:
    """Raise if a file was saved for a different kind of step."""
    if executor_file.header["training"] != training:
        kinds = ("an inferenceModel", "a trainingModel")
        raise InputError(
            f"{executor_file.path} was saved by {kinds[executor_file.header['training']]}; load it"
            " into one"
        )
    names = ("device_iterations", "replication_factor", "gradient_accumulation")
    for name in names:
        expected = executor_file.header["options"][name]
        if expected != options[name]:
            raise InputError(
                f"{executor_file.path} was saved with {name} {expected} and these options say"
                f" {options[name]}; give the model the same options"
            )


def rebuild(executor_file: SavedExecutor) -> nn.Module:
    """The module with the saved weights; its class must be imported and need no arguments."""
    name = executor_file.header["model"]
    if name is None:
        raise InputError(
            f"{executor_file.path} was saved with export_model=False; build the model and call"
            " poptorch.inferenceModel(model, opts).loadExecutable(file)"
        )
    kind = _find_class(name, nn.Module, executor_file)
    try:
        model = kind()
        if _fingerprint(model) != executor_file.header["looks"]:
            raise TypeError("it was built with arguments")
        state = {
            name.removeprefix("model."): tensor
            for name, tensor in executor_file.tensors.items()
            if name.startswith("model.")
        }
        _load(model, state)
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be rebuilt from {executor_file.path}"
            f" ({str(error).partition(chr(10))[0]}); build the model yourself, load its weights,"
            " and call poptorch.inferenceModel(model, opts).loadExecutable(file)"
        ) from error
    return model.train(executor_file.header["mode"])


def _load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load weights in the dtypes they were saved in: a model may be halved after it is built."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in state:
            tensor.data = tensor.data.to(state[name].dtype)
    model.load_state_dict(state)


def rebuild_optimizer(
    executor_file: SavedExecutor, model: nn.Module
) -> torch.optim.Optimizer | None:
    """The optimizer with its saved state; None for inference."""
    description = executor_file.header.get("optimizer")
    if description is None:
        return None
    weights = dict(model.named_parameters())
    groups = [
        {**g, "params": [weights[name] for name in g["params"]]} for g in description["groups"]
    ]
    for group in groups:
        group |= {key: tuple(v) for key, v in group.items() if key == "betas"}
    optimizer = _find_class(description["class"], torch.optim.Optimizer, executor_file)(
        groups, lr=groups[0]["lr"]
    )
    for name, state in description["state"].items():
        optimizer.state[weights[name]].update(state)
    for path, value in executor_file.tensors.items():
        if path.startswith("optimizer."):
            name, _, key = path.removeprefix("optimizer.").rpartition("|")
            optimizer.state[weights[name]][key] = value
    return optimizer


def _fingerprint(model: nn.Module) -> str:
    """Modules with their plain attributes: a model built with other arguments has another one."""
    plain = [
        {n: v for n, v in vars(m).items() if isinstance(v, bool | int | float | str | None)}
        for m in model.modules()
    ]
    for values in plain:
        values.pop("training", None)
    return repr((repr(model), plain))


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _find_class(name: str, kind: type, executor_file: SavedExecutor) -> Any:
    """A class of a module that is already imported."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    if not (isinstance(value, type) and issubclass(value, kind)):
        raise InputError(
            f"{executor_file.path} was saved for {name}, which this script has not defined or"
            f" imported; write `from {module} import {path}` above poptorch.load"
        )
    return value
