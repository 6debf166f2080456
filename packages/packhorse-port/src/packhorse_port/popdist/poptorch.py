"""`popdist.poptorch.Options`: options of a model that several processes train."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from packhorse_port import options, popdist
from packhorse_port.notices import UsageError, line_prefix


def Options(ipus_per_replica: int | None = None) -> options.Options:
    """`poptorch.Options` with the replicas and the number of this process, which stay."""
    if ipus_per_replica is not None:
        popdist.checkNumIpusPerReplica(ipus_per_replica)
    result = options.Options().replicationFactor(popdist.getNumLocalReplicas())
    group = result.Distributed
    group.configureProcessId(popdist.getInstanceIndex(), popdist.getNumInstances())
    for name in ("replicationFactor", "useIpuId"):
        result.__dict__[name] = _refusal(name)
    for name in ("disable", "configureProcessId", "setEnvVarNames"):
        group.__dict__[name] = _refusal(f"Distributed.{name}")
    return result


def _refusal(name: str) -> Callable[..., NoReturn]:
    """A method that raises, because the launcher decides."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            f"{line_prefix()}Cannot call `{name}` with popdist.poptorch.Options: poprun or torchrun"
            " decides; delete the line, or use poptorch.Options"
        )

    return refuse
