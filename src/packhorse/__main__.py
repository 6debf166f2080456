"""`python -m packhorse` is `packhorse`."""

import sys

from packhorse.cli import main

if __name__ == "__main__":
    sys.exit(main())
