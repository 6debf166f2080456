"""The ground under the source: light imports, public names, pins, and texts that stay true.

As in test_house.py a rule about texts is a function that returns complaints, and each has a text
that breaks it on purpose.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import packhorse

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = REPOSITORY / "packages"
LIBRARY = PACKAGES / "packhorse" / "pyproject.toml"
HEAVY = {"matplotlib", "numpy", "pyarrow", "scipy", "tokenizers", "torch", "transformers"}
# Written apart, so that this file does not complain of itself.
FOLDERS = "|".join(("work", "root", "home", "opt/" + "wheels", "opt/" + "pypi", "tmp/" + "ph"))
MACHINE = re.compile(
    rf"(?<![\w.*)}}])/(?:{FOLDERS})\b/?"
    r"|https?://(?!localhost|testserver)[\w-]+(?=[:/\s\"')])"
    r"|\b[\w-]+\.(?:internal|lan|corp)\b(?!\()"
    r"|\b(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b"
)


def texts() -> dict[str, str]:
    """Every text file of the repository, tracked or about to be, by its place."""
    git = shutil.which("git")
    if git is None or not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout: cannot tell our files from others")
    command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip(f"git cannot list our files: {listed.stderr.strip()}")
    texts = {}
    for place in filter(None, listed.stdout.split("\0")):
        path = REPOSITORY / place
        if path.is_file() and b"\0" not in (raw := path.read_bytes()):
            texts[place] = raw.decode("utf-8", "replace")
    return texts


def notes(files: dict[str, str]) -> dict[str, str]:
    return {place: text for place, text in files.items() if place.endswith(".md")}


def machine_free(files: dict[str, str]) -> list[str]:
    """Nothing names the machine it was written on."""
    return [
        f"{place}:{number}: {match[0]!r} is a place of one machine"
        for place, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := MACHINE.search(re.sub(r"==[\w.]+", "", line)))  # not of a version
    ]


def benchmark_notes(files: dict[str, str]) -> list[str]:
    """A measured claim says when it was measured, and how to measure it again."""
    required = {
        "a date (2026-01-31)": r"\b20\d\d-[01]\d-[0-3]\d\b",
        "the command that measures it": r"`[^`]*\b(packhorse|make|python3?) [^`]+`",
    }
    return [
        f"{place}: names not {description}"
        for place, text in notes(files).items()
        if place.startswith("docs/benchmarks/") and place != "docs/benchmarks/index.md"
        for description, pattern in required.items()
        if not re.search(pattern, text)
    ]


def links(files: dict[str, str]) -> list[str]:
    """A link to a file of ours leads somewhere."""
    return [
        f"{place}: the link to {target} leads nowhere"
        for place, text in notes(files).items()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        if "://" not in target and not (REPOSITORY / place).parent.joinpath(target).exists()
    ]


RULES: dict[str, Callable[[dict[str, str]], list[str]]] = {
    rule.__name__: rule for rule in (machine_free, benchmark_notes, links)
}
BROKEN = [
    ("machine_free", "Makefile", "cd /" + "work/main"),
    ("machine_free", "docs/limits.md", "see `/" + "root/.cache`"),
    ("machine_free", "pyproject.toml", "find-links = /" + "opt/wheels"),
    ("machine_free", "pyproject.toml", 'index = "http://' + 'mirror:8080/simple"'),
    ("machine_free", "docs/limits.md", "on 10." + "0.0.7 it fails"),
    ("machine_free", "docs/limits.md", "on builder." + "internal it fails"),
    ("benchmark_notes", "docs/benchmarks/encode.md", "Run `packhorse bench encode` today."),
    ("benchmark_notes", "docs/benchmarks/encode.md", "2026-11-15: twice as fast."),
    ("links", "docs/limits.md", "[the design](desing.md)"),
]
SOUND = {
    "Makefile": "/usr/bin/env python3 ../wo"
    + "rk/ https://localhost:80/ http://example.com/wo"
    + "rk/",
    "docs/limits.md": "[the design](design.md#words), [elsewhere](https://example.com), 0.10.0",
    "docs/benchmarks/encode.md": "Measured 2026-11-15:\n```\npackhorse bench encode --json\n```",
}


@pytest.mark.parametrize("rule", RULES)
def test_texts_keep(rule: str) -> None:
    assert RULES[rule](texts()) == []


@pytest.mark.parametrize(("rule", "place", "text"), BROKEN)
def test_a_broken_rule_is_caught(rule: str, place: str, text: str) -> None:
    assert RULES[rule]({place: text})


@pytest.mark.parametrize("rule", RULES)
def test_sound_texts_pass(rule: str) -> None:
    assert RULES[rule](SOUND) == []


def loaded_by(program: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after `program`."""
    report = f"print('LOADED', *(set({sorted(HEAVY)!r}) & sys.modules.keys()))"
    code = f"import sys\ntry:\n    {program}\nexcept SystemExit:\n    pass\n{report}"
    command = [sys.executable, "-W", "error", "-c", code]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
    return set(completed.stdout.splitlines()[-1].split()[1:])


