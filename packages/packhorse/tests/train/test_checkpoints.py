"""A run that stopped goes on to the bit; a checkpoint is whole or not there, whatever happened."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse import attention, checkpoint
from packhorse.checkpoint.building import build
from packhorse.checkpoint.sentence import SentenceLayer, SentenceLayout
from packhorse.errors import CheckpointError, InputError
from packhorse.model.config import BertConfig
from packhorse.optim import LAMB, parameter_groups
from packhorse.train import checkpoints
from packhorse.train.checkpoints import BestMetric, RunProgress

from . import tiny_run
from .tiny_run import CPU, SAID, everything, make, same, save, train

FILES = ["config.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lamb": {},
    "lamb in bf16": {"dtype": torch.bfloat16, "master_weights": True},
    "adamw": {"kind": torch.optim.AdamW},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """The model is so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    run = make(seed=1)
    for step in (1, 2):
        train(run, 1)
        save(run, tmp_path / "run", step)
    return tmp_path / "run"


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_going_on_is_as_never_having_stopped(options: dict[str, Any], tmp_path: Path) -> None:
    run = make(seed=1, **options)
    train(run, 3)
    path = save(run, tmp_path, 3)
    train(run, 2)
    want = everything(run)
    for seed, alike in {None: True, 5: False}.items():  # the control draws other numbers
        resumed = make(seed=2, **options)
        assert checkpoints.restore(path, resumed.model, resumed.optimizer).step == 3
        if seed is not None:
            torch.manual_seed(seed)
        train(resumed, 2)
        state = everything(resumed)
        assert same(state, want) is alike
        assert all(state[name].dtype == want[name].dtype for name in want)


def test_progress_comes_back(tmp_path: Path) -> None:
    run = make(seed=1)
    cursor = {"dataset": "ab12", "epoch": 3, "row": 2**53 + 1, "shuffle": True}
    metrics = {"loss": 0.1 + 0.2, "perplexity": math.inf}
    progress = RunProgress(12, cursor, {"seconds": -0.0}, metrics, {"π": [1, None]})
    path = checkpoints.save(
        tmp_path, run.of, run.optimizer, progress, [checkpoints.capture_rng(CPU)]
    )
    assert path.name == "step-00000012"
    newest = checkpoints.newest(tmp_path)
    assert newest == checkpoints.read(path)
    assert newest and newest.progress == progress and newest.world == 1 and not newest.notes


SMALL: dict[str, Any] = {"activation": "gelu", "max_positions": 12}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "pretraining": ({}, {}, ("mlm", "nsp")),
    "pretraining, scores of their own": ({}, {"tie_word_embeddings": False}, ("mlm", "nsp")),
    "words alone": ({}, {}, ("mlm",)),
    "answers": ({}, {}, ("span",)),
    "answers beside pretraining": ({}, {}, ("mlm", "nsp", "span")),
    "labels": ({}, {}, ("classify",)),
    "entities": ({}, {}, ("tokens",)),
    "vectors": ({}, {}, ()),
    "RoBERTa": (
        {"position_offset": 2, "mlm_activation": "gelu", "classify_activation": "tanh"},
        {"model_type": "roberta"},
        ("mlm", "classify"),
    ),
    "DistilBERT": (
        {"type_vocab_size": 0, "classify_activation": "relu"},
        {"model_type": "distilbert"},
        ("classify",),
    ),
    "ELECTRA": (
        {"embedding_size": 6, "mlm_activation": "gelu", "classify_activation": "gelu"},
        {"model_type": "electra"},
        ("classify",),
    ),
}


