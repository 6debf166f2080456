"""Open models with ONNX Runtime: torch's number of threads, CUDA if present, our errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime
import torch

from packhorse.errors import CheckpointError, InputError

FATAL = 4  # log level; below it the log on stderr repeats the text of exceptions
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def open_session(
    model: Path | bytes,
    *,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    plain: bool = False,
) -> onnxruntime.InferenceSession:
    """Open a session; a model passed as bytes has its external data in `folder`.

    plain: run the graph as it is written, with nothing fused.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = torch.get_num_threads()
    if folder is not None:
        options.add_session_config_entry(EXTERNAL_FOLDER, str(folder))
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = _providers(torch.device(device))
    name, source = ("it", model) if isinstance(model, bytes) else (model, str(model))
    with runtime_errors(f"{name} does not open in ONNX Runtime"):
        return onnxruntime.InferenceSession(source, options, providers=providers)


def _providers(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    if not serves(device):
        names = ", ".join(available())
        raise InputError(
            f"this ONNX Runtime has no provider for {device} (it has: {names}); use the CPU, or "
            "install onnxruntime-gpu"
        )
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def serves(device: torch.device) -> bool:
    """Does the installed ONNX Runtime run on this device?"""
    return device.type == "cpu" or (
        device.type == "cuda" and "CUDAExecutionProvider" in available()
    )


def available() -> list[str]:
    """The providers of the installed ONNX Runtime."""
    return onnxruntime.get_available_providers()


@contextmanager
def runtime_errors(summary: str) -> Iterator[None]:
    """Raise ONNX Runtime's exceptions, which have no common base class, as a CheckpointError."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{summary}: {text[:400]}") from error
