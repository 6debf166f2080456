"""`python -m packhorse.serve.processes engine|front DESCRIPTOR`: how the supervisor starts one."""

import os
import socket
import sys


def main() -> int:
    """Run the process of this kind; the descriptor is its end of the control socket."""
    kind, descriptor = sys.argv[1:]
    from packhorse import processor

    processor.limit()  # before torch is imported
    from packhorse.serve.processes.messages import Control

    control = Control(socket.socket(fileno=int(descriptor)))
    os.set_inheritable(int(descriptor), False)  # compilers that it starts must not hold it open
    if kind == "engine":
        from packhorse.serve.processes import engine as process
    else:
        from packhorse.serve.processes import front as process
    return process.main(control)


sys.exit(main())
