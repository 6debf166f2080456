"""`popdist.poptorch.Options`: options of a model that several processes train."""

from __future__ import annotations

from typing import Any, NoReturn

from packhorse_port import options, popdist
from packhorse_port.notices import UsageError, line_prefix


def _refuse(name: str) -> Any:
    """A method that raises: the launcher decides."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"{line_prefix()}Cannot call `{name}` with popdist.poptorch.Options: poprun or torchrun"
            " decides; delete the line, or use poptorch.Options"
        )

    return refuse


class Distributed(options.Distributed):
    """`Options.Distributed` as the launcher has set it."""

    def __init__(self, use: options.OptionsUse) -> None:
        options.Settings.__init__(self, use)
        index = popdist.getInstanceIndex()
        options.Distributed.configureProcessId(self, index, popdist.getNumInstances())

    disable = _refuse("Distributed.disable")
    configureProcessId = _refuse("Distributed.configureProcessId")
    setEnvVarNames = _refuse("Distributed.setEnvVarNames")


class Options(options.Options):
    """`poptorch.Options` with the replicas and the number of this process."""

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            popdist.checkNumIpusPerReplica(ipus_per_replica)
        self.__dict__["_parts"]["Distributed"] = Distributed(self._use)
        options.Options.replicationFactor(self, popdist.getNumLocalReplicas())

    replicationFactor = _refuse("replicationFactor")
    useIpuId = _refuse("useIpuId")
