"""A training run so small that it can be killed a hundred times; and, as a program, killed.

    run = make(seed=1); train(run, 2); save(run, folder, step=2); same(run, other)

As a program, with disk_faults.c preloaded, it saves in children of its own, each of which is killed
at another call that changes the disk (or finds the disk full from there on), and prints as JSON
what the next process finds in the folder. Or it is two ranks. Children are forked, so that torch is
imported once.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from packhorse import attention
from packhorse.checkpoint import Checkpoint
from packhorse.checkpoint.safetensors import read_tensors
from packhorse.errors import CheckpointError
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.heads import Mlm, PooledLabels, Pooler
from packhorse.model.model import Model
from packhorse.optim import LAMB, parameter_groups
from packhorse.packing.batch import Packed
from packhorse.train import checkpoints, optimizer_state

CPU = torch.device("cpu")
KILL, FULL = 1, 2  # as in disk_faults.c
SAID, UNSAID = 3, 4  # what a child exits with: an error that names the cause, or any other


@dataclass(eq=False)
class Run:
    of: Checkpoint
    optimizer: torch.optim.Optimizer

    @property
    def model(self) -> Model:
        return self.of.model


def make(seed: int, kind: Any = LAMB, width: int = 16, **options: Any) -> Run:
    """A pretraining run before its first step, dropout on."""
    torch.manual_seed(seed)
    config = BertConfig(40, width, 2, 2, 24, max_positions=12, dropout=0.2)
    bert = Bert(config, attention.kernel("reference"))
    heads = {"mlm": Mlm(config, bert.embed.words), "nsp": PooledLabels(config, Pooler(config), 2)}
    model = Model(bert, heads).to(options.pop("dtype", torch.float32)).train()
    optimizer = kind(parameter_groups(model, 0.01), lr=0.05, **options)
    return Run(Checkpoint(config, model, None, "tiny", 12), optimizer)


def packed() -> Packed:
    lengths = (3, 7, 1)
    return Packed.build([SimpleNamespace(ids=[n] * n, types=[0] * n) for n in lengths])


def train(run: Run, steps: int) -> None:
    """Steps whose gradients depend on what dropout drops."""
    for _ in range(steps):
        backward(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


def backward(run: Run) -> None:
    words, follows = run.model(packed(), "mlm", "nsp")
    (words.float().square().mean() + follows.float().square().mean()).backward()


def save(run: Run, folder: Path, step: int, **options: Any) -> Path:
    progress = checkpoints.RunProgress(step, metrics=options.pop("metrics", {}))
    return checkpoints.save(
        folder, run.of, run.optimizer, progress, [checkpoints.capture_rng(CPU)], **options
    )


def everything(run: Run) -> dict[str, Tensor]:
    """Weights, optimizer state and the next random number."""
    tensors = dict(run.model.state_dict())
    for number, kinds in run.optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{kind}": tensor for kind, tensor in kinds.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()} | {
        "rng": torch.get_rng_state()
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """To the bit."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].equal(second[name])
        for name in first
    )


def restored(folder: Path) -> dict[str, Tensor]:
    """All that a new process has which goes on from this folder."""
    run = make(seed=99)
    with checkpoints.claim(folder):
        newest = checkpoints.newest(folder)
    assert newest is not None
    checkpoints.restore(newest, run.model, run.optimizer)
    return everything(run)


class Sweep:
    """One kind of save, struck again and again."""

    def __init__(self, folder: Path, scene: str) -> None:
        self.folder, run = folder, make(seed=1)
        self.wanted: dict[str, dict[str, Tensor]] = {}
        for step in (1, 2):
            train(run, 1)
            save(run, folder / "before", step)
            self.wanted[f"old {step}"] = everything(run)
        train(run, 1)
        # A new step, which lets the oldest go; the last step again; or an earlier one again, after
        # which the last goes. And the last one again, without care: the control.
        self.step = {"new": 3, "again": 2, "back": 1, "careless": 2}[scene]
        self.careless = scene == "careless"
        self.wanted["new"] = everything(run)
        self.run = run

    def strike(self, kind: str, number: int, faults: Any) -> dict[str, Any]:
        """Save in a child that is struck at this call, or may write no more; then look."""
        place = self.folder / "run"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder / "before", place)
        child = os.fork()
        if not child:
            torch.set_rng_state(self.wanted["new"]["rng"])
            if kind == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
            else:
                faults.faults_arm({"kill": KILL, "full": FULL}[kind], number)
            os._exit(self._save(place))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        state = restored(place)
        named = [name for name, want in self.wanted.items() if same(state, want)]
        names = sorted(path.name for path in place.iterdir())
        return {"how": kind, "number": number, "code": code, "is": named, "left": names}

    def _save(self, place: Path) -> int:
        if self.careless:
            checkpoints.publish = _careless
        try:
            save(self.run, place, self.step)
        except CheckpointError as error:
            return SAID if re.search(r"No space left|File too large", str(error)) else UNSAID
        except BaseException:
            return UNSAID
        return 0


