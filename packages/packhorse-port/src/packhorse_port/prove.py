"""`packhorse port --prove`: a script and its plain translation, run side by side for a few steps.

    proof = prove(Project.of(Path("train.py")), ["--epochs", "1"])
    proof.holds, proof.steps      # losses and the largest difference of the weights, by step

Each is run by a Python of its own, on the CPU and from the same seeds, and is ended after a few
optimizer steps. What it passed to `backward` and the weights after each step are recorded through
torch's own hooks, so that neither script has to be changed for it. The user's own modules are
translated when the plain script imports them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from packhorse.errors import PackhorseError
from packhorse_port.project import Project
from packhorse_port.script import STARTUP_FOLDER

STEPS = 3
RELATIVE = 1e-5
ABSOLUTE = 1e-6


class ProofFailed(PackhorseError):
    """A script and its translation differ, or one of them did not run."""

    exit_code = 1


class ProvenStep(NamedTuple):
    """One optimizer step: the loss of both scripts, and how far their weights are apart."""

    loss: float
    plain_loss: float
    weights: float
    equal: bool


class Proof(NamedTuple):
    """The steps that were compared."""

    steps: list[ProvenStep]

    @property
    def holds(self) -> bool:
        return bool(self.steps) and all(step.equal for step in self.steps)


def prove(project: Project, arguments: Sequence[str]) -> Proof:
    """Run a script and its translation; raises if one of them fails or trains nothing."""
    with tempfile.TemporaryDirectory() as folder:
        records = [_record(project, arguments, Path(folder), plain) for plain in (False, True)]
    return Proof([_compare(*pair) for pair in zip(*records, strict=True)])


def _record(
    project: Project, arguments: Sequence[str], folder: Path, plain: bool
) -> list[dict[str, Any]]:
    """The steps of one of the two, by another Python."""
    from packhorse.dist import decode
    from packhorse_port.patch import translate

    texts = {
        str(file.resolve()): translate(file.read_bytes(), file.name).text
        for file in project.files
        if plain and b"poptorch" in file.read_bytes()
    }
    job = folder / "job.json"
    out = folder / f"{'plain' if plain else 'ported'}.safetensors"
    job.write_text(json.dumps({"script": str(project.path.resolve()), "texts": texts}), "utf-8")
    own = str(Path(__file__).parents[1])
    path = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path if plain else [STARTUP_FOLDER, *path]),
        "PACKHORSE_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    code = "from packhorse_port.prove import record; record()"
    completed = subprocess.run(
        [sys.executable, "-c", code, str(job), str(out), *arguments],
        env=environment,
        capture_output=True,
    )
    if not out.exists():
        name = f"the plain {project.path.name}" if plain else project.path.name
        error = completed.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise ProofFailed(f"{name} did not get to its first optimizer step: {error[-1]}")
    return decode(out.read_bytes())


def _compare(ported: dict[str, Any], plain: dict[str, Any]) -> ProvenStep:
    import torch

    pairs = list(zip(ported["weights"], plain["weights"], strict=False))
    same_shapes = len(ported["weights"]) == len(plain["weights"]) and all(
        a.shape == b.shape for a, b in pairs
    )
    if not same_shapes:
        return ProvenStep(ported["loss"], plain["loss"], float("inf"), False)
    difference = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    first, second = torch.tensor([ported["loss"], plain["loss"]], dtype=torch.float64)
    equal = torch.allclose(first, second, RELATIVE, ABSOLUTE, equal_nan=True) and all(
        torch.allclose(a, b, RELATIVE, ABSOLUTE, equal_nan=True) for a, b in pairs
    )
    return ProvenStep(ported["loss"], plain["loss"], difference, equal)


# In the Python that runs one of the scripts


def record() -> None:
    """Run the script of a job until it has taken its steps, and write what they were."""
    import random

    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from packhorse.dist import encode

    _, job_file, out, *arguments = sys.argv
    job = json.loads(Path(job_file).read_text("utf-8"))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    steps: list[dict[str, Any]] = []
    losses: list[float] = []
    original = torch.Tensor.backward

    inside = False  # torch calls `Tensor.backward` again where a mode intercepts functions

    def backward(self: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        if not inside:
            scaled = self.detach() if gradient is None else self.detach() * gradient
            losses.append(float(scaled.sum()))
        before, inside = inside, True
        try:
            original(self, gradient, *args, **kwargs)
        finally:
            inside = before

    def after_step(optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        weights = [parameter.detach().cpu().float().clone() for parameter in parameters]
        steps.append({"loss": sum(losses), "weights": weights})
        losses.clear()
        Path(out).write_bytes(encode(steps))
        if len(steps) == STEPS:
            sys.stdout.flush()
            os._exit(0)  # whatever the script would still do

    torch.Tensor.backward = backward  # pyright: ignore[reportAttributeAccessIssue]
    register_optimizer_step_post_hook(after_step)
    _run(job["script"], job["texts"], arguments)


def _run(script: str, texts: dict[str, str], arguments: list[str]) -> None:
    """What `python SCRIPT` does, with other texts for some files."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    sys.meta_path.insert(0, TranslatedFinder(texts))
    text = texts.get(script) or Path(script).read_bytes()
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(text, script, "exec"), module.__dict__)


class TranslatedFinder:
    """Finds modules whose files have another text."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path)
        if spec is None or not spec.origin or os.path.realpath(spec.origin) not in self.texts:
            return None
        spec.loader = TranslatedLoader(name, spec.origin)
        spec.loader.text = self.texts[os.path.realpath(spec.origin)]
        return spec


class TranslatedLoader(SourceFileLoader):
    """Loads a module from a text that is not its file's."""

    text = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec")