@pytest.mark.parametrize(("shape", "raw", "heads"), MODELS.values(), ids=MODELS)
def test_a_checkpoint_is_a_model_folder(
    shape: dict[str, Any], raw: dict[str, Any], heads: tuple[str, ...], tmp_path: Path
) -> None:
    config = BertConfig(30, 8, 2, 2, 12, **SMALL, **shape)
    dense = SentenceLayer("Dense", "2_Dense", 8, 4, True, "Tanh")
    vectors = SentenceLayout(tmp_path, tmp_path, ("mean",), layers=(dense,))
    tied = raw.get("tie_word_embeddings", True)

    def filled(seed: int) -> checkpoint.Checkpoint:
        layout = None if heads else vectors
        model = build(config, attention.kernel("reference"), heads, 3, tied, layout)
        model = model.to_empty(device="cpu")
        if tied and "mlm" in heads:
            model.heads["mlm"].decoder.weight = model.bert.embed.words.weight  # pyright: ignore
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        labels = ("a", "b", "c") if {"classify", "tokens"} & set(heads) else ()
        return checkpoint.Checkpoint(
            config, model, None, "", 12, labels=labels, raw=raw, layout=layout
        )

    of = filled(1)
    optimizer = LAMB(parameter_groups(of.model, 0.0))
    path = checkpoints.save(
        tmp_path / "run", of, optimizer, RunProgress(0), [checkpoints.capture_rng(CPU)]
    )
    want = of.model.state_dict()
    assert heads or any(name.startswith("heads.embed.stages.0.") for name in want)
    opened = checkpoint.load(path).model.state_dict()
    assert all(opened[name].equal(tensor) for name, tensor in want.items())
    restored = filled(2).model
    checkpoints.restore(path, restored)
    assert same(dict(restored.state_dict()), dict(want))


def test_nothing_is_pickled_and_the_vocabulary_is_there(tmp_path: Path) -> None:
    run = make(seed=1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(35))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    of = checkpoint.Checkpoint(run.of.config, run.model, tmp_path / "vocab.txt", "", 12)
    path = checkpoints.save(
        tmp_path, of, run.optimizer, RunProgress(1), [checkpoints.capture_rng(CPU)]
    )
    files = sorted(file.name for file in path.iterdir())
    assert files == sorted([*FILES, checkpoints.STATE, "vocab.txt", "tokenizer_config.json"])
    assert checkpoint.tokenizer(checkpoint.load(path)).encode(["w3"])[0].ids.tolist() == [2, 8, 3]
    modes = {file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert len(modes) == 1, "a file that only its owner may read"


@pytest.mark.parametrize("name", [*FILES, checkpoints.STATE])
@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "missing"])
def test_damage_is_found_and_passed_over(name: str, kind: str, two_steps: Path) -> None:
    file = two_steps / "step-00000002" / name
    data = file.read_bytes()
    places = (
        [0, len(data) // 3, len(data) - 2, len(data) - 1] if kind == "flip" else [len(data) // 2]
    )
    for place in places:
        if kind == "flip":
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        elif kind == "missing":
            file.unlink()
        else:
            file.write_bytes(data[: place if kind == "cut" else 0])
        with pytest.raises(CheckpointError, match=r"damaged|there is no"):
            checkpoints.read(file.parent)
        newest = checkpoints.newest(two_steps)
        assert newest and newest.step == 1
        assert newest.notes[0].startswith("skipped: ") and name in newest.notes[0]
        assert newest.notes[1] == f"resuming from {two_steps / 'step-00000001'}"
    file.write_bytes(data)
    newest = checkpoints.newest(two_steps)
    assert newest and newest.step == 2 and not newest.notes


def test_every_byte_of_the_manifest_counts(two_steps: Path) -> None:
    file = two_steps / "step-00000002" / checkpoints.STATE
    data = file.read_bytes()
    for place in [*range(30), *range(30, len(data), 37)]:
        for change in (1, 0x20, 0x80):
            file.write_bytes(data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])
            with pytest.raises(CheckpointError):
                checkpoints.read_state(file.parent)