def _careless(draft: Path, run: Path, step: int) -> None:
    shutil.rmtree(checkpoints.checkpoint_path(run, step))
    draft.rename(checkpoints.checkpoint_path(run, step))


def sweep(folder: Path, jobs: list[Any]) -> dict[str, Any]:
    """For each scene and way to be struck, the outcomes at these numbers; or at all calls."""
    faults, outcomes = ctypes.CDLL(None), {}  # None: what is preloaded is among it
    for scene, kind, numbers in jobs:
        struck = Sweep(folder / scene / kind, scene)
        outcomes[f"{scene} {kind}"] = strikes = []
        for number in range(10_000) if numbers is None else numbers:
            strikes.append(struck.strike(kind, number, faults))
            if numbers is None and strikes[-1]["code"] == 0:
                break
    return outcomes


def ranks(folder: Path) -> dict[str, Any]:
    """Two ranks with sharded state stop and go on; then one goes on alone."""
    import torch.distributed.optim  # noqa: F401  # once, for both

    children = []
    for rank in range(2):
        children.append(os.fork())
        if not children[-1]:
            try:
                _rank(folder, rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    run = make(seed=98)
    restored_run = checkpoints.restore(checkpoints.newest(folder / "run"), run.model, run.optimizer)
    first = read_tensors(folder, "0.safetensors")
    alone = {name: tensor for name, tensor in everything(run).items() if name != "rng"}
    return {
        "codes": codes,
        "alone": all(alone[name].equal(first[f"at 2 {name}"]) for name in alone),
        "names": len(alone),
        "notes": restored_run.notes,
        "same": [_went_on(read_tensors(folder, f"{rank}.safetensors")) for rank in range(2)],
    }


def _went_on(tensors: dict[str, Tensor]) -> list[bool]:
    names = [name.removeprefix("went ") for name in tensors if name.startswith("went ")]
    alike = [tensors[f"went {name}"].equal(tensors[f"resumed {name}"]) for name in names]
    anew = [tensors[f"went {name}"].equal(tensors[f"anew {name}"]) for name in names]
    return [len(names) > 20 and all(alike), all(anew)]


def _rank(folder: Path, rank: int) -> None:
    from torch import distributed
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sharded = partial(ZeroRedundancyOptimizer, optimizer_class=LAMB)
    run = make(seed=1, kind=sharded)
    torch.manual_seed(rank)  # ranks drop out differently
    together(run, 2)
    optimizer_state.consolidate(run.optimizer)
    rng: list[Any] = [None, None]
    distributed.all_gather_object(rng, checkpoints.capture_rng(CPU))
    tensors: dict[str, Tensor] = {}
    if rank == 0:
        tensors |= {f"at 2 {name}": tensor for name, tensor in everything(run).items()}
        checkpoints.save(folder / "run", run.of, run.optimizer, checkpoints.RunProgress(2), rng)
    distributed.barrier()
    together(run, 2)
    tensors |= {f"went {name}": t.clone() for name, t in run.model.state_dict().items()}
    for name, seed in {"resumed": None, "anew": 7}.items():
        resumed = make(seed=5, kind=sharded)
        progress = checkpoints.restore(
            folder / "run/step-00000002", resumed.model, resumed.optimizer, rank=rank, world=2
        )
        assert progress.notes == () and progress.world == 2
        if seed is not None:
            torch.manual_seed(seed + rank)
        together(resumed, 2)
        tensors |= {f"{name} {key}": t.clone() for key, t in resumed.model.state_dict().items()}
    save_file(tensors, folder / f"{rank}.safetensors")
    distributed.destroy_process_group()


def together(run: Run, steps: int) -> None:
    """Steps with the gradients of all ranks."""
    from torch import distributed

    for _ in range(steps):
        backward(run)
        for parameter in run.model.parameters():
            distributed.all_reduce(parameter.grad)
        run.optimizer.step()
        run.optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    outcomes = {"ranks": ranks(place)} if "ranks" in sys.argv[3:] else {}
    print(json.dumps(outcomes | sweep(place, jobs)))
