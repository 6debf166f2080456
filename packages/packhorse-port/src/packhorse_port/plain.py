"""What a call of PopTorch's models does, as plain functions: `--patch` writes them into the script.

    model = functools.partial(call_training, net, optimizer=optimizer, iterations=4)
    output, loss = model(data, labels)

They are written to be read, copied and changed, so they use torch alone and know nothing of the
rest of this package; the numbers are those of `trainingModel` and `inferenceModel`. The text of a
function here is the text that is written.
"""

from typing import Any

import torch


def train_once(
    model: torch.nn.Module, *inputs: Any, optimizer: torch.optim.Optimizer, **named: Any
) -> Any:
    """One step of the optimizer on one batch; what the model returned."""
    optimizer.zero_grad()
    result = model(*inputs, **named)
    _find_loss(result).backward()
    optimizer.step()
    return _detached(result)


def infer_once(model: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
    """What the model returns for one batch."""
    with torch.no_grad():
        return model(*inputs, **named)


def call_training(
    model: torch.nn.Module,
    *inputs: Any,
    optimizer: torch.optim.Optimizer,
    iterations: int = 1,
    accumulation: int = 1,
    replicas: int = 1,
    mean: bool = True,
    outputs: str = "final",
    every: int = 1,
    **named: Any,
) -> Any:
    """Train on `iterations` times `accumulation` times `replicas` micro batches, laid end to end.

    After each `accumulation * replicas` of them the optimizer makes one step, with the mean of
    their gradients or the sum. Which results come back is said by `outputs`; see `_joined`.
    """
    micro_batches = accumulation * replicas
    parts = iter(_split((inputs, named), iterations * micro_batches))
    results = []
    for _ in range(iterations):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            positional, keywords = next(parts)
            result = model(*positional, **keywords)
            loss = _find_loss(result)
            (loss / micro_batches if mean else loss).backward()
            results.append(_detached(result))
        optimizer.step()
    return _joined(results, outputs, every, replicas)


def call_inference(
    model: torch.nn.Module,
    *inputs: Any,
    iterations: int = 1,
    replicas: int = 1,
    outputs: str = "all",
    every: int = 1,
    **named: Any,
) -> Any:
    """Run the model on `iterations` times `replicas` batches, laid end to end."""
    with torch.no_grad():
        parts = _split((inputs, named), iterations * replicas)
        results = [model(*positional, **keywords) for positional, keywords in parts]
    return _joined(results, outputs, every, replicas)


def _split(value: Any, count: int) -> list[Any]:
    """`count` equal parts of every tensor, along its first dimension; other values in each."""
    if count == 1:
        return [value]
    if isinstance(value, torch.Tensor) and value.dim():
        if len(value) % count:
            raise ValueError(f"a batch of {len(value)} cannot be divided by {count}")
        return list(value.split(len(value) // count))
    if isinstance(value, (tuple, list)):
        parts = zip(*(_split(each, count) for each in value), strict=True)
        return [type(value)(part) for part in parts] if value else [value] * count
    if isinstance(value, dict):
        parts = {name: _split(each, count) for name, each in value.items()}
        return [{name: each[i] for name, each in parts.items()} for i in range(count)]
    return [value] * count


def _find_loss(result: Any) -> torch.Tensor:
    """The one number among a model's results that was computed from its weights."""
    found = [each for each in _tensors_in(result) if each.requires_grad and each.dim() == 0]
    if len(found) != 1:
        raise ValueError(f"the model returns {len(found)} losses; let it return one")
    return found[0]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    inner = inner if isinstance(value, (tuple, list, dict)) else ()
    return [tensor for each in inner for tensor in _tensors_in(each)]


def _detached(result: Any) -> Any:
    """A result without the memory of how it was computed."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, (tuple, list)):
        return type(result)(_detached(each) for each in result)
    if isinstance(result, dict):
        return {name: _detached(each) for name, each in result.items()}
    return result


def _joined(results: list[Any], outputs: str, every: int, replicas: int) -> Any:
    """The results of a call: "all", "final" of each replica, "sum" over each, or "every" nth."""
    steps = [results[i : i + replicas] for i in range(0, len(results), replicas)]
    if outputs == "final":
        chosen = steps[-1]
    elif outputs == "sum":
        chosen = [_concatenated(of_replica, add=True) for of_replica in zip(*steps, strict=True)]
    else:
        period = every if outputs == "every" else 1
        chosen = [each for step in steps[period - 1 :: period] for each in step]
    return _concatenated(chosen)


def _concatenated(results: Any, add: bool = False) -> Any:
    """Tensors end to end, numbers as a vector; or all added up."""
    first = results[0]
    if len(results) == 1 or not isinstance(first, (torch.Tensor, tuple, list, dict)):
        return results[-1]
    if isinstance(first, dict):
        return {name: _concatenated([each[name] for each in results], add) for name in first}
    if not isinstance(first, torch.Tensor):
        return type(first)(_concatenated(each, add) for each in zip(*results, strict=True))
    if add:
        return sum(results[1:], first)
    return torch.cat(list(results)) if first.dim() else torch.stack(list(results))
