"""`popart`: the enumerations that `Options._Popart.set` takes. Its graphs are refused by name.

The settings have no effect here, and the numbers of their values are this file's own.
"""

from enum import IntEnum
from typing import NoReturn

from packhorse_port.names import POPART_ENUMS
from packhorse_port.notices import line_prefix
from packhorse_port.script import POPART

globals().update({name: IntEnum(name, members) for name, members in POPART_ENUMS.items()})


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"{line_prefix()}popart.{name} is not provided here: {POPART}")
