"""Options: PopTorch's names and defaults, fixed once used, every mistake answered with the line."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packhorse_port as poptorch
from packhorse_port import enums, notices
from packhorse_port.enums import ConnectionType, OutputMode, ReductionType, TensorLocationSettings
from packhorse_port.notices import UsageError
from packhorse_port.options import GROUPS, ConfigFileError, Options, cache_from_environment
from packhorse_port.settings import Ignored, OptionsError, Settings


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    notices.reset()
    for name in ("POPTORCH_CACHE_DIR", "TF_POPLAR_FLAGS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def line() -> int:
    frame = inspect.currentframe()
    return frame.f_back.f_lineno if frame and frame.f_back else 0


def test_defaults_are_poptorchs() -> None:
    opts = Options()
    assert (opts.device_iterations, opts.replication_factor, opts.gradient_accumulation) == (
        1,
        1,
        1,
    )
    assert opts.output_mode == OutputMode.Default and opts.defaultOutputMode()
    assert opts.reduction == ReductionType.Mean
    assert opts.connection_type == ConnectionType.Always
    assert opts.random_seed is None and opts.cache_path is None and not opts.synthetic_data
    assert (opts.Distributed.processId, opts.Distributed.numProcesses) == (0, 1)
    assert not notices.logged()


def test_calls_chain_and_are_read_back() -> None:
    opts = Options().deviceIterations(4).replicationFactor(2).outputMode(OutputMode.EveryN, 3)
    opts.Training.gradientAccumulation(8).accumulationAndReplicationReductionType(ReductionType.Sum)
    assert opts.batches_per_call == 4 * 2 * 8
    assert (opts.output_mode, opts.output_every, opts.reduction) == (OutputMode.EveryN, 3, 0)
    assert opts.anchorMode(OutputMode.All).output_every == 1
    assert opts.useOfflineIpuTarget().connection_type == ConnectionType.Never
    assert "device_iterations=4" in repr(opts) and "Training.gradient_accumulation=8" in repr(opts)
    assert not notices.logged()


def test_random_seed_seeds_torch_at_the_call() -> None:
    Options().randomSeed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_changed_after_use_names_both_lines_and_clone() -> None:
    opts = Options().deviceIterations(2)
    opts.freeze("a DataLoader")
    taken = line() - 1
    with pytest.raises(OptionsError, match=r"opts = opts\.clone\(\)") as caught:
        opts.deviceIterations(5)
    assert f"test_options.py:{taken}" in str(caught.value)
    assert f"test_options.py:{taken + 3}" in str(caught.value)
    assert "deviceIterations(5)" in str(caught.value)
    for change in (
        lambda: opts.Training.gradientAccumulation(2),
        lambda: opts.autoRoundNumIPUs(),
        lambda: opts._Popart.set("a", 1),
        lambda: opts.Distributed.disable(),
        lambda: opts.randomSeed(1),
    ):
        with pytest.raises(AttributeError, match="clone"):
            change()
    assert opts.device_iterations == 2


@pytest.mark.parametrize("twin_of", [Options.clone, copy.deepcopy, lambda o: o.clone().clone()])
def test_a_clone_is_free_and_its_own(twin_of) -> None:
    opts = Options().deviceIterations(2).setAvailableMemoryProportion({"IPU0": 0.5})
    opts.Training.gradientAccumulation(3)
    opts.freeze("a model")
    twin = twin_of(opts)
    assert twin.toDict() == opts.toDict() and not twin.frozen
    twin.deviceIterations(9).Training.gradientAccumulation(4)
    twin.available_memory_proportion["IPU0"] = 0.1
    assert (opts.device_iterations, opts.gradient_accumulation) == (2, 3)
    assert opts.available_memory_proportion == {"IPU0": 0.5}


def test_a_pickled_copy_stays_as_it_was() -> None:
    opts = Options().deviceIterations(2)
    opts.freeze("a model")
    twin = pickle.loads(pickle.dumps(opts))
    assert twin.toDict() == opts.toDict() and twin.frozen


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("deviceIteration", "deviceIterations"),
        ("device_iteration", "device_iterations"),
        ("setRandomSeed", "randomSeed"),
        ("training", "Training"),
        ("qqqqqqqq", "nothing similar"),
    ],
)
def test_unknown_names_name_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(OptionsError, match=nearest):
        getattr(Options(), wrong)
    assert not hasattr(Options(), wrong)
    with pytest.raises(OptionsError, match=nearest):
        setattr(Options(), wrong, 1)


def test_a_method_assigned_says_to_call_it() -> None:
    with pytest.raises(OptionsError, match=r"write \.deviceIterations\(4\)"):
        Options().deviceIterations = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OptionsError, match="cannot be assigned"):
        Options().device_iterations = 4
    with pytest.raises(OptionsError, match="nearest it has is 'gradientAccumulation'"):
        Options().Training.gradientAcumulation(4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda o: o.deviceIterations(0), "at least 1, got 0"),
        (lambda o: o.deviceIterations(2.0), "whole number, not 2.0"),
        (lambda o: o.replicationFactor(True), "whole number"),
        (lambda o: o.Training.gradientAccumulation("2"), "whole number, not '2'"),
        (lambda o: o.outputMode(2), r"poptorch\.OutputMode\.All"),
        (lambda o: o.outputMode(OutputMode.EveryN), "n is missing"),
        (lambda o: o.outputMode(OutputMode.EveryN, 0), "at least 1"),
        (
            lambda o: o.Training.accumulationReductionType(ReductionType.NoReduction),
            "Mean or .Sum",
        ),
        (lambda o: o.connectionType("OnDemand"), r"poptorch\.ConnectionType\.OnDemand"),
        (lambda o: o.Distributed.configureProcessId(2, 2), "from 0 to 1"),
    ],
)
def test_wrong_values_say_what_is_right(call, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(Options())


def test_without_meaning_is_reported_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        Options().autoRoundNumIPUs(True).Precision.enableStochasticRounding(True)
    first = line() - 1
    assert [notice.key for notice in notices.logged()] == [
        "autoRoundNumIPUs",
        "enableStochasticRounding",
    ]
    assert {notice.line for notice in notices.logged()} == {f"test_options.py:{first}"}
    assert len(caplog.records) == 2
    assert all(record.name == "packhorse_port" for record in caplog.records)
    assert caplog.records[0].levelno == logging.WARNING


def test_asking_for_what_is_anyway_is_not_said() -> None:
    opts = Options().autoRoundNumIPUs(False).useIpuModel(False).logCycleCount(False)
    opts.Precision.enableStochasticRounding(False).setPartialsType(torch.float)
    assert not notices.logged()
    assert opts.use_model is False and opts.Precision.partials_type == torch.float32


def everything_ignored() -> list[tuple[type[Settings], str, Ignored]]:
    return [
        (group, name, method.setting)
        for group in (Options, *GROUPS.values())
        for name, method in vars(group).items()
        if isinstance(getattr(method, "setting", None), Ignored)
    ]


@pytest.mark.parametrize(("group", "name", "setting"), everything_ignored())
def test_each_ignored_setting_keeps_what_it_got(group, name: str, setting: Ignored) -> None:
    owner = Options() if group is Options else group(Options()._use)
    assert getattr(owner, setting.name) == setting.default
    parameters = [*inspect.signature(getattr(group, name)).parameters][1:]
    value = object()
    assert getattr(owner, name)(*[value] * len(parameters)) is owner
    assert getattr(owner, setting.name) != setting.default
    assert [notice.key for notice in notices.logged()] == [name]
    with pytest.raises(TypeError):
        getattr(owner, name)(nonsense=1)


def test_popart_options_are_kept_and_said_by_key() -> None:
    opts = Options()
    opts._Popart.set("autoRecomputation", 3).setPatterns({"A": True}).setEngineOptions({"x": "y"})
    assert opts._Popart.options["autoRecomputation"] == 3
    assert len(notices.logged()) == 4
    assert opts.toDict()["popart"]["patterns"] == {"A": True}


def test_tensor_locations() -> None:
    place = TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    opts = Options()
    opts.TensorLocations.setOptimizerLocation(place).numIOTiles(32)
    assert opts.TensorLocations.location_optimizer == place
    assert opts.toDict()["location_optimizer"] == {"onChip": 0, "useReplicatedTensorSharding": 1}
    assert place.useOnChipStorage(None).toDict() == {"useReplicatedTensorSharding": 1}
    with pytest.raises(UsageError, match="takes a int, not 'many'"):
        place.minElementsForOffChip("many")  # pyright: ignore[reportArgumentType]


@given(
    st.integers(1, 99), st.integers(1, 9), st.integers(1, 9), st.sampled_from(list(OutputMode)[:1])
)
def test_to_dict_is_json_and_comes_back(iterations, replicas, accumulation, mode) -> None:
    opts = Options().deviceIterations(iterations).replicationFactor(replicas).outputMode(mode)
    opts.Training.gradientAccumulation(accumulation)
    opts.Precision.setPartialsType(torch.half)
    again = Options.fromDict(json.loads(json.dumps(opts.toDict())))
    assert again.toDict() == opts.toDict()
    assert isinstance(again.output_mode, OutputMode) and isinstance(again.reduction, ReductionType)
    assert again.batches_per_call == opts.batches_per_call


def test_groups_share_no_names() -> None:
    opts = Options()
    names = [name for group in opts._groups() for name in group._values]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, None),
        ({"POPTORCH_CACHE_DIR": "/a"}, "/a"),
        ({"TF_POPLAR_FLAGS": "--executable_cache_path=/b"}, "/b"),
        ({"TF_POPLAR_FLAGS": "--max_infeed_threads=8 --executable_cache_path '/b c'"}, "/b c"),
        ({"TF_POPLAR_FLAGS": "--use_ipu_model"}, None),
        ({"POPTORCH_CACHE_DIR": "/a", "TF_POPLAR_FLAGS": "--executable_cache_path=/b"}, "/a"),
    ],
)
def test_the_cache_of_the_environment(environ: dict[str, str], path: str | None) -> None:
    assert cache_from_environment(environ) == path


def test_the_call_overrides_the_cache_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/a")
    assert Options().cache_path == "/a"
    assert Options().enableExecutableCaching("/c").cache_path == "/c"
    off = Options().enableExecutableCaching(None)
    assert off.cache_path is None and off.clone().cache_path is None


def test_processes_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    assert distributed.disable().numProcesses == 1


FILE = """
# settings of a run
deviceIterations(10)