def test_no_checkpoint_and_none_that_is_whole(two_steps: Path, tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "nowhere") is None
    (tmp_path / "empty").mkdir()
    assert checkpoints.newest(tmp_path / "empty") is None
    for _, path in checkpoints.list_checkpoints(two_steps):
        (path / checkpoints.STATE).unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is complete .*step-00000002.*00000001"
    ):
        checkpoints.newest(two_steps)


def test_a_newer_format_is_refused_not_passed_over(
    two_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    save(make(seed=1), two_steps, 3)
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"has format 2, written by .* reads format 1: update"):
        checkpoints.newest(two_steps)


def test_what_does_not_fit_changes_nothing(two_steps: Path) -> None:
    path = two_steps / "step-00000002"

    def refuses(run: tiny_run.Run, error: type[Exception], match: str) -> None:
        before = everything(run)
        with pytest.raises(error, match=match):
            checkpoints.restore(path, run.model, run.optimizer)
        assert same(everything(run), before)

    message = (
        r"another model: bert.embed.words.weight is \[40, 16\] in the checkpoint and \[40, 8\]"
    )
    refuses(make(seed=3, width=8), CheckpointError, message)
    refuses(make(seed=3, kind=torch.optim.AdamW), InputError, "state of LAMB, not of AdamW")
    frozen = make(seed=3)
    frozen.model.bert.embed.words.weight.requires_grad_(False)
    frozen.optimizer = LAMB(parameter_groups(frozen.model, 0.01))
    refuses(frozen, InputError, r"step-00000002: bert.embed.words.weight was trained and is not")
    with pytest.raises(InputError, match="not the model's"):
        checkpoints.restore(path, make(seed=3).model, make(seed=3).optimizer)


def test_options_are_todays_and_the_change_is_reported(two_steps: Path) -> None:
    run = make(seed=3, betas=(0.5, 0.75))
    restored = checkpoints.restore(checkpoints.newest(two_steps) or "", run.model, run.optimizer)
    assert restored.notes == ("betas is [0.5, 0.75] now, and was [0.9, 0.999]",)
    assert [group["betas"] for group in run.optimizer.param_groups] == [(0.5, 0.75)] * 3


def test_a_run_from_before_the_ratio_was_split_goes_on_and_is_reported(tmp_path: Path) -> None:
    """Its state has two groups, and none of them says `stacked`."""
    old = make(seed=1)
    old.optimizer = LAMB(parameter_groups(old.model, 0.01, unstack=False), lr=0.05)
    train(old, 1)
    for group in old.optimizer.param_groups:
        del group["stacked"]
    path = save(old, tmp_path, 1)
    new = make(seed=2)
    restored = checkpoints.restore(path, new.model, new.optimizer)
    assert restored.notes == (
        "LAMB has 3 trust ratios for query, key and value now, and had 1; split_qkv = false "
        "continues as before",
    )
    for new_weight, old_weight in zip(new.model.parameters(), old.model.parameters(), strict=True):
        assert same(new.optimizer.state[new_weight], old.optimizer.state[old_weight])


def steps(run: Path) -> list[int]:
    return sorted(step for step, _ in checkpoints.list_checkpoints(run))


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    run, best = make(seed=1), BestMetric("accuracy")
    scores = [0.5, 0.7, math.nan, 0.7, 0.6, math.inf]
    for step, score in enumerate(scores, 1):
        save(run, tmp_path, step, metrics={"accuracy": score}, keep=2, best=best)
    assert steps(tmp_path) == [2, 5, 6]
    assert checkpoints.best_of(tmp_path, best) == tmp_path / "step-00000002"
    assert (
        checkpoints.best_of(tmp_path, BestMetric("accuracy", larger=False))
        == tmp_path / "step-00000005"
    )
    assert checkpoints.best_of(tmp_path, BestMetric("loss")) is None
    save(run, tmp_path, 7, keep=1, best=best)
    assert steps(tmp_path) == [2, 7]
    save(run, tmp_path, 8, keep=1)
    assert steps(tmp_path) == [8]
    with pytest.raises(InputError, match="keep is 0"):
        save(run, tmp_path, 9, keep=0)


