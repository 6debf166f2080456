"""`tensorflow.python.ipu.config`: the settings of an IPU system.

    config = IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    ipus()      # 2: as many replicas, or pipeline stages times replicas

Of about sixty settings one has an effect without an IPU: how many there are. The others are
accepted, checked for their type and logged once; a name that the SDK (3.3) does not have is an
error that names the nearest. As in the SDK, the system belongs to the whole process, so it is
stored in this module. Needs no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from packhorse_port.names import nearest
from packhorse_port.notices import input_error, log_once


class DeviceConnectionType(Enum):
    """When to attach to the device."""

    ALWAYS = 0
    ON_DEMAND = 1
    NEVER = 2
    PRE_COMPILE = 3


class SelectionOrder(Enum):
    """In which order IPUs are selected."""

    AUTO = 0
    ZIGZAG = 1
    SNAKE = 2
    HOOF = 3


class ExecutionProfileType(Enum):
    """What a profile contains."""

    NO_PROFILE = 0
    DEVICE_PROFILE = 1
    IPU_PROFILE = 2
    TILE_PROFILE = 3


class MergeRemoteBuffersBehaviour(Enum):
    """Whether remote buffers are merged."""

    NO_MERGING = 0
    MERGE = 1
    IF_BENEFICIAL = 2


class SchedulingAlgorithm(Enum):
    """How the compiler orders operations."""

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class StochasticRoundingBehaviour(Enum):
    """Where stochastic rounding is used."""

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @staticmethod
    def from_bool(value: bool) -> StochasticRoundingBehaviour:
        return StochasticRoundingBehaviour.ON if value else StochasticRoundingBehaviour.OFF


# Every setting with its default; a mapping is a group, the type `dict` an empty dictionary.
SETTINGS: dict[str, Any] = {
    "allow_recompute": False,
    "selection_order": SelectionOrder.AUTO,
    "serialization_output_folder": "",
    "compilation_poplar_options": dict,
    "gcl_poplar_options": dict,
    "auto_select_ipus": list,
    "select_ipus": list,
    "convolutions": {"poplar_options": dict},
    "device_connection": {
        "type": DeviceConnectionType.ALWAYS,
        "version": "",
        "enable_remote_buffers": False,
    },
    "slices": {"poplar_options": dict},
    "experimental": {
        "always_rearrange_copies_on_the_host": False,
        "enable_remote_buffer_embedding": False,
        "enable_prng_stability": False,
        "multi_replica_distribution": {"process_index": 0, "process_count": 0},
    },
    "floating_point_behaviour": {
        "inv": False,
        "div0": False,
        "oflo": False,
        "esr": StochasticRoundingBehaviour.OFF,
        "nanoo": False,
        "set_all": False,
    },
    "io_tiles": {
        "num_io_tiles": 0,
        "place_ops_on_io_tiles": False,
        "available_memory_proportion": 0.9,
    },
    "ipu_model": {"compile_ipu_code": True, "tiles_per_ipu": 0, "version": "ipu2"},
    "matmuls": {"clear_pass_type": False, "poplar_options": dict},
    "norms": {
        "use_stable_statistics": False,
        "experimental": {"distributed_batch_norm_replica_group_size": 1},
    },
    "optimizations": {
        "math": {"fast": False, "dot_strength": True},
        "prefetch_data_streams": True,
        "combine_embedding_lookups": False,
        "combine_matmuls": False,
        "enable_graph_outlining": True,
        "enable_dynamic_slice_replacement": True,
        "enable_fast_math": False,
        "enable_gather_simplifier": True,
        "merge_infeed_io_copies": True,
        "merge_remote_buffers": MergeRemoteBuffersBehaviour.IF_BENEFICIAL,
        "maximum_cross_replica_sum_buffer_size": 0,
        "maximum_reduce_scatter_buffer_size": 0,
        "maximum_inter_ipu_copies_buffer_size": 0,
        "maximum_send_recv_cluster_size": 0,
        "maximum_reduce_many_buffer_size": 0,
        "maximum_all_gather_buffer_size": 0,
        "minimum_remote_tensor_size": 128,
        "triangular_solve_expander_block_size": 0,
        "cholesky_block_size": 0,
    },
    "pooling": {"poplar_options": dict},
    "scheduling": {
        "algorithm": SchedulingAlgorithm.CHOOSE_BEST,
        "maximum_scheduler_lookahead_depth": 5,
        "maximum_scheduler_search_space_size": 64,
    },
}
COUNTS = ("auto_select_ipus", "select_ipus")
EFFECTIVE = (*COUNTS, "device_connection.type")  # the settings with an effect
NO_EFFECT = {
    "floating_point_behaviour": "numbers are rounded and overflow as on this machine",
    "norms": "each replica has its own statistics, as TensorFlow computes them",
    "experimental": "there is one process",
    "ipu_model": "there is no model of an IPU",
    "device_connection": "there is nothing to attach to",
}


class _ConfigSettings:
    """One level of settings; abstract, see `ConfigGroup` and `IPUConfig`."""

    def __init__(self, defaults: Mapping[str, Any], path: str = "") -> None:
        # Past our own __setattr__, which accepts settings only.
        object.__setattr__(self, "_defaults", defaults)
        object.__setattr__(self, "_path", path)
        for name, default in defaults.items():
            if isinstance(default, Mapping):
                value: Any = ConfigGroup(default, f"{path}{name}.")
            else:
                value = default() if isinstance(default, type) else default
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise input_error(_unknown(self._defaults, self._path, name))
        path = self._path + name
        default = self._defaults[name]
        if not _fits(path, default, value):
            raise input_error(f"IPUConfig.{path} takes {_kind(path, default)}, not {value!r}")
        object.__setattr__(self, name, value)
        if path not in EFFECTIVE and value != default:
            reason = NO_EFFECT.get(path.split(".")[0], "it is for the IPU's compiler")
            log_once(f"IPUConfig.{path}", f"IPUConfig.{path} has no effect: {reason}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(_unknown(self._defaults, self._path, name))

    def to_dict(self) -> dict[str, Any]:
        """All settings by dotted name."""
        return dict(_flat(self))

    def from_dict(self, settings: Mapping[str, Any]) -> None:
        """Set settings by dotted name."""
        for path, value in settings.items():
            *groups, name = path.split(".")
            owner: Any = self
            for group in groups:
                owner = getattr(owner, group)
            setattr(owner, name, value)


class ConfigGroup(_ConfigSettings):
    """A group of settings within another."""


class IPUConfig(_ConfigSettings):
    """The settings of an IPU system, all at their defaults."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Use this configuration for the process."""
        configure_ipu_system(self, device)


