"""An optimizer's state by parameter name: tensors for a file, and how they are loaded again.

torch numbers parameters in the order they were passed in. A name does not depend on that order, and
lets an error say which parameter does not fit. Sharded state (torch's ZeRO-1) is gathered on rank 0
first, so a file does not depend on the number of ranks.

Options such as weight decay are taken from the current settings, not from the file: a run that is
resumed with a different one means it, and gets a note. Only the learning rate is restored, which a
schedule may have changed. State belongs to a parameter, so parameters may be grouped differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from packhorse import dist
from packhorse.errors import CheckpointError, InputError

LEARNING_RATES = ("lr", "initial_lr")

# What a checkpoint's JSON says of an optimizer: its kind and its groups. Also one of these groups:
# its options, and the names of its parameters in "params".
Description = Mapping[str, Any]


def consolidate(optimizer: Any) -> None:
    """Gather sharded state on rank 0; every rank calls it before rank 0 saves.

    Like torch's own `consolidate_state_dict`, which however pickles what the ranks send.
    """
    if is_sharded(optimizer):
        optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
        local = optimizer.optim.state_dict()
        message = dist.encode({**local, "state": list(local["state"].items())})
        # The process group over which the optimizer is sharded, whatever the environment says.
        team = dist.Team(distributed.get_rank(), distributed.get_world_size())
        shares = [dist.decode(share) for share in team.collect(message)]
        optimizer._all_state_dicts = [{**share, "state": dict(share["state"])} for share in shares]


def is_sharded(optimizer: Optimizer) -> bool:
    """Is it torch's ZeroRedundancyOptimizer, which wraps another optimizer?"""
    return hasattr(optimizer, "consolidate_state_dict")


def dismantle(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as tensors named PARAMETER.KIND, and a description of the optimizer for JSON."""
    names = _parameter_names(model, optimizer)
    state = optimizer.state_dict()
    tensors = {
        f"{names[number]}.{kind}": tensor
        for number, kinds in state["state"].items()
        for kind, tensor in kinds.items()
    }
    groups = [
        {**_options(group), "params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    return tensors, {"kind": _kind(optimizer), "groups": groups}


def assemble(
    tensors: Mapping[str, Tensor], saved: Description, optimizer: Optimizer, model: nn.Module
) -> tuple[dict[str, Any], list[str]]:
    """A state dictionary for this optimizer, and notes about options that have changed.

    Raises if the kind of optimizer (LAMB without its trust ratio is AdamW), the set of trained
    parameters or their shapes differ.
    """
    names = _parameter_names(model, optimizer)
    _check(saved, optimizer, names)
    numbers = {name: number for number, name in enumerate(names)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if name not in numbers or (tensor.ndim and tensor.shape != shapes[name]):
            raise CheckpointError(f"{key} {list(tensor.shape)} fits no parameter of the model")
        state.setdefault(numbers[name], {})[kind] = tensor
    groups = []
    first = 0
    pairs = _matched_groups(saved, optimizer, names)
    for then, now in pairs:
        members = list(range(first, first + len(now["params"])))
        rates = {key: then[key] for key in LEARNING_RATES if key in then}
        groups.append({**_options(now), **rates, "params": members})
        first += len(members)
    return {"state": state, "param_groups": groups}, _changes(pairs)


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `assemble` returned."""
    optimizer.load_state_dict(state)
    if is_sharded(optimizer):
        optimizer.state.clear()  # a copy in the wrapper that it never reads


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order in which its state numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter in names for parameter in parameters):
        raise InputError("the optimizer holds parameters that are not the model's; create it again")
    return [names[parameter] for parameter in parameters]


def _kind(optimizer: Optimizer) -> str:
    return type(getattr(optimizer, "optim", optimizer)).__name__  # of the one inside ZeRO's


def _display_kind(kind: str, groups: Sequence[Mapping[str, Any]]) -> str:
    is_plain = kind == "LAMB" and not any(group.get("adapt", True) for group in groups)
    return "LAMB without its trust ratio (AdamW)" if is_plain else kind


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _check(saved: Description, optimizer: Optimizer, names: list[str]) -> None:
    groups = saved["groups"]
    then = _display_kind(saved["kind"], groups)
    now = _display_kind(_kind(optimizer), optimizer.param_groups)
    if then != now:
        raise InputError(
            f"it holds the state of {then}, not of {now}; resume with the same optimizer"
        )
    differing = sorted(set(names) ^ {name for group in groups for name in group["params"]})
    if differing:
        name = differing[0]
        change = "is trained now and was not" if name in names else "was trained and is not now"
        raise InputError(
            f"{name} {change} (one of {len(differing)}); train the same parameters, or start a "
            "new run from its model"
        )


def _matched_groups(
    saved: Description, optimizer: Optimizer, names: list[str]
) -> list[tuple[Description, Description]]:
    """Per current group, the saved group of its parameters; for an empty one, itself."""
    saved_group = {name: group for group in saved["groups"] for name in group["params"]}
    remaining = iter(names)
    pairs = []
    for now in optimizer.param_groups:
        members = [next(remaining) for _ in now["params"]]
        pairs.append((saved_group[members[0]] if members else now, now))
    return pairs


def _changes(pairs: Sequence[tuple[Description, Description]]) -> list[str]:
    """Notes about options that differ from the saved ones."""
    notes = []
    for then, now in pairs:
        # Checkpoints from before this option had one ratio for everything in a parameter.
        ratios_now = now.get("stacked", 1)
        ratios_then = then.get("stacked", 1)
        if ratios_now != ratios_then:
            notes.append(
                f"LAMB has {ratios_now} trust ratios for query, key and value now, and had "
                f"{ratios_then}; split_qkv = {'false' if ratios_then == 1 else 'true'} continues "
                "as before"
            )
        notes += [
            f"{key} is {_as_json(now[key])} now, and was {value}"
            for key, value in _options(then).items()
            if key not in (*LEARNING_RATES, "stacked")
            and key in now
            and _as_json(now[key]) != _as_json(value)
        ]
    return list(dict.fromkeys(notes))


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
