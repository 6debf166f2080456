"""`make test-machines`: the tests that depend on the machine, on machines that have less.

Each lane takes something away (instructions, the compiler, a folder, the network, cores, an extra)
and runs the tests that are marked `machine`; those of checks/machines know which lane they are in,
by PACKHORSE_TEST_LANE. A lane that cannot be set up here is skipped, and the reason is told.

    make test-machines                            every lane
    make test-machines LANES="avx2 home"          some of them
    make test-machines LANES="haswell --all"      the whole `make test` there
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MARKED = "machine and not slow"
COMPILER = re.compile(r"([\w.]+-)*(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|tcc|icx)(-\d+)?")
CGROUPS = Path("/sys/fs/cgroup")
PERIOD = 100_000  # microseconds; half of it is half a core
# A fresh network namespace has a loopback device that is down; tests of servers need it up.
LOOPBACK = """
import fcntl, os, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
os.execvp(sys.argv[1], sys.argv[1:])
"""
# In a mount namespace of its own: only /tmp is writable, and /dev/shm has Docker's default size.
MOUNTS = (
    "mount --make-rprivate / && mount -o remount,ro,bind / && mount -t tmpfs tmpfs /tmp"
    " && mount -t tmpfs -o size=64m tmpfs /dev/shm"
)


class Unavailable(Exception):
    """Why a lane cannot be set up here."""


@dataclass(frozen=True)
class Surroundings:
    """What a lane changes: variables (None removes one) and the words before the command."""

    variables: dict[str, str | None]
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lane:
    """A machine with less, and the tests that run on it."""

    description: str
    enter: Callable[[Path], Surroundings]
    select: str = MARKED


def variables(**values: str | None) -> Callable[[Path], Surroundings]:
    """A lane that is only a matter of environment variables."""
    return lambda scratch: Surroundings(values)


def no_compiler(scratch: Path) -> Surroundings:
    """A PATH with all programs of this one but C and C++ compilers."""
    programs = scratch / "programs"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            link = programs / program.name
            if not COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return Surroundings({"PATH": str(programs), "CC": None, "CXX": None})


def below_a_file(scratch: Path) -> Path:
    """A folder that not even root can make or write."""
    file = scratch / "file"
    file.write_text("")
    return file / "folder"


def no_cache(scratch: Path) -> Surroundings:
    return Surroundings({"PACKHORSE_CACHE": str(below_a_file(scratch))})


def no_home(scratch: Path) -> Surroundings:
    gone = {"PACKHORSE_CACHE": None, "XDG_CACHE_HOME": None, "XDG_CONFIG_HOME": None}
    return Surroundings({"HOME": str(below_a_file(scratch)), **gone})


def one_thread(scratch: Path) -> Surroundings:
    if not hasattr(os, "sched_getaffinity") or shutil.which("taskset") is None:
        return Surroundings({"OMP_NUM_THREADS": "1"})
    core = min(os.sched_getaffinity(0))
    return Surroundings({"OMP_NUM_THREADS": "1"}, ("taskset", "-c", str(core)))


def no_network(scratch: Path) -> Surroundings:
    for command in (("unshare", "--net"), ("unshare", "--map-root-user", "--net")):
        prefix = (*command, sys.executable, "-c", LOOPBACK)
        if (
            shutil.which("unshare")
            and not subprocess.run([*prefix, "true"], check=False).returncode
        ):
            return Surroundings({"HF_HUB_OFFLINE": "0"}, prefix)
    raise Unavailable("no network namespace can be made: that needs root or user namespaces")


def haswell(scratch: Path) -> Surroundings:
    """A processor with AVX2 and nothing later, whatever a program asks: haswell.c says how."""
    compiler = shutil.which("cc")
    if platform.system() != "Linux" or platform.machine() != "x86_64" or compiler is None:
        raise Unavailable("it needs Linux on x86_64, and a C compiler")
    library = scratch / "haswell.so"
    source = Path(__file__).with_name("haswell.c")
    # Initialized first: other libraries ask for the processor's features as they are loaded.
    build = f"{compiler} -O1 -shared -fPIC -Wl,-z,initfirst".split()
    subprocess.run([*build, "-o", str(library), str(source), "-ldl"], check=True)
    # Not the cache that has compiled code of the real processor.
    changed: dict[str, str | None] = {
        "LD_PRELOAD": str(library),
        "PACKHORSE_CACHE": str(scratch / "cache"),
    }
    if "cpuid_fault" in Path("/proc/cpuinfo").read_text():
        return Surroundings(changed)
    # CPUID cannot be turned off: copies without it lie over the libraries and the compiler.
    if not all(map(shutil.which, ("unshare", "objdump", "readelf"))):
        raise Unavailable("it needs cpuid_fault in /proc/cpuinfo, or unshare and binutils")
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        raise Unavailable("no mount namespace can be made: that needs root")
    print("finding CPUID in all libraries takes some minutes", flush=True)
    copies = scratch / "copies"
    replace = Path(__file__).with_name("replace_cpuid.py")
    subprocess.run([sys.executable, str(replace), str(copies), compiler], check=True)
    return Surroundings(changed, ("unshare", "--mount", "sh", str(copies / "mount.sh")))


def limited_group(scratch: Path, cores: float) -> Path:
    """Make a control group, version 1 or 2, that gets so many cores; `main` removes it."""
    old, new = CGROUPS / "cpu", CGROUPS
    parent, file, value = (
        (old, "cpu.cfs_quota_us", f"{cores * PERIOD:.0f}")
        if old.is_dir()
        else (new, "cpu.max", f"{cores * PERIOD:.0f} {PERIOD}")
    )
    group = parent / scratch.name
    try:
        group.mkdir()
        (group / file).write_text(value)
    except OSError as error:
        raise Unavailable(f"no control group can be made: {error}") from error
    return group


def half_a_core(scratch: Path) -> Surroundings:
    group = limited_group(scratch, 0.5)
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    return Surroundings({"PACKHORSE_TEST_CGROUP": str(group)}, ("sh", "-c", enter, "sh"))


def container(scratch: Path) -> Surroundings:
    """What Docker gives with --cpus 2 --read-only --tmpfs /tmp, and 64 MB of shared memory."""
    prefix = ("unshare", "--mount", "sh", "-c")
    if not shutil.which("unshare") or subprocess.run([*prefix, MOUNTS], check=False).returncode:
        raise Unavailable("no mount namespace can be made: that needs root")
    group = limited_group(scratch, 2)
    # As in a container, the group's own files are at the root of the mount.
    enter = f"echo $$ > {group}/cgroup.procs && mount --bind {group} {group.parent} && {MOUNTS}"
    changed: dict[str, str | None] = {
        "PACKHORSE_TEST_CGROUP": str(group),
        "PACKHORSE_CACHE": "/tmp/cache",
        "HF_HOME": "/tmp/hub",
        "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis",
    }
    return Surroundings(changed, (*prefix, f'{enter} && exec "$@"', "sh"))


LANES = {
    "avx2": Lane("AVX2 only", variables(PACKHORSE_CPU="avx2")),
    "haswell": Lane("AVX2 only, for every program", haswell),
    "avx512": Lane("AVX-512 without bf16", variables(PACKHORSE_CPU="avx512")),
    "no-compiler": Lane("no C or C++ compiler", no_compiler),
    "cache": Lane("a cache that cannot be written", no_cache),
    "home": Lane("a HOME that cannot be written", no_home),
    "ascii": Lane("LANG=C", variables(LANG="C", LC_ALL="C", PYTHONUTF8="0")),
    "thread": Lane("one thread", one_thread),
    "network": Lane("no network", no_network),
    "half": Lane("half a core", half_a_core),
    "container": Lane("two cores, a read-only root, 64 MB /dev/shm", container),
    "extras": Lane("without each extra", variables(), "extra"),
}


def run(name: str, arguments: list[str], whole: bool = False) -> str:
    """Run a lane, its own tests or `make test`; "passed", "failed", or why it was skipped."""
    lane = LANES[name]
    print(f"== {name}: {lane.description}", flush=True)
    with tempfile.TemporaryDirectory(prefix="packhorse-lane-") as folder:
        try:
            surroundings = lane.enter(Path(folder))
        except Unavailable as reason:
            return f"skipped: {reason}"
        with removed_at_the_end(surroundings):
            pytest = [sys.executable, "-m", "pytest", "-q", "-m", lane.select]
            tests = [*pytest, "-p", "no:cacheprovider", *arguments]
            if whole:
                tests = ["make", "test", f"ARGS={shlex.join(arguments)}"]
            status = subprocess.run(
                [*surroundings.prefix, *tests],
                cwd=REPOSITORY,
                env=environment(name, surroundings),
                check=False,
            ).returncode
    return "passed" if status == 0 else f"failed (exit status {status})"


def environment(name: str, surroundings: Surroundings) -> dict[str, str]:
    merged = os.environ | {"PACKHORSE_TEST_LANE": name} | surroundings.variables
    return {key: value for key, value in merged.items() if value is not None}


@contextmanager
def removed_at_the_end(surroundings: Surroundings) -> Iterator[None]:
    try:
        yield
    finally:
        if group := surroundings.variables.get("PACKHORSE_TEST_CGROUP"):
            Path(group).rmdir()


def main(words: list[str]) -> int:
    """Run the lanes that are named, or every one; arguments of pytest follow `--`."""
    names, arguments = words, []
    if "--" in words:
        names, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    whole = "--all" in names
    names = [name for name in names if name != "--all"]
    unknown = [name for name in names if name not in LANES]
    if unknown:
        print(f"unknown lane {unknown[0]!r}; there are {', '.join(LANES)}", file=sys.stderr)
        return 2
    outcomes = {}
    for name in names or LANES:
        start = time.monotonic()
        outcome = run(name, arguments, whole)
        outcomes[name] = f"{outcome}, {time.monotonic() - start:.0f} s"
    print()
    for name, outcome in outcomes.items():
        print(f"{name:12} {LANES[name].description:32} {outcome}")
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
