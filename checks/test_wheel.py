"""What the wheels contain and say about themselves; `make wheel` installs and runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

import packhorse
from packhorse.c_sources import library_name, wheel_libraries
from packhorse.train import recipes

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("packhorse", "packhorse-bench", "packhorse-port")
COMPILED = "packhorse/compiled/"
ADDRESS = "https://example.org/someone/packhorse"
# The targets of links and pictures in Markdown and HTML.
TARGET = re.compile(r"\]\(\s*([^)\s]+)|(?:href|src|srcset)=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels by name, built as the release builds them."""
    folder = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(REPOSITORY / "packages", folder / "packages", ignore=ignored)
    for name in PACKAGES:  # as a clone has them beside the source
        tests = folder / "packages" / name / "tests"
        tests.mkdir()
        (tests / "test_nothing.py").write_text("")
    urls = [sys.executable, str(REPOSITORY / ".ci" / "add_urls.py"), ADDRESS]
    subprocess.run([*urls, str(folder / "packages")], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder)]
    command += [str(folder / "packages" / name) for name in PACKAGES]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return {name: the_wheel(folder, name) for name in PACKAGES}


def the_wheel(folder: Path, name: str) -> Path:
    """The wheel of this package; the library's has the platform in its name."""
    (wheel,) = folder.glob(f"{name.replace('-', '_')}-{packhorse.__version__}-py3-none-*.whl")
    return wheel


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(place))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_source_file_and_nothing_else_is_in_the_wheel(
    name: str, wheels: dict[str, Path]
) -> None:
    source = REPOSITORY / "packages" / name / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheels[name]) as archive:
        content = {place for place in archive.namelist() if ".dist-info/" not in place}
        licenses = [place for place in archive.namelist() if place.endswith("LICENSE")]
    assert {place for place in content if not place.startswith(COMPILED)} == files
    assert f"{name.replace('-', '_')}/py.typed" in content
    assert len(licenses) == 1


def test_the_c_kernels_are_compiled_where_there_is_a_compiler(wheels: dict[str, Path]) -> None:
    with ZipFile(wheels["packhorse"]) as archive:
        compiled = {place for place in archive.namelist() if place.startswith(COMPILED)}
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    expected = wheel_libraries() if has_compiler else []
    names = {
        COMPILED + library_name(source.path, source.defines, variant)
        for source, variant in expected
    }
    assert compiled == names
    assert wheels["packhorse"].name.endswith("-none-any.whl") == (not names)
    assert wheels["packhorse-port"].name.endswith("-none-any.whl")


def test_a_wheel_for_every_machine(tmp_path: Path) -> None:
    """And one that must have the kernels is not built without a compiler."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path)]
    command += [str(REPOSITORY / "packages" / "packhorse")]
    no_compiler = os.environ | {"PATH": str(Path(sys.executable).parent)}
    no_compiler.pop("CC", None)
    subprocess.run(command, check=True, env=no_compiler)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        assert not [place for place in archive.namelist() if place.startswith(COMPILED)]
    required = no_compiler | {"PACKHORSE_BUILD_KERNELS": "required"}
    refused = subprocess.run(command, capture_output=True, text=True, check=False, env=required)
    assert refused.returncode and "there is no C compiler" in refused.stdout + refused.stderr


def test_files_that_are_not_python_are_in_it(wheels: dict[str, Path]) -> None:
    with ZipFile(wheels["packhorse"]) as archive:
        content = set(archive.namelist())
    places = {f"packhorse/train/recipes/{name}.toml" for name in recipes.names()}
    assert places and places <= content
    suffixes = {Path(place).suffix for place in content}
    assert {".c", ".toml", ".html"} <= suffixes


@pytest.mark.parametrize("name", PACKAGES)
def test_the_page_of_the_package_index(name: str, wheels: dict[str, Path]) -> None:
    fields = metadata(wheels[name])
    links = dict(line.split(", ", 1) for line in fields.get_all("Project-URL", []))
    assert links.keys() >= {"Homepage", "Source", "Documentation", "Changelog", "Issues"}
    assert links["Source"] == ADDRESS and links["Issues"] == f"{ADDRESS}/issues"
    assert all(link.startswith("https://") for link in links.values())
    assert fields["License-Expression"] == "Apache-2.0"
    description = str(fields.get_payload())
    assert description.startswith(f"# {'Packhorse' if name == 'packhorse' else name}")
    assert relative_links(description) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_extras_are_those_of_the_project(name: str, wheels: dict[str, Path]) -> None:
    file = REPOSITORY / "packages" / name / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))["project"]
    fields = metadata(wheels[name])
    extras = set(fields.get_all("Provides-Extra", []))
    assert extras == set(project.get("optional-dependencies", {}))
    # Nobody else's torch is replaced: a lower bound and nothing more.
    torch = [line for line in fields.get_all("Requires-Dist", []) if line.startswith("torch")]
    assert torch == (["torch>=2.11"] if name == "packhorse" else [])


def relative_links(text: str) -> list[str]:
    """Targets that lead nowhere outside the repository."""
    targets = [markdown or html for markdown, html in TARGET.findall(text)]
    return [target for target in targets if not target.startswith(("https://", "#"))]


def test_a_relative_link_is_seen() -> None:
    text = '[a](docs/a.md) [b](https://b.org) <img src="x.svg"> ![c](c.png "title") [d](#d)'
    assert relative_links(text) == ["docs/a.md", "x.svg", "c.png"]


def test_the_addresses_are_added_once(tmp_path: Path) -> None:
    project = tmp_path / "one" / "pyproject.toml"
    project.parent.mkdir()
    project.write_text('[project.urls]\nHomepage = "https://a.org"\n')
    command = [sys.executable, str(REPOSITORY / ".ci" / "add_urls.py"), ADDRESS, str(tmp_path)]
    subprocess.run(command, check=True)
    links = tomllib.loads(project.read_text())["project"]["urls"]
    assert links["Homepage"] == "https://a.org" and links["Source"] == ADDRESS
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