def _unknown(defaults: Mapping[str, Any], path: str, name: str) -> str:
    near = nearest(name, defaults) or nearest(name, setting_paths(SETTINGS))
    return f"IPUConfig has no {path}{name}{near}"


def setting_paths(defaults: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The dotted names of all settings."""
    for name, value in defaults.items():
        if isinstance(value, Mapping):
            yield from setting_paths(value, f"{path}{name}.")
        else:
            yield path + name


def _flat(settings: _ConfigSettings) -> Iterator[tuple[str, Any]]:
    for name in settings._defaults:
        value = getattr(settings, name)
        if isinstance(value, ConfigGroup):
            yield from _flat(value)
        else:
            yield settings._path + name, value


def _fits(path: str, default: Any, value: Any) -> bool:
    if path in COUNTS:
        counts = value if isinstance(value, list | tuple) else [value]
        return all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
    if isinstance(default, Mapping):
        return False
    if isinstance(default, type):
        return isinstance(value, default)
    if path.endswith(".esr") and isinstance(value, bool):
        return True
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _kind(path: str, default: Any) -> str:
    if path in COUNTS:
        return "a number or a list of numbers"
    if isinstance(default, Mapping):
        return f"no value, but settings within it: {', '.join(default)}"
    if isinstance(default, Enum):
        kind = type(default)
        return f"one of {', '.join(f'{kind.__name__}.{member.name}' for member in kind)}"
    return f"a {(default if isinstance(default, type) else type(default)).__name__}"


_system: list[IPUConfig] = []


def configure_ipu_system(
    config: IPUConfig, device: str = "cpu", reset_configuration: bool = True
) -> None:
    """Use `config` for the process, instead of any previous one."""
    if not isinstance(config, IPUConfig):
        raise input_error(f"configure_ipu_system takes an IPUConfig, not {config!r}")
    if config.auto_select_ipus and config.select_ipus:
        raise input_error("set one of auto_select_ipus and select_ipus, not both")
    connection = config.device_connection.type
    if connection in (DeviceConnectionType.NEVER, DeviceConnectionType.PRE_COMPILE):
        raise input_error(
            f"device_connection.type = {connection.name} compiles for an IPU and runs nothing;"
            " to run here set it to DeviceConnectionType.ON_DEMAND"
        )
    for count in _counts(config):
        if count < 1 or count & (count - 1):
            fitting = 1 << max(count - 1, 0).bit_length()
            raise input_error(
                f"auto_select_ipus = {count}: IPUs come as 1, 2, 4, 8, …; set it to {fitting}"
            )
    _system[:] = [config]


def _counts(config: IPUConfig) -> list[int]:
    """IPUs of each TensorFlow device; those selected by number count as one each."""
    selected = config.select_ipus
    if isinstance(selected, int):
        return [1]
    if selected:
        return [1 for _ in selected]
    counts = config.auto_select_ipus
    return [counts] if isinstance(counts, int) else list(counts)


def reset_ipu_configuration() -> None:
    """Clear the configuration of the process."""
    _system.clear()


def get_ipu_config(session: object = None) -> list[IPUConfig]:
    """The configuration of the process, as a list of one."""
    if not _system:
        raise input_error("no IPU is configured; call configure_ipu_system() of an IPUConfig first")
    return list(_system)


def ipus() -> int:
    """How many IPUs the first device has; one if none was configured."""
    return (_counts(_system[0]) or [1])[0] if _system else 1


def running_on_ipu_model() -> bool:
    """Whether a simulated IPU is used: never."""
    return False
