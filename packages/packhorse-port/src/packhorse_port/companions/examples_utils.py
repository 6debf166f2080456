"""`examples_utils`: of Graphcore's helpers for its examples the one in their models, `load_lib`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from packhorse_port.names import CUSTOM_OPS
from packhorse_port.notices import line_prefix, log_once


def load_lib(path: str | os.PathLike[str], timeout: int = 600) -> None:
    """Compiles nothing: C++ for an IPU cannot run here; its operations have stand-ins instead."""
    name = Path(path).name
    log_once(
        f"load_lib {name}",
        f"{name} is C++ for an IPU and is not compiled; where the script calls an operation of it,"
        f" {CUSTOM_OPS} names a file with its stand-in",
    )


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"{line_prefix()}examples_utils.{name} is not provided here: it needs an IPU's tools"
    )
