"""`python -m packhorse`: the command line, which also starts the ranks of a training run.

A rank exits without finalizing the interpreter: everything is written by then, and torch's threads
may still run while they are destroyed, which sometimes aborts a process that has succeeded.
"""

import os
import sys

from packhorse.cli import main

if __name__ == "__main__":
    code = main()
    if "PACKHORSE_LAUNCHER" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
