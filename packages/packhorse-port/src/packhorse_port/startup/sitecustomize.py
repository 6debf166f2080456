"""Runs `script.install()` at the start of every Python that `packhorse port` starts.

Python imports the first module named `sitecustomize` on its path when it starts. This one removes
its folder from the path and then imports the next `sitecustomize`, if the system or the user has
one. A Python that cannot import packhorse (another version, started by the script) runs without it.
"""

import contextlib
import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder

FOLDER = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(FOLDER))  # the folder that holds packhorse_port


def begin() -> None:
    """Install the import finder of the packhorse_port that this file is part of."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != FOLDER]
    path = list(sys.path)
    sys.path.append(SOURCE)  # in case packhorse_port is not installed
    with contextlib.suppress(Exception):
        import_module("packhorse_port.script").install()
    sys.path[:] = path
    # With our folder off the path, find_spec finds the sitecustomize that ours was hiding.
    if __name__ in sys.modules and PathFinder.find_spec(__name__):
        del sys.modules[__name__]
        import_module(__name__)


begin()
