"""What the site makes from code: the references of commands and routes, the benchmark notes."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Fill in the marked places of three pages."""
    if page.file.src_uri == "reference/commands.md":
        return markdown.replace("<!-- commands -->", commands())
    if page.file.src_uri == "reference/http.md":
        document = json.loads((Path(config["docs_dir"]) / "openapi.json").read_bytes())
        return markdown.replace("<!-- routes -->", routes(document))
    if page.file.src_uri == "benchmarks/index.md":
        return markdown.replace("<!-- notes -->", notes(Path(config["docs_dir"]) / "benchmarks"))
    return markdown


def commands() -> str:
    """The help of each command, as the terminal shows it."""
    from packhorse import cli

    os.environ["COLUMNS"] = "100"
    sections = []
    for name in sorted({*cli.COMMANDS, *cli.PLUGINS}):
        sections.append(f"## packhorse {name}\n\n```text\n{_help(name)}\n```\n")
        place, _ = cli._commands(name)[name]
        for word in _subcommands(place):
            sections.append(f"### packhorse {name} {word}\n\n```text\n{_help(name, word)}\n```\n")
    return "\n".join(sections)


def _help(*words: str) -> str:
    from packhorse import cli

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main([*words, "--help"])
    return output.getvalue().rstrip()


def _subcommands(place: str) -> list[str]:
    """Names below a command that is a group, as `packhorse data build`."""
    from importlib import import_module

    module, _, name = place.partition(":")
    if name != "app":
        return []
    return sorted(word for word in import_module(module).app if not word.startswith("-"))


def routes(document: dict[str, Any]) -> str:
    """A table of routes per dialect, from an OpenAPI document."""
    schemas = document["components"]["schemas"]
    tables: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            fields = ", ".join(f"`{name}`" for name in _required_fields(operation, schemas))
            row = f"| `{method.upper()} {path}` | {fields} | {operation['description']} |"
            tables.setdefault(operation["tags"][0], []).append(row)
    head = "| route | required fields | answer |\n|---|---|---|"
    return "\n\n".join("\n".join([f"## {tag}\n", head, *rows]) for tag, rows in tables.items())


def _required_fields(operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    """The fields that a route's body must have; none if it takes no body."""
    if "requestBody" not in operation:
        return []
    content = operation["requestBody"]["content"]["application/json"]["schema"]
    schema = schemas[content["$ref"].rpartition("/")[2]]
    if "oneOf" not in schema:
        return schema.get("required", [])
    bodies = [schemas[body["$ref"].rpartition("/")[2]]["required"] for body in schema["oneOf"]]
    common = [name for name in bodies[0] if all(name in names for names in bodies)]
    others = [name for names in bodies for name in names if name not in common]
    return [*common, "` or `".join(others)]


def notes(folder: Path) -> str:
    """All notes, the latest first."""
    lines = []
    for path in sorted(folder.glob("2*.md"), reverse=True):
        title = path.read_text("utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)
