"""`python -m packhorse_port SCRIPT`: the command `packhorse port`, without the installed script."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "port")
    runpy.run_module("packhorse", run_name="__main__")
