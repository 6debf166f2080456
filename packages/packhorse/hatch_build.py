"""Compile the C kernels into the wheel, if there is a compiler.

Without one the wheel has no compiled code and is for every machine; its users compile at first use
or run plain torch. An editable install compiles nothing.

    PACKHORSE_BUILD_KERNELS   auto (default), required (fail without them: releases), none
    PACKHORSE_BUILD_PLATFORM  the wheel's platform where CC compiles for another one, for example
                              manylinux_2_17_aarch64 with CC="zig cc -target aarch64-linux-gnu.2.17"
    CC                        the compiler; default cc, gcc or clang
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "src"))
from packhorse import c_sources

sys.path.pop(0)


class KernelBuildHook(BuildHookInterface):
    """Adds compiled libraries to a wheel and the platform to its name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects the files."""
        mode = os.environ.get("PACKHORSE_BUILD_KERNELS", "auto")
        if mode not in ("auto", "required", "none"):
            raise ValueError(f"PACKHORSE_BUILD_KERNELS is {mode!r}; use auto, required or none")
        if version == "editable" or mode == "none":
            return
        self.folder = tempfile.TemporaryDirectory(prefix="packhorse-kernels-")
        problem = compile_all(Path(self.folder.name))
        if problem and mode == "required":
            raise RuntimeError(f"the C kernels cannot be compiled: {problem}")
        if problem:
            self.app.display_warning(f"the wheel has no compiled kernels: {problem}")
            return
        target = c_sources.WHEEL_FOLDER.relative_to(c_sources.PACKAGE.parent).as_posix()
        for library in Path(self.folder.name).iterdir():
            build_data["force_include"][str(library)] = f"{target}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{wheel_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


def compile_all(folder: Path) -> str:
    """Compile every library into `folder`; return why not all of them could be."""
    candidates = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    compiler = next((words for words in candidates if words and shutil.which(words[0])), None)
    libraries = c_sources.wheel_libraries(target_machine())
    if compiler is None:
        return "there is no C compiler"
    if not libraries:
        return f"there are none for {target_machine()}"
    for source, variant in libraries:
        name = c_sources.library_name(source.path, source.defines, variant)
        flags = c_sources.VARIANTS[variant].flags
        command = c_sources.compile_command(
            compiler, source.path, folder / name, flags, source.defines
        )
        # No debugging symbols or paths of the machine that builds.
        result = subprocess.run([*command, "-s"], capture_output=True, text=True, check=False)
        if result.returncode:
            return f"{shlex.join(command)}\n{result.stderr.strip()}"
    return ""


def target_machine() -> str:
    """The machine that the wheel is for, as `platform.machine()` names it there."""
    foreign = os.environ.get("PACKHORSE_BUILD_PLATFORM", "")
    known = (*c_sources.X86, *c_sources.ARM)
    return next((name for name in known if foreign.endswith(f"_{name}")), platform.machine())


def wheel_platform() -> str:
    """The platform part of the wheel's name; auditwheel makes it a manylinux one."""
    name = os.environ.get("PACKHORSE_BUILD_PLATFORM") or sysconfig.get_platform()
    if name.endswith("universal2"):  # of the interpreter; the libraries are for one of the two
        name = f"{name.removesuffix('universal2')}{platform.machine()}"
    return name.replace("-", "_").replace(".", "_")
