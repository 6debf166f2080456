"""The six flows and the words of docs/design.md, held against the source.

A flow names functions, classes and modules. Each of them must exist, and each function or class
must be used by a module of the same flow: a step that nothing there reaches is no part of it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("packhorse", "packhorse-port", "packhorse-bench")
DESIGN = REPOSITORY / "docs" / "design.md"
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
NO_SOURCE = ("poptorch", "poptorch.trainingModel")  # what a script writes


@dataclass
class SourceIndex:
    """What the modules of all packages define and use, by dotted name of the module."""

    defined: dict[str, set[str]] = field(default_factory=dict)
    used: dict[str, set[str]] = field(default_factory=dict)
    members: dict[str, tuple[str, set[str]]] = field(default_factory=dict)  # of a class: module, …

    def add(self, module: str, tree: ast.Module) -> None:
        """Read a module."""
        self.defined[module] = defined_names(tree.body)
        used: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.alias):
                used.add(node.name)
                self.defined[module].add(node.name)  # a room's exports
        self.used[module] = used
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.members[node.name] = (module, defined_names(node.body))

    def find(self, name: str) -> str | None:
        """The module that a name leads to; None if there is no such thing.

        It is a module, what a module defines, or a class, with or without a member.
        """
        for full in (name, f"packhorse.{name}"):
            if full in self.defined:
                return full
            module, _, attribute = full.rpartition(".")
            if attribute in self.defined.get(module, ()):
                return module
        owner, _, member = name.partition(".")
        module, members = self.members.get(owner, (None, set()))
        return module if not member or member in members else None

    def is_module(self, name: str) -> bool:
        """Whether a name is that of a module."""
        return name in self.defined or f"packhorse.{name}" in self.defined


def defined_names(body: list[ast.stmt]) -> set[str]:
    """The names that the statements of a module or class bind."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def flow_problems(flow: str, index: SourceIndex) -> list[str]:
    """What a flow names that does not exist, or that none of its modules uses."""
    names = [name for name in CODE.findall(flow) if DOTTED.fullmatch(name)]
    places = {name: index.find(name) for name in names if name not in NO_SOURCE}
    problems = [f"there is no {name}" for name, place in places.items() if place is None]
    known = {name: place for name, place in places.items() if place is not None}
    used = {name for place in known.values() for name in index.used[place]}
    steps = [name for name in known if not index.is_module(name)]
    # The first step is where the flow begins.
    return problems + [
        f"nothing in the flow uses {name}"
        for name in steps[1:]
        if name.rpartition(".")[2] not in used
    ]


def flows() -> list[str]:
    """The six paragraphs, without their titles."""
    section = DESIGN.read_text("utf-8").partition("## Six flows")[2].partition("\n## ")[0]
    titled = re.split(r"\n(?=\d\. )", section)[1:]
    return [re.sub(r"\*\*.*?\*\*", "", flow) for flow in titled]


@pytest.fixture(scope="module")
def source() -> SourceIndex:
    index = SourceIndex()
    for package in PACKAGES:
        root = REPOSITORY / "packages" / package / "src"
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            index.add(name.removesuffix(".__init__"), ast.parse(path.read_text("utf-8")))
    return index


def test_the_flows_are_those_of_the_source(source: SourceIndex) -> None:
    assert len(flows()) == 6
    assert [problem for flow in flows() for problem in flow_problems(flow, source)] == []


def test_the_words_are_those_of_the_source(source: SourceIndex) -> None:
    text = DESIGN.read_text("utf-8").partition("## The words")[2]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    names = [name for row in rows for name in CODE.findall(row.rsplit("|", 2)[1])]
    used = set().union(*source.used.values())  # `max_per_pack` is an argument
    missing = [name for name in names if source.find(name) is None and name not in used]
    assert len(names) > 15 and missing == []


def test_a_step_that_is_not_there_is_noticed() -> None:
    """The control."""
    index = SourceIndex()
    index.add("packhorse.cli", ast.parse("from packhorse.model import run\ndef main(): run()"))
    model = "def run(): ...\ndef stop(): ...\nclass Model:\n    size: int"
    index.add("packhorse.model", ast.parse(model))
    assert flow_problems("`cli.main` → `model.run` of `packhorse.model`", index) == []
    assert flow_problems("`cli.main` → `model.walk`", index) == ["there is no model.walk"]
    assert flow_problems("`cli.main` → `model.run` → `model.stop`", index) == [
        "nothing in the flow uses model.stop"
    ]
    assert index.find("Model.size") == "packhorse.model" and index.find("Model.width") is None