def test_a_run_wound_back_goes_on_from_there(two_steps: Path) -> None:
    run = make(seed=1)
    for step in (3, 4):
        save(run, two_steps, step, keep=9)
    (two_steps / "step-00000004" / checkpoints.STATE).write_bytes(b"torn")
    train(run, 1)
    save(run, two_steps, 2, keep=1)  # again, and otherwise
    assert steps(two_steps) == [2, 4], "what cannot be read is not ours to delete"
    resumed = make(seed=2)
    checkpoints.restore(checkpoints.newest(two_steps) or "", resumed.model, resumed.optimizer)
    assert same(everything(resumed), everything(run))
    save(run, two_steps, 4, keep=1)
    assert steps(two_steps) == [4] and not (checkpoints.newest(two_steps) or pytest.fail()).notes


def test_one_run_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "a" / "run"
    with (
        checkpoints.claim(run),
        pytest.raises(InputError, match="another process"),
        checkpoints.claim(run),
    ):
        pytest.fail("two runs hold one folder")
    with checkpoints.claim(run):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match="file cannot be written"),
        checkpoints.claim(tmp_path / "file"),
    ):
        pass


def test_leftovers_are_removed_and_a_replacement_is_used(two_steps: Path) -> None:
    run = make(seed=7)
    save(run, two_steps / "elsewhere", 2)
    (two_steps / "elsewhere" / "step-00000002").rename(two_steps / "step-00000002.new")
    shutil.copytree(two_steps / "step-00000001", two_steps / ".step-00000001.0a1b2c3d.old")
    (two_steps / "..step-00000003.00112233.partial.44556677.partial").mkdir()
    (two_steps / ".mine").mkdir()
    (two_steps / "step-notes").mkdir()
    newest = checkpoints.newest(two_steps)
    assert newest and newest.path.name == "step-00000002.new", "the newer of the two"
    with checkpoints.claim(two_steps):
        names = sorted(path.name for path in two_steps.iterdir())
        assert names == [
            *(".mine", "elsewhere", "lock", "step-00000001", "step-00000002", "step-notes")
        ]
    resumed = make(seed=8)
    checkpoints.restore(two_steps / "step-00000002", resumed.model)
    assert same(dict(resumed.model.state_dict()), dict(run.model.state_dict()))


def test_weights_alone_leave_random_numbers_alone(two_steps: Path) -> None:
    run = make(seed=3)
    before = torch.get_rng_state()
    checkpoints.restore(two_steps / "step-00000002", run.model)
    assert torch.get_rng_state().equal(before)


def test_ranks_that_were_not_there_draw_numbers_of_their_own() -> None:
    def drawn(rank: int, world: int) -> tuple[float, list[str]]:
        torch.manual_seed(rank * 100)
        notes = checkpoints.restore_rng(states, CPU, rank, world)
        return float(torch.rand(())), notes

    states = []
    for seed in (11, 12):
        torch.manual_seed(seed)
        states.append(checkpoints.capture_rng(CPU))
    want = []
    for rank in (0, 1):
        torch.set_rng_state(states[rank]["cpu"])
        want.append(float(torch.rand(())))
    assert [drawn(rank, 2) for rank in (0, 1)] == [(want[0], []), (want[1], [])]
    numbers = [drawn(rank, 4) for rank in (0, 1, 2, 3)]
    assert numbers == [drawn(rank, 4) for rank in (0, 1, 2, 3)]
    assert len({number for number, _ in numbers}) == 4 and numbers[0][0] == want[0]
    assert all("ranks: 2 when it was written, 4 now" in notes[0] for _, notes in numbers)


