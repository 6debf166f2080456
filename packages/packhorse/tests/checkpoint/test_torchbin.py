"""torch files as the real torch.save writes them: read as torch reads them, running nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packhorse.checkpoint import pickled, torchbin
from packhorse.errors import CheckpointError

NUMBERS = torch.arange(24.0).reshape(4, 6)
DTYPES = [kind.dtype for kind in pickled.GLOBALS.values() if isinstance(kind, pickled._StorageType)]


def model() -> nn.Module:
    """Parameters, buffers, and one weight under two names."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    layers.add_module("tied", nn.Linear(3, 4))
    layers[3].weight = layers[0].weight
    return layers


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "a state dict": lambda: model().state_dict(),
    "parameters": lambda: dict(model().named_parameters(remove_duplicate=False)),
    "every dtype": lambda: {str(t): torch.tensor([0, 1, 2, 100]).to(t) for t in DTYPES},
    "values": lambda: {"a": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])},
    "shapes": lambda: {"scalar": torch.tensor(1.5), "empty": torch.ones(3, 0), "é 字": NUMBERS[:1]},
    "views": lambda: {
        "all": NUMBERS,
        "transposed": NUMBERS.T,
        "row": NUMBERS[2],
        "column": NUMBERS[:, 3],
        "steps": NUMBERS[::2, 1::2],
        "diagonal": NUMBERS.diagonal(),
        "windows": torch.arange(24.0).unfold(0, 3, 3),
        "nothing": NUMBERS[4:, 6:],
        "permuted": torch.arange(8).reshape(2, 2, 2).permute(2, 0, 1),
        "one more": NUMBERS[None, :, None],
    },
    "much that is small": lambda: {str(n): torch.tensor(n) for n in range(300)},
    "a long name": lambda: {"n" * 3_000: torch.ones(2)},
}


def write(folder: Path, value: Any, **options: Any) -> Path:
    torch.save(value, folder / "x.bin", **options)
    return folder / "x.bin"


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


def same(result: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert result.keys() == want.keys()
    for name, tensor in want.items():
        assert result[name].dtype == tensor.dtype and result[name].shape == tensor.shape, name
        bits = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (result[name], tensor)]
        assert torch.equal(*bits), name
        assert not result[name].requires_grad


@pytest.mark.parametrize("state", STATES)
def test_as_torch_reads_it(state: str, tmp_path: Path) -> None:
    path = write(tmp_path, STATES[state]())
    result, notes = torchbin.read(tmp_path, "x.bin")
    same(result, load(path))
    assert notes == () and torchbin.read_tensors(tmp_path, "x.bin").keys() == result.keys()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(protocol: int, tmp_path: Path) -> None:
    """torch's own guarded reader knows 2 and 3 only."""
    state = model().state_dict()
    write(tmp_path, state, pickle_protocol=protocol)
    same(torchbin.read_tensors(tmp_path, "x.bin"), state)


def test_what_is_shared_stays_shared(tmp_path: Path) -> None:
    write(tmp_path, STATES["views"]() | {"tied": NUMBERS})
    result = torchbin.read_tensors(tmp_path, "x.bin")
    of_numbers = ("all", "tied", "transposed", "row", "column", "steps", "diagonal")
    assert len({result[name].untyped_storage().data_ptr() for name in of_numbers}) == 1
    result["all"][2, 3] = -1
    assert result["row"][3] == result["column"][2] == result["transposed"][3, 2] == -1
    assert result["windows"].untyped_storage().data_ptr() != result["all"].data_ptr()
    write(tmp_path, {"a": NUMBERS, "b": NUMBERS.clone()})
    result = torchbin.read_tensors(tmp_path, "x.bin")
    assert result["a"].data_ptr() != result["b"].data_ptr()


