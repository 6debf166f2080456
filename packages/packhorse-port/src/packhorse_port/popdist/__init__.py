"""`popdist`: which of several processes of a script this is.

    options = popdist.poptorch.Options(ipus_per_replica=2)
    if popdist.getInstanceIndex() == 0:
        save(model)

PopDist's instances are the processes that `packhorse_port.poprun`, `packhorse.launcher` or torchrun
starts; a script that is started alone is one instance. Each instance has as many replicas as
`poprun --num-replicas` shares out, or one.
"""

import os
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from packhorse_port.notices import UsageError, line_prefix

# Set by `packhorse_port.poprun`, under PopDist's names.
TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"


def init() -> None:
    """Nothing to do: processes meet when a model is first called."""


finalizeDistributed = init


def isPopdistEnvSet() -> bool:
    """Whether a launcher has started this process as one of several."""
    return TOTAL_REPLICAS in os.environ or getNumInstances() > 1


def getNumInstances() -> int:
    """How many processes run the script."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def getInstanceIndex() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", "0"))


def getNumTotalReplicas() -> int:
    """Replicas of all processes."""
    return int(os.environ.get(TOTAL_REPLICAS, str(getNumInstances())))


def getNumLocalReplicas() -> int:
    """Replicas of this process."""
    return getNumTotalReplicas() // getNumInstances()


def getReplicaIndexOffset() -> int:
    """The number of this process's first replica."""
    return getInstanceIndex() * getNumLocalReplicas()


def getNumIpusPerReplica() -> int:
    """What `poprun --ipus-per-replica` said; each replica runs on one device."""
    return int(os.environ.get(IPUS_PER_REPLICA, "1"))


def checkNumIpusPerReplica(num_ipus: int) -> None:
    """Raise if poprun was started with another number of IPUs per replica."""
    if IPUS_PER_REPLICA in os.environ and num_ipus != getNumIpusPerReplica():
        raise UsageError(
            f"{line_prefix()}the script takes {num_ipus} IPUs per replica and poprun was started"
            f" with --ipus-per-replica {getNumIpusPerReplica()}"
        )


def getDeviceId(ipus_per_replica: int | None = None) -> int:
    """The number of this process's device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def execute_on_instances(
    instances: Collection[int], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call the function in these processes; the others get None."""
    return function(*args, **kwargs) if getInstanceIndex() in instances else None


def __getattr__(name: str) -> Any:
    if name == "poptorch":
        return import_module("packhorse_port.popdist.poptorch")
    raise AttributeError(f"{line_prefix()}popdist.{name} is not provided here")
