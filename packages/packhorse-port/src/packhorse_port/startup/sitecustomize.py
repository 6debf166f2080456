"""What Python runs first where `packhorse port` put this folder on its path: `script.install()`.

Python imports a module of this name at its start, whichever it finds first. This one leaves the
path as it was without it, and then runs the next of its name, where the system or the user has one.
A Python that cannot import packhorse (another version that the script starts) goes on without it.
"""

import contextlib
import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


def begin() -> None:
    """Install the finder of the packhorse that this file belongs to; leave no trace in the path."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != HERE]
    path = list(sys.path)
    sys.path.append(ROOT)  # for those who run packhorse from its folder, not installed
    with contextlib.suppress(Exception):
        import_module("packhorse_port.script").install()
    sys.path[:] = path
    if __name__ in sys.modules and PathFinder.find_spec(__name__):
        del sys.modules[__name__]
        import_module(__name__)


begin()
