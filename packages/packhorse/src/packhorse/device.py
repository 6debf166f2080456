"""Choose the device and the dtype that a model runs in.

The choice is made once, when a model is loaded, and stays with it; nothing here has state.
`processor` knows the features of the CPU. A CPU that does not multiply bf16 computes it in fp32
(see `model.freeze`), so bf16 is never chosen there unless the user asks for it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

from packhorse.cache import keep_compiled_code_private
from packhorse.errors import InputError
from packhorse.processor import features

FLOAT8 = torch.float8_e4m3fn
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,  # of products; all else of such a model is fp32, see `model.int8`
    "float8": FLOAT8,  # likewise, see `model.float8_inference`
}


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """The device `name`, checked; by default `PACKHORSE_DEVICE`, the accelerator, or the CPU."""
    if name is None or str(name) == "auto":
        name = os.environ.get("PACKHORSE_DEVICE") or "auto"
    if str(name) == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; try cpu, cuda or cuda:1") from error
    if device.type != "cpu":
        _require(device)
    return device


def _require(device: torch.device) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        available = "only the CPU" if accelerator is None else f"{accelerator.type} and the CPU"
        raise InputError(f"device {device} is not available: torch sees {available} here")
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise InputError(f"device {device} does not exist: there are {count} (numbered from 0)")


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype of one of our short names."""
    short = dtype_name(name) if isinstance(name, torch.dtype) else name
    if short not in DTYPES:
        raise InputError(f"unknown dtype {short!r}; choose one of {', '.join(DTYPES)} or auto")
    return DTYPES[short]


def dtype_name(dtype: torch.dtype) -> str:
    """Our short name of a torch dtype."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def default_dtype(device: torch.device) -> torch.dtype:
    """fp32 on a CPU, bf16 on an accelerator that has it."""
    if device.type == "cpu" or not fast_bf16(device):
        return torch.float32
    return torch.bfloat16


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether only products are of this dtype: int8 and float8."""
    return dtype in (torch.int8, FLOAT8)


def float_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights and hidden states in a model of `dtype`; int8 is for products alone."""
    if not is_rounded(dtype):
        return dtype
    return torch.bfloat16 if float8_products(device) else torch.float32


def fast_bf16(device: torch.device) -> bool:
    """Does the device multiply bf16 matrices in hardware?"""
    if device.type == "cpu":
        return features().bf16
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return False


def fast_float8(device: torch.device) -> bool:
    """Does it multiply float8 matrices with a scale per row in hardware (Hopper or newer)?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def float8_products(device: torch.device) -> bool:
    """Does it multiply float8 matrices with a scale per tensor in hardware (Ada or newer)?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels do not run on a GPU, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed; it comes with torch for CUDA on Linux"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere (capability 8.0)"
    return _cache_problem()


@cache
def _cache_problem() -> str | None:
    """Why Triton has no folder to keep compiled kernels in, or None."""
    try:
        keep_compiled_code_private()
    except InputError as error:
        return str(error)
    return None


@cache  # asked at every launch
def runs_triton(device: torch.device) -> bool:
    """Do Triton's kernels run there (CUDA from Ampere on, with Triton installed)?"""
    return device.type == "cuda" and triton_obstacle(device) is None


def current(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one meanwhile: Triton and CUDA graphs launch there, wherever the
    tensors are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that time measured afterwards is right."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe(device: torch.device) -> str:
    """One line by which a person recognizes the device."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)