outputMode(poptorch.OutputMode.EveryN, output_return_period=5)
Training.gradientAccumulation(8).accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
Precision.setPartialsType(torch.half)
setAvailableMemoryProportion({"IPU0": 0.5})
TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
_Popart.set("autoRecomputation", 3)
"""


def test_load_from_file(tmp_path) -> None:
    path = tmp_path / "options.conf"
    path.write_text(FILE)
    opts = Options().loadFromFile(path)
    assert (opts.device_iterations, opts.output_every, opts.gradient_accumulation) == (10, 5, 8)
    assert opts.reduction == ReductionType.Sum and opts.Precision.partials_type == torch.half
    assert opts.TensorLocations.location_weight.toDict() == {"onChip": 0}
    assert opts._Popart.options == {"autoRecomputation": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("deviceIterations(1", r"o\.conf:2: .*never closed"),
        ("deviceIterations", "a line is a call"),
        ("deviceIterations = 3", "o.conf:2"),
        ("deviceIteration(3)", "nearest it has is 'deviceIterations'"),
        ("deviceIterations(0)", "at least 1"),
        ("deviceIterations(open('x'))", "not a plain value"),
        ("__class__.__init__(1)", "not a setting"),
        ("_set('x', device_iterations=7)", "_set is not a setting"),
        ("(lambda: 1)()", "a line is a call"),
        ("outputMode(poptorch.OutputMode.Every)", "neither of poptorch's enumerations"),
        ("outputMode(poptorch.Enum.__class__)", "neither of poptorch's enumerations"),
        ("deviceIterations(1, 2)", "positional argument"),
    ],
)
def test_a_wrong_line_is_named_and_runs_nothing(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "o.conf"
    path.write_text("# first\n" + text)
    with pytest.raises(ConfigFileError, match=words):
        Options().loadFromFile(path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigFileError, match="No such file"):
        Options().loadFromFile(tmp_path / "none")


def test_numbers_of_the_enumerations() -> None:
    assert [mode.value for mode in OutputMode] == [0, 1, 2, 3, 4]
    assert (OutputMode.Final, OutputMode.All) == (0, 2) and enums.AnchorMode is OutputMode
    assert (ReductionType.Sum, ReductionType.Mean, ReductionType.NoReduction) == (0, 1, 2)
    assert enums.OverlapMode("no_overlap") is enums.OverlapMode.NoOverlap
    assert GROUPS["Training"].DEFAULTS["gradient_accumulation"] == 1


def test_default_options_of_the_environment(monkeypatch):
    settings = {
        "deviceIterations": 3,
        "Training.gradientAccumulation": 2,
        "outputMode": ["OutputMode.EveryN", 2],
        "_Popart.set": ["key", "my.file"],
    }
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(settings))
    options = poptorch.Options()
    assert options.device_iterations == 3 and options.gradient_accumulation == 2
    assert options.output_mode == poptorch.OutputMode.EveryN and options.output_every == 2
    assert options._Popart.options == {"key": "my.file"}
    assert options.deviceIterations(5).clone().device_iterations == 5
    for bad in ('{"deviceIteration": 3}', "{", '{"deviceIterations": 0}', '{"__class__": 1}'):
        monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", bad)
        with pytest.raises(poptorch.ConfigFileError, match="is no JSON of settings"):
            poptorch.Options()


def test_a_clone_of_default_options_does_not_seed_again(monkeypatch):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"randomSeed": 7}')
    options = poptorch.Options()
    first = torch.rand(1)
    options.clone()
    assert not torch.equal(first, torch.rand(1))


def test_a_file_may_make_an_execution_strategy(tmp_path):
    file = tmp_path / "options.cfg"
    file.write_text('setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("a"), "b"))\n')
    strategy = poptorch.Options().loadFromFile(file).execution_strategy
    assert isinstance(strategy, poptorch.PipelinedExecution)
    assert strategy.stage("b").blocks == ("b",)
