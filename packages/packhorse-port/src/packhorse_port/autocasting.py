"""`poptorch.autocasting`: which operations PopTorch's `autocast` ran in half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packhorse_port.notices import log_once


class Policy:
    """Lists of operations; kept, without effect: torch.autocast has lists of its own."""

    def __init__(
        self,
        fp16: Sequence[Any] = (),
        fp32: Sequence[Any] = (),
        promote: Sequence[Any] = (),
        demote: Sequence[Any] = (),
    ) -> None:
        log_once("autocasting.Policy", "autocasting.Policy has no effect: torch's lists are used")
        self.fp16 = list(fp16)
        self.fp32 = list(fp32)
        self.promote = list(promote)
        self.demote = list(demote)
