"""Other processes, as Linux tells of them: who is there, whose child, on which addresses."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def alive(pid: int) -> bool:
    """There, and more than an entry that nobody has asked about yet."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def command_line(pid: int) -> str:
    """Its command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def family(pid: int) -> set[int]:
    """The process, its children, theirs, and so on."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    result, size = {pid}, 0
    while len(result) > size:
        size = len(result)
        result |= {child for child, parent in parents.items() if parent in result}
    return result


def listening(pids: set[int]) -> list[str]:
    """The addresses on which these processes wait for others."""
    hosts = {}
    for family, path in (socket.AF_INET, "/proc/net/tcp"), (socket.AF_INET6, "/proc/net/tcp6"):
        for line in Path(path).read_text().splitlines()[1:]:
            _, here, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                words = bytes.fromhex(here.partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                hosts[inode] = socket.inet_ntop(family, packed).removeprefix("::ffff:")
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(file))
            except OSError:
                continue
    return [host for inode, host in hosts.items() if f"socket:[{inode}]" in sockets]
