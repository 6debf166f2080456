"""`packhorse.port` as 0.1 had it: the package `packhorse_port`, with a warning; gone after 0.2."""

import sys
import warnings
from importlib import import_module

from packhorse.errors import MissingExtra

warnings.warn(
    "packhorse.port is a package of its own; write `import packhorse_port`",
    DeprecationWarning,
    stacklevel=2,
)
try:
    sys.modules[__name__] = import_module("packhorse_port")
except ModuleNotFoundError as error:
    if error.name != "packhorse_port":
        raise
    raise MissingExtra("packhorse-port", "port") from error
