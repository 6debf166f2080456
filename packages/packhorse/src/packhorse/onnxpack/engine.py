"""Open models with ONNX Runtime: threads as torch's, CUDA where it is there, errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime
import torch

from packhorse.errors import CheckpointError, InputError

QUIET = 4  # its log repeats on stderr what its exceptions say
BESIDE = "session.model_external_initializers_file_folder_path"


def open_session(
    model: Path | bytes,
    *,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    plain: bool = False,
) -> onnxruntime.InferenceSession:
    """A session; a model given as bytes finds its external data in `folder`.

    plain: run the graph as it is written, with nothing fused.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = QUIET
    options.intra_op_num_threads = torch.get_num_threads()
    if folder is not None:
        options.add_session_config_entry(BESIDE, str(folder))
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = _providers(torch.device(device))
    name, source = ("it", model) if isinstance(model, bytes) else (model, str(model))
    with blaming(f"{name} does not open in ONNX Runtime"):
        return onnxruntime.InferenceSession(source, options, providers=providers)


def _providers(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    if not serves(device):
        have = ", ".join(available())
        raise InputError(
            f"this ONNX Runtime has no provider for {device} (it has: {have}); use the CPU, or "
            "install onnxruntime-gpu"
        )
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def serves(device: torch.device) -> bool:
    """Does the ONNX Runtime that is installed run on it?"""
    return device.type == "cpu" or (
        device.type == "cuda" and "CUDAExecutionProvider" in available()
    )


def available() -> list[str]:
    """The providers of the ONNX Runtime that is installed."""
    return onnxruntime.get_available_providers()


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Its exceptions, which share no base of their own, as one error."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        raise CheckpointError(f"{what}: {said[:400]}") from error
