"""An optimizer's state by the names of parameters: tensors for a file, and how they come back.

torch numbers parameters in the order they were handed over; a name says the same without counting
on that order, and lets an error say which one does not fit. Sharded state (ZeRO-1 as torch has it)
is gathered to rank 0 first, so a file never depends on how many ranks there were.

Options are those set now, not those of the file: a run that goes on with another weight decay means
it, and is told. Only the learning rate comes back, which a schedule may have changed. So parameters
may be grouped otherwise than they were: state belongs to a parameter, not to its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from packhorse import dist
from packhorse.errors import CheckpointError, InputError

RATES = ("lr", "initial_lr")

Told = Mapping[str, Any]  # the optimizer's kind and its groups, or of one group options and names


def consolidate(optimizer: Any) -> None:
    """Bring sharded state to rank 0; every rank calls it before rank 0 saves.

    As torch's own `consolidate_state_dict`, which pickles what the ranks send each other.
    """
    if is_sharded(optimizer):
        optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
        local = optimizer.optim.state_dict()
        message = dist.encode({**local, "state": list(local["state"].items())})
        # The group that the optimizer was divided over, whatever the environment says.
        team = dist.Team(distributed.get_rank(), distributed.get_world_size())
        shares = [dist.decode(share) for share in team.collect(message)]
        optimizer._all_state_dicts = [{**share, "state": dict(share["state"])} for share in shares]


def is_sharded(optimizer: Optimizer) -> bool:
    """Is it torch's ZeroRedundancyOptimizer, which wraps another?"""
    return hasattr(optimizer, "consolidate_state_dict")


def dismantle(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors called PARAMETER.KIND, and what is to be known beside them, for JSON."""
    names, state = _names(model, optimizer), optimizer.state_dict()
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
    tensors: Mapping[str, Tensor], told: Told, optimizer: Optimizer, model: nn.Module
) -> tuple[dict[str, Any], list[str]]:
    """A state dictionary for this optimizer, and notes of options that were others.

    Refused where the kind of optimizer (LAMB without its trust ratio is AdamW), the parameters it
    trains or their shapes are others.
    """
    names = _names(model, optimizer)
    _check(told, optimizer, names)
    numbers = {name: number for number, name in enumerate(names)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[int, dict[str, Tensor]] = {}
    for place, tensor in tensors.items():
        name, _, kind = place.rpartition(".")
        if name not in numbers or (tensor.ndim and tensor.shape != shapes[name]):
            raise CheckpointError(f"{place} {list(tensor.shape)} fits no parameter of the model")
        state.setdefault(numbers[name], {})[kind] = tensor
    groups, first = [], 0
    pairs = _paired(told, optimizer, names)
    for then, now in pairs:
        members = list(range(first, first + len(now["params"])))
        rates = {key: then[key] for key in RATES if key in then}
        groups.append({**_options(now), **rates, "params": members})
        first += len(members)
    return {"state": state, "param_groups": groups}, _changes(pairs)


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Go on from what `assemble` made."""
    optimizer.load_state_dict(state)
    if is_sharded(optimizer):
        optimizer.state.clear()  # the wrapper's own copy, which it never reads


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The optimizer's parameters in the order in which its state numbers them."""
    called = {parameter: name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter in called for parameter in held):
        raise InputError("the optimizer holds parameters that are not the model's; make it anew")
    return [called[parameter] for parameter in held]


def _kind(optimizer: Optimizer) -> str:
    return type(getattr(optimizer, "optim", optimizer)).__name__  # the one inside ZeRO's


def _called(kind: str, groups: Sequence[Mapping[str, Any]]) -> str:
    plain = kind == "LAMB" and not any(group.get("adapt", True) for group in groups)
    return "LAMB without its trust ratio (AdamW)" if plain else kind


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _check(told: Told, optimizer: Optimizer, names: list[str]) -> None:
    groups, ours = told["groups"], optimizer.param_groups
    then, now = _called(told["kind"], groups), _called(_kind(optimizer), ours)
    if then != now:
        raise InputError(
            f"it holds the state of {then}, not of {now}; go on with the same optimizer"
        )
    if other := sorted(set(names) ^ {name for group in groups for name in group["params"]}):
        how = "is trained now and was not" if other[0] in names else "was trained and is not now"
        raise InputError(
            f"{other[0]} {how} (one of {len(other)}); train the same parameters, or start a new "
            "run from its model"
        )


def _paired(told: Told, optimizer: Optimizer, names: list[str]) -> list[tuple[Told, Told]]:
    """Each group of now behind the one that its parameters were in; an empty one behind itself."""
    before = {name: group for group in told["groups"] for name in group["params"]}
    remaining = iter(names)
    pairs = []
    for now in optimizer.param_groups:
        members = [next(remaining) for _ in now["params"]]
        pairs.append((before[members[0]] if members else now, now))
    return pairs


def _changes(pairs: Sequence[tuple[Told, Told]]) -> list[str]:
    """Of every group, the options that are set otherwise than they were."""
    found = []
    for then, now in pairs:
        # Before there was this option, all that a parameter holds had one ratio.
        ratios, had = now.get("stacked", 1), then.get("stacked", 1)
        if ratios != had:
            found.append(
                f"LAMB has {ratios} trust ratios for query, key and value now, and had {had}; "
                f"split_qkv = {'false' if had == 1 else 'true'} goes on as before"
            )
        found += [
            f"{key} is {_plain(now[key])} now, and was {value}"
            for key, value in _options(then).items()
            if key not in (*RATES, "stacked") and key in now and _plain(now[key]) != _plain(value)
        ]
    return list(dict.fromkeys(found))


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
