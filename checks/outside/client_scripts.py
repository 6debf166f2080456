"""The client scripts below `clients/`: which there are, what they call, and what does not work.

A folder is an environment, with the pinned packages in its `requirements.txt` or `package.json`; a
file `client_*` in it is the script of one client. Nothing is run here: methods are read from the
source, where each is registered by `method("name", "kind")`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "clients"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "clients.md"
REGISTERED = re.compile(
    r"""\bmethod\(\s*(?P<quote>["'])(?P<name>.+?)(?P=quote),\s*"(?P<kind>[^"]+)\""""
)
PACKAGE = re.compile(r"""(?:#|//) package: (\S+)""")
NEEDS = re.compile(r"""(?:#|//) needs: (\S+)""")
HEAD = """# Clients

Client libraries that are run against `packhorse serve` as their users run them: with their
defaults, a base URL and the name of a model. A method works if its answer is that of the library:
vectors equal to `packhorse.load(…).embed(texts)` to 1e-5; rankings, labels, entities and answers
the same. "2,048 texts" are sent as the client sends them, in one request or in several; "a long
text" has more tokens than the model takes, and the client does not shorten it.

The tables are written by `make test-outside PACKHORSE_TEST_CLIENTS=1 PACKHORSE_TEI_PROTO=FOLDER`,
which runs the scripts of `checks/outside/clients`, each in an environment of its own. FOLDER is the
absolute path of `proto` in a clone of text-embeddings-inference, for its gRPC services.
"""
TABLE = "| client | version | method | works |\n| --- | --- | --- | --- |\n"


@dataclass(frozen=True)
class Row:
    """A method of a client, as a script calls it."""

    group: str
    script: str
    package: str
    version: str
    method: str
    kind: str
    needs: str = ""  # an environment variable without which the script cannot run

    @property
    def client(self) -> str:
        return f"{self.group}/{self.script}"

    @property
    def id(self) -> str:
        return f"{self.client}: {self.method}"


@dataclass(frozen=True)
class Difference:
    """A method that does not work, a pattern of the error that it ends with, and why."""

    client: str
    method: str
    error: str
    reason: str


def groups() -> list[Path]:
    """The folders, one per environment."""
    return sorted(path for path in FOLDER.iterdir() if path.is_dir() and any(scripts(path)))


def scripts(group: Path) -> list[Path]:
    """The scripts of an environment, one per client."""
    return sorted(group.glob("client_*"))


def rows() -> list[Row]:
    """Every method of every script."""
    return [row for group in groups() for script in scripts(group) for row in _rows(script)]


def differences() -> list[Difference]:
    """The methods that do not work, from `clients/differences.toml`."""
    document = tomllib.loads((FOLDER / "differences.toml").read_text("utf-8"))
    return [Difference(**table) for table in document.get("difference", [])]


def _rows(script: Path) -> list[Row]:
    source = script.read_text("utf-8")
    package = PACKAGE.search(source)
    assert package, f"{script.name} does not name its package"
    version = pins(script.parent)[package[1]]
    needs = NEEDS.search(source)
    return [
        Row(
            script.parent.name,
            script.stem.removeprefix("client_"),
            package[1],
            version,
            match["name"],
            match["kind"],
            needs[1] if needs else "",
        )
        for match in REGISTERED.finditer(source)
    ]


def pins(group: Path) -> dict[str, str]:
    """The packages of an environment and their versions."""
    if (group / "package.json").exists():
        return json.loads((group / "package.json").read_text("utf-8"))["dependencies"]
    lines = (group / "requirements.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def page(works: dict[str, bool]) -> str:
    """The document: a table per language, from whether each method works."""
    reasons = {(known.client, known.method): known.reason for known in differences()}
    text = HEAD + f"\nOf {len(works)} methods {sum(works.values())} work.\n"
    for title, chosen in _by_language().items():
        text += f"\n## {title}\n\n{TABLE}"
        for row in chosen:
            answer = "yes" if works[row.id] else reasons.get((row.client, row.method), "no")
            text += f"| {row.package} | {row.version} | `{row.method}` | {answer} |\n"
    return text


def _by_language() -> dict[str, list[Row]]:
    """The rows of each language, sorted by package."""
    languages: dict[str, list[Row]] = {"Python": [], "JavaScript": []}
    for row in sorted(rows(), key=lambda row: row.package):
        languages["JavaScript" if row.group == "node" else "Python"].append(row)
    return languages
