"""Float8 products by cuBLASLt, called directly for what torch does not pass on to it.

`torch._scaled_mm` is a call of this library too, but without its epilogues: GELU, float8 results of
a fixed scale, and a sum with another matrix. Each saves a pass over memory. Only functions that the
library documents are called, of the copy that torch itself has loaded; where it is not found, or
refuses, `obstacle` says so and the layers do without.

Its GELU is the tanh form (Hendrycks and Gimpel 2016).

Shapes: T tokens; N outputs and K inputs of a product.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

COMPUTE_32F = 68
TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
TRANS_A, EPILOGUE, BIAS_POINTER = 3, 7, 8
A_SCALE, B_SCALE, D_SCALE = 17, 18, 20
FAST_ACCUM, BIAS_TYPE = 25, 26
BIAS, GELU_BIAS = 4, 36
MAX_WORKSPACE = 1
WORKSPACE = 32 << 20


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded; a name without a path finds the loaded copy."""
    major = (torch.version.cuda or "0").split(".")[0]
    library = ctypes.CDLL(f"libcublasLt.so.{major}")
    library.cublasLtMatmul.argtypes = [c_void_p] * 12 + [c_void_p, c_void_p, c_size_t, c_void_p]
    return library


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: {what} returned {status}")


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)), "create")
    return handle


@dataclass
class Product:
    """[T, K] float8 by a weight [N, K] float8: (+ residual) + bias, perhaps GELU; for one T."""

    descriptor: c_void_p
    layouts: list[c_void_p]
    algorithms: list[Any]
    workspace: Tensor
    out_dtype: torch.dtype
    outputs: int
    beta: float

    def __call__(
        self, x: Tensor, weight: Tensor, residual: Tensor | None = None, algorithm: int = 0
    ) -> Tensor:
        out = torch.empty(len(x), self.outputs, dtype=self.out_dtype, device=x.device)
        one, beta = c_float(1), c_float(self.beta)
        c = out if residual is None else residual
        a, b, c_layout, d = self.layouts
        status = _library().cublasLtMatmul(
            _handle(x.device.index or 0), self.descriptor, ctypes.addressof(one),
            weight.data_ptr(), a, x.data_ptr(), b, ctypes.addressof(beta), c.data_ptr(), c_layout,
            out.data_ptr(), d, ctypes.addressof(self.algorithms[algorithm].algorithm),
            self.workspace.data_ptr(), WORKSPACE, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        _check(status, "matmul")
        return out


def prepare(
    tokens: int,
    weight: Tensor,
    bias: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_steps: Tensor | None = None,
    gelu: bool = False,
    residual: bool = False,
    fast: bool = True,
    most: int = 8,
) -> Product:
    library = _library()
    outputs, inputs = weight.shape
    out_dtype = torch.bfloat16 if out_steps is None else torch.float8_e4m3fn
    descriptor = c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(descriptor), COMPUTE_32F, 0), "descriptor")

    def put(attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        status = library.cublasLtMatmulDescSetAttribute(
            descriptor, attribute, byref(value), c_size_t(size)
        )
        _check(status, f"attribute {attribute}")

    put(TRANS_A, c_int32(1))
    put(EPILOGUE, c_int32(GELU_BIAS if gelu else BIAS))
    put(BIAS_POINTER, c_void_p(bias.data_ptr()))
    put(BIAS_TYPE, c_int32(TYPES[bias.dtype]))
    put(A_SCALE, c_void_p(weight_scale.data_ptr()))
    put(B_SCALE, c_void_p(x_scale.data_ptr()))
    if out_steps is not None:
        put(D_SCALE, c_void_p(out_steps.data_ptr()))
    put(FAST_ACCUM, ctypes.c_int8(fast))

    def layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        result = c_void_p()
        status = library.cublasLtMatrixLayoutCreate(
            byref(result), TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        _check(status, "layout")
        return result

    e4m3 = torch.float8_e4m3fn
    layouts = [
        layout(e4m3, inputs, outputs),
        layout(e4m3, inputs, tokens),
        layout(torch.bfloat16, outputs, tokens),
        layout(out_dtype, outputs, tokens),
    ]
    preference = c_void_p()
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)), "preference")
    limit = c_size_t(WORKSPACE)
    _check(
        library.cublasLtMatmulPreferenceSetAttribute(
            preference, MAX_WORKSPACE, byref(limit), c_size_t(8)
        ),
        "workspace",
    )
    results = (_Heuristic * most)()
    found = c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(weight.device.index or 0), descriptor, *layouts, preference, most, results,
        byref(found),
    )  # fmt: skip
    _check(status, "heuristic")
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=weight.device)
    kept = [results[i] for i in range(found.value)]
    return Product(
        descriptor, layouts, kept, workspace, out_dtype, outputs, 1.0 if residual else 0.0
    )
