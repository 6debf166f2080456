"""`python -m packhorse_port SCRIPT`: the command `packhorse port`, without its script installed.

Imports point down, and the command line is above this room; so it is started by name, as Python
itself would start it.
"""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "port")
    runpy.run_module("packhorse", run_name="__main__")
