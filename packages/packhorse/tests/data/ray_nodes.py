"""A Ray cluster of two nodes on 127.0.0.1, in a process of its own.

    python ray_nodes.py FOLDER      prints the address, then obeys lines on stdin:
    kill                            the second node, at once, as a power cut would
    add [NAME=VALUE]                another node, whose processes have this variable
    blind PATH                      another node, which sees an empty folder there (needs root)

Each line is answered by one on stdout. It ends, and the cluster with it, when stdin does.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

CLONE_NEWNS = 0x00020000


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 78 << 20, "include_dashboard": False}
    cluster = Cluster(True, head_node_args=small)
    second = cluster.add_node(**small)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        command, _, value = line.strip().partition(" ")
        if command == "kill":
            _kill_workers(second.all_processes["raylet"][0].process.pid)
            cluster.remove_node(second, allow_graceful=False)
        elif command == "blind":
            _hide(value)
        if command != "kill":
            name, sign, value = value.partition("=")
            second = cluster.add_node(**small, env_vars={name: value} if sign else None)
        print("done", flush=True)
    cluster.shutdown()
    ray.shutdown()


def _kill_workers(raylet: int) -> None:
    """They would notice the end of their node only after a while, and finish what they are at."""
    import psutil

    for child in psutil.Process(raylet).children(recursive=True):
        child.kill()


def _hide(path: str) -> None:
    """From the processes that this one starts from now on."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)


if __name__ == "__main__":
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    main()