def test_import_is_light() -> None:
    assert loaded_by("import packhorse") == set()


def test_help_is_light() -> None:
    assert loaded_by("from packhorse.cli import main; sys.argv[1:] = ['--help']; main()") == set()


def test_a_heavy_import_is_seen() -> None:
    assert loaded_by("import numpy, packhorse") == {"numpy"}


def test_public_names_are_there() -> None:
    assert packhorse.__all__, "packhorse/__init__.py names what is public"
    assert len(set(packhorse.__all__)) == len(packhorse.__all__)
    for name in packhorse.__all__:
        assert getattr(packhorse, name) is not None
    assert set(packhorse.__all__) <= set(dir(packhorse))
    with pytest.raises(AttributeError):
        _ = packhorse.no_such_name  # pyright: ignore[reportAttributeAccessIssue]


def test_changelog_tells_of_this_version() -> None:
    versions = re.findall(r"^## \[?(\d[^\]\s]*)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert packhorse.__version__ in versions


def test_one_version_for_all_packages() -> None:
    """Each names it, and the two others ask for this one of the library."""
    for name in ("packhorse-port", "packhorse-bench"):
        project = tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())["project"]
        assert project["version"] == packhorse.__version__
        assert f"packhorse=={packhorse.__version__}" in project["dependencies"]
    extras = tomllib.loads(LIBRARY.read_text())["project"]["optional-dependencies"]
    assert extras["port"] == [f"packhorse-port=={packhorse.__version__}"]
    assert extras["bench"] == [f"packhorse-bench=={packhorse.__version__}"]


def distribution(requirement: str) -> str:
    """`name` of `name[extra]>=1`, as an index spells it."""
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-")


def test_what_the_make_targets_install_is_pinned() -> None:
    project = tomllib.loads((LIBRARY).read_text())["project"]
    optional = project["optional-dependencies"]
    bench = tomllib.loads((PACKAGES / "packhorse-bench" / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *optional["plots"], *optional["dev"]]
    requirements += bench["optional-dependencies"]["peers"]
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = {distribution(line): line for line in lines if "==" in line and line[0] != "#"}
    assert {distribution(name) for name in requirements} - pins.keys() == {"packhorse"}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins.values())


LOCKS = sorted((REPOSITORY / "locks").glob("*.txt"))


def locked(path: Path) -> dict[str, str]:
    """Each distribution of a lock, and all that is said of it."""
    entries = re.split(r"\n(?=\S)", path.read_text().strip())
    return {distribution(entry): entry for entry in entries}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_hashes_and_the_pins_of_the_constraints(path: Path) -> None:
    """`make lock` has been run since constraints.txt was changed."""
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = {distribution(line): line.split("==")[1] for line in constraints if "==" in line}
    for name, entry in locked(path).items():
        version = entry.split("==")[1].split()[0]
        assert "--hash=sha256:" in entry, name
        assert version == pins.get(name, version), name


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("demo", ["plots"]), ("serve", ["serve"]), ("serve,cluster", ["serve", "cluster"])],
)
def test_a_lock_has_what_the_package_asks_for(lock: str, extras: list[str]) -> None:
    project = tomllib.loads((LIBRARY).read_text())["project"]
    requirements = [*project["dependencies"], "hatchling"]
    requirements += [name for extra in extras for name in project["optional-dependencies"][extra]]
    has = locked(REPOSITORY / "locks" / f"{lock}.txt").keys()
    assert {distribution(name).replace(".", "-") for name in requirements} - has == {"torch"}
    assert "torch" in locked(REPOSITORY / "locks" / "torch.txt")
