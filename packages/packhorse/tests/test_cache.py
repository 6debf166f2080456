"""Where compiled code may lie: where nobody else can have put it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packhorse import cache
from packhorse.cache import cache_folder, keep_compiled_code_private, private_folder
from packhorse.errors import InputError
from packhorse.executable import cpp_compiler
from packhorse.processor import features

pytestmark = pytest.mark.skipif(not cache.CHECKS, reason="permissions are of another kind here")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is not made yet."""
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "above" / "cache"))
    return tmp_path / "above" / "cache"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refusal() -> str:
    with pytest.raises(InputError) as error:
        cache_folder()
    assert "chmod" not in str(error.value), "what was planted before stays"
    return str(error.value)


def test_it_is_made_for_the_user_alone_whatever_the_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        assert cache_folder() == root
        folder = private_folder("native")
    finally:
        os.umask(before)
    assert [mode(item) for item in (root.parent, root, folder)] == [0o700] * 3


@pytest.mark.parametrize("open_to", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_refused(root: Path, open_to: int) -> None:
    cache_folder().chmod(open_to)
    if open_to & 0o002 or not cache._is_personal_group(root.stat().st_gid):
        assert f"{root} has mode {open_to:o}" in refusal()


def test_a_folder_above_it_that_others_can_write_is_refused(root: Path) -> None:
    cache_folder()
    root.parent.chmod(0o777)
    assert f"{root.parent} has mode 777" in refusal()
    root.parent.chmod(0o1777)  # as /tmp: others can add, but not replace
    assert cache_folder() == root


def test_links_are_followed_and_what_they_pass_is_looked_at(root: Path, tmp_path: Path) -> None:
    shared, separate = tmp_path / "shared", tmp_path / "own"
    (shared / "inner").mkdir(parents=True)
    separate.mkdir()
    root.parent.mkdir()
    root.symlink_to(separate)
    assert cache_folder() == root
    root.unlink()
    root.symlink_to("../shared/inner")
    assert cache_folder() == root
    shared.chmod(0o777)
    assert f"{shared} has mode 777" in refusal()
    # A link in a folder that others write: it leads to a good one today.
    (shared / "link").symlink_to(separate)
    root.unlink()
    root.symlink_to(shared / "link")
    assert f"{shared} has mode 777" in refusal()


def test_what_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for place in ("file", "file/cache", "circle", "circle/cache"):
        monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / place))
        with pytest.raises(InputError, match="set PACKHORSE_CACHE"):
            cache_folder()


def test_what_was_planted_before_a_folder_was_closed_is_thrown_away(root: Path) -> None:
    folder = private_folder("native")
    (folder / "ours.so").write_text("ours")
    assert [item.name for item in private_folder("native").iterdir()] == ["ours.so"]
    for planted in (0o777, 0o755):
        folder.chmod(planted)
        (folder / "planted.so").write_text("planted")
        assert not list(private_folder("native").iterdir())
        assert mode(folder) == 0o700
    folder.rmdir()
    folder.symlink_to(root.parent)
    assert not private_folder("native").is_symlink()
    assert [item.name for item in root.iterdir()] == ["native"]


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files")
@pytest.mark.parametrize("planted", ["file", "folder", "in a folder"])
def test_a_file_of_another_user_is_thrown_away(root: Path, planted: str) -> None:
    """As an attacker leaves it: the folder itself is ours and closed by now."""
    folder = private_folder("inductor")
    place = folder / "ab" / "planted" if planted == "in a folder" else folder / "planted"
    place.parent.mkdir(exist_ok=True)
    place.mkdir() if planted == "folder" else place.write_text("planted")
    assert place.exists() and private_folder("inductor") == folder and place.exists()
    os.chown(place, 12345, 12345)
    assert not list(private_folder("inductor").iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files")
def test_a_folder_or_a_link_of_another_user_is_refused(root: Path, tmp_path: Path) -> None:
    cache_folder()
    os.chown(root.parent, 12345, 12345)
    assert f"{root.parent} belongs to user 12345" in refusal()
    os.chown(root.parent, 0, 0)
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "moved")
    os.chown(root, 12345, 12345, follow_symlinks=False)
    assert f"{root} belongs to user 12345" in refusal()


def test_torch_and_triton_compile_into_private_folders(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "/tmp/shared")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(root / "inductor-no-avx")
    assert os.environ["TRITON_CACHE_DIR"] == str(root / "triton")


def test_a_launch_does_not_check_folders_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a millisecond of the host, and a layer launches several kernels."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "set below")
    calls: list[str] = []
    monkeypatch.setattr(cache, "private_folder", lambda name: calls.append(name) or name)
    cache.keep_kernels_private.cache_clear()
    for _ in range(3):
        cache.keep_kernels_private()
    assert sorted(calls)[-1] == "triton" and len(calls) == 2
    cache.keep_kernels_private.cache_clear()
    package = Path(cache.__file__).parent
    sources = {path: path.read_text("utf-8") for path in package.rglob("*.py")}
    kernels = [path for path, text in sources.items() if "@triton.jit" in text]
    assert len(kernels) >= 7
    for path in kernels:
        assert "keep_kernels_private()" in sources[path], path
        assert "keep_compiled_code_private" not in sources[path], path


COMPILED = """
import torch
from packhorse import executable, processor
processor.limit()

class Layer(torch.nn.Linear):
    def forward(self, x):
        y = torch.nn.functional.gelu(super().forward(x))
        return torch.nn.functional.layer_norm(y + x, (48,))

layer = Layer(48, 48)
x = torch.linspace(-3, 3, 96 * 48).view(96, 48)
with torch.inference_mode():
    expected = layer(x)
    executable.compile([layer])
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
"""


@pytest.mark.slow  # the compiler is imported and called three times
def test_processors_that_share_a_cache_compute_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not features().avx512 or not cpp_compiler():
        pytest.skip("needs vectors of two widths, and a C++ compiler")
    monkeypatch.setenv("PACKHORSE_CACHE", str(root))
    for level in ("", "avx2", ""):
        monkeypatch.setenv("PACKHORSE_CPU", level)
        subprocess.run([sys.executable, "-c", COMPILED], check=True)
    widths = {folder.name for folder in root.glob("inductor-*")}
    assert widths == {"inductor-avx2", "inductor-avx512"}
