"""Copies of programs and libraries in which CPUID is another instruction, which faults.

For processors where Linux cannot turn CPUID off; haswell.c answers the fault in both cases. `int
0xa2` (CD A2), an interrupt that programs may not raise, takes the place of CPUID (0F A2). A
disassembler says which of these pairs of bytes are instructions; the others stay as they are.
"""

from __future__ import annotations

import mmap
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CPUID = b"\x0f\xa2"
FORBIDDEN_INTERRUPT = b"\xcd\xa2"
SECTION = re.compile(r"\] (\S+) +PROGBITS +([0-9a-f]+) ([0-9a-f]+) [0-9a-f]+ \d\d +AX ")


def main(target: Path, programs: list[Path]) -> None:
    """Copy this Python's libraries and the programs, and write mount.sh, which lays them over."""
    folders = (Path(sys.prefix), Path(sys.base_prefix, "lib"))
    files = {file.resolve() for folder in folders for file in folder.rglob("*.so*")}
    files |= {program.resolve() for program in programs}
    candidates = sorted(file for file in files if file.is_file() and has_bytes(file))
    target.mkdir()
    script = ["set -e"]
    with ThreadPoolExecutor(2) as pool:
        for file, places in zip(candidates, pool.map(cpuid_places, candidates), strict=True):
            if places:
                copy = target / f"{len(script)}-{file.name}"
                shutil.copy(file, copy)
                with copy.open("r+b") as stream:
                    for place in places:
                        stream.seek(place)
                        assert stream.read(2) == CPUID, (file, place)
                        stream.seek(place)
                        stream.write(FORBIDDEN_INTERRUPT)
                script.append(shlex.join(["mount", "--bind", str(copy), str(file)]))
    (target / "mount.sh").write_text("\n".join([*script, 'exec "$@"']) + "\n")


def has_bytes(file: Path) -> bool:
    """Whether a file is an ELF file with these two bytes somewhere."""
    with file.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            return False
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(CPUID) >= 0


def cpuid_places(file: Path) -> list[int]:
    """Where in the file the instruction is."""
    return sorted(place for section in code_sections(file) for place in places_in(file, *section))


def code_sections(file: Path) -> Iterator[tuple[str, int, int]]:
    """Name, address and place in the file of each section with instructions."""
    table = subprocess.run(
        ["readelf", "-SW", str(file)], capture_output=True, text=True, check=False
    ).stdout
    for name, address, offset in SECTION.findall(table):
        yield name, int(address, 16), int(offset, 16)


def places_in(file: Path, section: str, address: int, offset: int) -> Iterator[int]:
    # grep reads the gigabytes that objdump writes; most lines are of no interest here.
    pipe = 'objdump -d -w --no-show-raw-insn -j "$1" "$0" | grep -wP "\\tcpuid"'
    listing = subprocess.run(
        ["sh", "-c", pipe, str(file), section], capture_output=True, text=True, check=False
    ).stdout
    for line in listing.splitlines():
        yield int(line.split(":")[0], 16) - address + offset


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
