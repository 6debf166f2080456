"""`python -m packhorse`: the command line, and what a rank of a training run is started by.

A rank leaves without tearing the interpreter down: all it had to write is written, and torch's own
threads may still run when they are destroyed, which now and then aborts a run that is done.
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