def trained() -> dict[str, Any]:
    """What a training script saves: the model among all that it needs to go on."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("wrapper", torchbin.WRAPPERS)
def test_models_among_other_things(wrapper: str, tmp_path: Path) -> None:
    saved = trained()
    saved = {"epoch": 3, wrapper: saved["model"], "optimizer": saved["optimizer"], "lr": None}
    write(tmp_path, saved | {"seed": 1 << 70, "step": torch.tensor(7), 5: [1.5, (True, ())]})
    result, notes = torchbin.read(tmp_path, "x.bin")
    same(result, saved[wrapper])
    assert notes == ("x.bin: left out epoch, optimizer, lr, seed, step, 5",)


def test_only_the_model_is_read(tmp_path: Path) -> None:
    """A damaged storage of the optimizer is not even looked at; one of the model is."""
    saved = trained()
    path = write(tmp_path, saved)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        last = max(int(n.split("/")[-1]) for n in archive.namelist() if "/data/" in n)
        damaged = archive.read(f"x/data/{last}")
    assert content.count(damaged) == 1 and len(damaged) > 4
    path.write_bytes(content.replace(damaged, bytes(len(damaged))))
    same(torchbin.read_tensors(tmp_path, "x.bin"), saved["model"])


def test_what_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    state = OrderedDict({"a": torch.ones(2), "step": 5, "_extra_state": None, "names": ["x"]})
    write(tmp_path, state)
    result, notes = torchbin.read(tmp_path, "x.bin")
    assert result.keys() == {"a"} and notes == ("x.bin: left out step, _extra_state, names",)
    write(tmp_path, {f"n{n}": n for n in range(30)} | {"a": torch.ones(1)})
    [note] = torchbin.read(tmp_path, "x.bin")[1]
    assert "n19" in note and "n20" not in note and note.endswith("…")


def test_checksums_that_were_not_written(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = write(tmp_path, {"a": NUMBERS})
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert not any(record.CRC for record in archive.infolist())
    same(torchbin.read_tensors(tmp_path, "x.bin"), {"a": NUMBERS})


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_by_others(method: int, tmp_path: Path) -> None:
    """A file that was unpacked and packed again, which torch reads too, if it is not compressed."""
    path = write(tmp_path, {"a": NUMBERS})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.bin", "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    if method == zipfile.ZIP_STORED:
        same(torchbin.read_tensors(tmp_path, "y.bin"), load(tmp_path / "y.bin"))
    else:
        with pytest.raises(CheckpointError, match="compressed or encrypted"):
            torchbin.read_tensors(tmp_path, "y.bin")


WATCHED = """
import sys
from pathlib import Path
import torch
from packhorse.checkpoint import hf
from packhorse.errors import CheckpointError

def hook(event, arguments):
    if watching:
        events.append((event, str(arguments[0]) if arguments else ""))

events, watching = [], False
sys.addaudithook(hook)
for read in sys.argv[1:]:
    read = compile(read, "read", "eval")
    watching = True
    try:
        eval(read)
    except CheckpointError as error:
        pass
    watching = False
    print(events[1:])  # the first is the eval above
    events.clear()
"""


def watch(*reads: str) -> list[list[tuple[str, str]]]:
    """What Python's own audit reports during each of these expressions."""
    command = [sys.executable, "-c", WATCHED, *reads]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return [ast.literal_eval(line) for line in completed.stdout.splitlines()]


class Touch:
    """Unpickled, it opens a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.path)!r}, 'w').close()",)


def test_nothing_runs_and_nothing_else_is_opened(tmp_path: Path) -> None:
    """No import, no process, no socket, no code, no file outside the folder."""
    folders = {"good": {}, "evil": {"x": Touch(tmp_path / "touched")}}
    for name, extra in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        torch.save(trained() | extra, tmp_path / name / "pytorch_model.bin")
    reads = [f"hf.read(Path({str(tmp_path / name)!r}))" for name in folders]
    for name, events in zip(folders, watch(*reads), strict=True):
        assert {event for event, _ in events} == {"open"}, events
        opened = [Path(place) for _, place in events if not place.isdigit()]  # digits: open already
        assert opened == [tmp_path / name / "config.json", tmp_path / name / "pytorch_model.bin"]
    assert not (tmp_path / "touched").exists()


def test_the_audit_would_see_it(tmp_path: Path) -> None:
    """The control: an unguarded torch.load does what the file says, and is caught at it."""
    path = write(tmp_path, {"x": Touch(tmp_path / "touched")})
    [events] = watch(f"torch.load({str(path)!r}, weights_only=False)")
    assert ("open", str(tmp_path / "touched")) in events
    assert {"compile", "exec", "pickle.find_class"} <= {event for event, _ in events}
    assert (tmp_path / "touched").exists()


def test_the_table_of_names_is_all_there_is() -> None:
    """Every value behind a name is of ours: no class and no function of torch or Python."""
    for name, value in pickled.GLOBALS.items():
        assert type(value).__module__ == pickled.__name__, name
        if isinstance(value, pickled._Function):
            assert value.call.__module__ == pickled.__name__, name