# Killed, or the disk full: `tiny_run` as a program. A save makes some 25 calls, at the 24th or so
# it takes its name, and some more delete what is no longer kept.
FEW = [0, 4, 9, 14, 19, 22, 23, 24, 25, 26, 29, 99]
QUICK = [
    *(("new", "kill", FEW), ("again", "kill", FEW[5:]), ("back", "kill", FEW[5::2])),
    *(("careless", "kill", [*range(20, 30, 2), 99]), ("new", "full", [0, 6, 13, 99])),
    ("new", "limit", [100, 4_000, 20_000, 1 << 20]),
]
ALL = [
    *((scene, kind, None) for scene in ("new", "again", "back") for kind in ("kill", "full")),
    ("new", "limit", [*range(0, 70_000, 1_500), 1 << 20]),
]
ALLOWED = {"new": {"old 2", "new"}, "again": {"old 2", "new"}, "back": {"old 2", "old 1", "new"}}


def program(folder: Path, jobs: list[Any], *more: str) -> dict[str, Any]:
    """Run `tiny_run`; without a C compiler no job that needs one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    compiler = shutil.which("cc") if sys.platform == "linux" else None
    if compiler:
        library, source = folder / "faults.so", Path(__file__).with_name("disk_faults.c")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
        subprocess.run(command, check=True)
        others = os.environ.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = f"{library} {others}".strip()
    arguments = [folder, json.dumps(jobs if compiler else []), *more]
    command = [sys.executable, tiny_run.__file__, *map(str, arguments)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert result.returncode == 0
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return program(tmp_path_factory.mktemp("outcomes"), QUICK, "ranks")


def check(outcomes: dict[str, Any], scene: str, kind: str) -> None:
    """Whole, of an allowed step, nothing left over; and strikes came, and then came no more."""
    if f"{scene} {kind}" not in outcomes:
        pytest.skip("there is no C compiler, or no LD_PRELOAD")
    strikes = outcomes[f"{scene} {kind}"]
    for strike in strikes:
        assert len(strike["is"]) == 1 and strike["is"][0] in ALLOWED[scene], strike
        assert all(
            name == "lock" or checkpoints.FOLDER_NAME.fullmatch(name) for name in strike["left"]
        ), strike
        assert strike["code"] in (0, -9 if kind == "kill" else SAID), strike
        assert strike["code"] or strike["is"] == ["new"], strike
        assert kind == "kill" or not strike["code"] or strike["is"] == ["old 2"], strike
    assert strikes[0]["is"] == ["old 2"] and strikes[0]["code"] and not strikes[-1]["code"]
    assert sum(strike["code"] != 0 for strike in strikes) > len(strikes) / 2


@pytest.mark.parametrize(("scene", "kind"), [job[:2] for job in QUICK if job[0] != "careless"])
def test_struck_anywhere_the_old_or_the_new_is_there(
    scene: str, kind: str, outcomes: dict[str, Any]
) -> None:
    check(outcomes, scene, kind)


def test_deleting_before_renaming_would_be_caught(outcomes: dict[str, Any]) -> None:
    """The control: between the two neither the old nor the new is there."""
    if "careless kill" not in outcomes:
        pytest.skip("there is no C compiler, or no LD_PRELOAD")
    with pytest.raises(AssertionError, match="old 1"):
        check({"again kill": outcomes["careless kill"]}, "again", "kill")


@pytest.mark.slow
def test_struck_at_every_call(tmp_path: Path) -> None:
    results = program(tmp_path, ALL)
    for scene, kind, _ in ALL:
        check(results, scene, kind)


def test_two_ranks_go_on_and_one_alone(outcomes: dict[str, Any]) -> None:
    report = outcomes["ranks"]
    assert report["codes"] == [0, 0]
    assert report["same"] == [[True, False]] * 2, "as never stopped; the control draws otherwise"
    assert report["alone"] and report["names"] > 100, "sharded state is whole in the file"
    assert report["notes"] == [
        "ranks: 2 when it was written, 1 now; random numbers differ from here on"
    ]
