"""What a call of PopTorch's models does, as plain functions that `--patch` writes into the script.

    model = functools.partial(call_training, net, optimizer=optimizer, iterations=4)
    output, loss = model(data, labels)

They are meant to be read, copied and changed, so they use torch only and nothing else of this
package; results are those of `trainingModel` and `inferenceModel`. The source text of a function
here is copied as it is.
"""

from typing import Any

import torch


def train_once(
    model: torch.nn.Module, *inputs: Any, optimizer: torch.optim.Optimizer, **named: Any
) -> Any:
    """Take one optimizer step on one batch; returns the model's outputs."""
    optimizer.zero_grad()
    result = model(*inputs, **named)
    _find_loss(result).backward()
    optimizer.step()
    return _detached(result)


def infer_once(model: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
    """Run the model on one batch."""
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
    """Train on `iterations * accumulation * replicas` micro batches, concatenated in the inputs.

    After each `accumulation * replicas` of them the optimizer takes one step, with the mean of
    their gradients or the sum. `outputs` chooses which results are returned; see `_joined`.
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
    """Run the model on `iterations * replicas` batches, concatenated in the inputs."""
    with torch.no_grad():
        parts = _split((inputs, named), iterations * replicas)
        results = [model(*positional, **keywords) for positional, keywords in parts]
    return _joined(results, outputs, every, replicas)


def _split(value: Any, count: int) -> list[Any]:
    """Split every tensor into `count` parts along its first dimension; repeat other values."""
    if count == 1:
        return [value]
    if isinstance(value, torch.Tensor) and value.dim():
        if len(value) % count:
            raise ValueError(f"a batch of {len(value)} cannot be divided by {count}")
        return list(value.split(len(value) // count))
    if isinstance(value, (tuple, list)):
        parts = zip(*(_split(item, count) for item in value), strict=True)
        return [type(value)(part) for part in parts] if value else [value] * count
    if isinstance(value, dict):
        split = {name: _split(item, count) for name, item in value.items()}
        return [{name: items[i] for name, items in split.items()} for i in range(count)]
    return [value] * count


def _find_loss(result: Any) -> torch.Tensor:
    """The only scalar among a model's results that was computed from its weights."""
    tensors = _tensors_in(result)
    losses = [tensor for tensor in tensors if tensor.requires_grad and tensor.dim() == 0]
    if len(losses) != 1:
        raise ValueError(f"the model returns {len(losses)} losses; let it return one")
    return losses[0]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    inner = inner if isinstance(value, (tuple, list, dict)) else ()
    return [tensor for item in inner for tensor in _tensors_in(item)]


def _detached(result: Any) -> Any:
    """A result without its autograd history."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, (tuple, list)):
        return type(result)(_detached(item) for item in result)
    if isinstance(result, dict):
        return {name: _detached(item) for name, item in result.items()}
    return result


def _joined(results: list[Any], outputs: str, every: int, replicas: int) -> Any:
    """The results of a call: "all", the "final" one or the "sum" per replica, or "every" nth."""
    steps = [results[i : i + replicas] for i in range(0, len(results), replicas)]
    if outputs == "final":
        chosen = steps[-1]
    elif outputs == "sum":
        chosen = [_concatenated(of_replica, add=True) for of_replica in zip(*steps, strict=True)]
    else:
        period = every if outputs == "every" else 1
        chosen = [result for step in steps[period - 1 :: period] for result in step]
    return _concatenated(chosen)


def _concatenated(results: Any, add: bool = False) -> Any:
    """Concatenate tensors and stack scalars to a vector; or add all up."""
    first = results[0]
    if len(results) == 1 or not isinstance(first, (torch.Tensor, tuple, list, dict)):
        return results[-1]
    if isinstance(first, dict):
        return {name: _concatenated([result[name] for result in results], add) for name in first}
    if not isinstance(first, torch.Tensor):
        return type(first)(_concatenated(column, add) for column in zip(*results, strict=True))
    if add:
        return sum(results[1:], first)
    return torch.cat(list(results)) if first.dim() else torch.stack(list(results))
