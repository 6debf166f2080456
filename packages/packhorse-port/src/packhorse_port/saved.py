"""A saved executor: one safetensors file whose header holds the rest as JSON. Nothing is pickled.

PopTorch pickles the module and appends machine code. Here a file says what the step was built for
(the inputs' shapes, the options), and with `export_model` holds the weights, the optimizer's
moments and the *names* of both classes. A class is looked up among those the running script has
imported and never imported or unpickled, so opening a file runs no code of the file's choosing.
Compiled code is not in it: it comes from the user's own cache, where the same step finds what the
first run left.
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

KEY, FORMAT = "packhorse.port", 1
NAME = "model.poptorch"  # in a folder


@dataclass(frozen=True)
class Saved:
    """What a file holds."""

    path: Path
    about: dict[str, Any]
    tensors: dict[str, Tensor]


def shapes(leaves: Sequence[Any], spec: TreeSpec) -> dict[str, Any]:
    """Inputs without their data, as JSON holds them."""
    described = [
        {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        if isinstance(x, Tensor)
        else {"value": x if isinstance(x, bool | int | float | str | None) else str(x)}
        for x in leaves
    ]
    return {"leaves": described, "spec": treespec_dumps(spec)}


def examples(found: Saved, device: torch.device) -> Any:
    """Inputs of zeros, of the shapes that a step was built for."""
    inputs = found.about["inputs"]
    leaves = [
        each["value"]
        if "value" in each
        else torch.zeros(each["shape"], dtype=getattr(torch, each["dtype"]), device=device)
        for each in inputs["leaves"]
    ]
    return tree_unflatten(leaves, treespec_loads(inputs["spec"]))


def write(
    filename: str | PathLike[str],
    about: dict[str, Any],
    rng: list[Any] | None,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """The file, whole or not at all; about: whether it trains, options, and inputs as `shapes`."""
    from safetensors.torch import save

    path = Path(filename)
    path = path / NAME if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {**about, "format": FORMAT, "model": None if model is None else _class(model)}
    tensors: dict[str, Tensor] = {}
    if rng is not None:
        about["seed"], tensors["rng"] = rng
    if model is not None:
        about |= {"looks": _looks(model), "mode": model.training}
        tensors |= {f"model.{name}": value for name, value in model.state_dict().items()}
        if optimizer is not None:
            about["optimizer"] = _optimizer(optimizer, model, tensors)
    whole = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with new_file(path) as file:
        file.write(save(whole, {KEY: json.dumps(about)}))


def _optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Its settings by group and its moments by weight; tensors go beside the weights."""
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
            **{key: value for key, value in group.items() if _json(value) and key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return {"class": _class(optimizer), "groups": groups, "state": plain}


def _json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_json, value))
    return isinstance(value, bool | int | float | str | None)


def read(filename: str | PathLike[str]) -> Saved:
    """Open a file that `write` made."""
    from safetensors import SafetensorError, safe_open

    path = Path(filename)
    path = path / NAME if path.is_dir() else path
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(text) if text else {}
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; save one with model.save(…)") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an executor that was saved here ({error}). One that PopTorch wrote"
            " holds pickles and IPU code: save the weights with torch.save there, load them with"
            " model.load_state_dict here"
        ) from error
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by model.save(…), or by a newer version")
    return Saved(path, about, tensors)


def check(found: Saved, training: bool, options: dict[str, Any]) -> None:
    """Refuse a file that was saved for another kind of step."""
    if found.about["training"] != training:
        kinds = ("an inferenceModel", "a trainingModel")
        raise InputError(
            f"{found.path} was saved by {kinds[found.about['training']]}; load it into one"
        )
    names = ("device_iterations", "replication_factor", "gradient_accumulation")
    for name in names:
        if found.about["options"][name] != options[name]:
            raise InputError(
                f"{found.path} was saved with {name} {found.about['options'][name]} and these"
                f" options say {options[name]}; give the model the same options"
            )


def rebuild(found: Saved) -> nn.Module:
    """The module, of a class that is imported and needs no arguments, with the saved weights."""
    name = found.about["model"]
    if name is None:
        raise InputError(
            f"{found.path} was saved with export_model=False; build the model and call"
            " poptorch.inferenceModel(model, opts).loadExecutable(file)"
        )
    kind = _find(name, nn.Module, found)
    try:
        model = kind()
        if _looks(model) != found.about["looks"]:
            raise TypeError("it was built with arguments")
        prefix = "model."
        _load(
            model,
            {n.removeprefix(prefix): t for n, t in found.tensors.items() if n.startswith(prefix)},
        )
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be made anew from {found.path} ({str(error).partition(chr(10))[0]});"
            " build the model yourself, load its weights, and call"
            " poptorch.inferenceModel(model, opts).loadExecutable(file)"
        ) from error
    return model.train(found.about["mode"])


def _load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """In the types they had: a model that was halved after it was built is half here too."""
    for name, own in [*model.named_parameters(), *model.named_buffers()]:
        if name in state:
            own.data = own.data.to(state[name].dtype)
    model.load_state_dict(state)


def rebuild_optimizer(found: Saved, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer with its moments; None for inference."""
    about = found.about.get("optimizer")
    if about is None:
        return None
    weights = dict(model.named_parameters())
    groups = [{**g, "params": [weights[name] for name in g["params"]]} for g in about["groups"]]
    for group in groups:
        group |= {key: tuple(v) for key, v in group.items() if key == "betas"}
    optimizer = _find(about["class"], torch.optim.Optimizer, found)(groups, lr=groups[0]["lr"])
    for name, state in about["state"].items():
        optimizer.state[weights[name]].update(state)
    for place, value in found.tensors.items():
        if place.startswith("optimizer."):
            name, _, key = place.removeprefix("optimizer.").rpartition("|")
            optimizer.state[weights[name]][key] = value
    return optimizer


def _looks(model: nn.Module) -> str:
    """Its modules with their sizes and rates, so that one built otherwise is not taken for it."""
    plain = [
        {n: v for n, v in vars(m).items() if isinstance(v, bool | int | float | str | None)}
        for m in model.modules()
    ]
    for values in plain:
        values.pop("training", None)
    return repr((repr(model), plain))


def _class(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _find(name: str, kind: type, found: Saved) -> Any:
    """A class among the modules that are imported already."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    if not (isinstance(value, type) and issubclass(value, kind)):
        raise InputError(
            f"{found.path} was saved for {name}, which this script has not defined or imported;"
            f" write `from {module} import {path}` above poptorch.load"
        )
    return value
