"""The public API: what rooms export is what README, docs and examples use, typed and documented.

A rule is a function that returns complaints, each with the place and the way out. Every rule runs
over the real rooms and pages, where it must be silent, and over small ones that break it, where it
must speak.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "packages/packhorse/src/packhorse"
REFERENCE = REPOSITORY / "docs/reference/api.md"

FACADE = "packhorse"
ROOMS = (
    "packhorse.attention",
    "packhorse.checkpoint",
    "packhorse.data",
    "packhorse.errors",
    "packhorse.hf",
    "packhorse.optim",
    "packhorse.packing",
    "packhorse.runtime",
    "packhorse.sbert",
    "packhorse.tokens",
)
PUBLIC = (FACADE, *ROOMS)
# These pages describe the inside too.
ABOUT_THE_INSIDE = (
    "docs/design.md",
    "docs/decisions.md",
    "docs/extending.md",
    "docs/benchmarks/",
)
# Names with the same form that are no Python: the group of entry points, metadata of Parquet files.
NO_PYTHON = {"packhorse.commands", "packhorse.fingerprint", "packhorse.fingerprint_parts"}

FENCED = re.compile(r"^```(?:python|py)\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.M)
INLINE = re.compile(r"`([^`\n]+)`")
IMPORT = re.compile(r"^\s*(?:from packhorse[\w.]* import|import packhorse)\b", re.M)
CHAIN = re.compile(r"(?<![\w./-])packhorse(?:\.[A-Za-z_]\w*)+")
SENTENCE = re.compile(r"[^a-z\s].*?[.?:](?=\s|$)", re.S)
# What a room's `__init__.py` may name besides its exports.
MACHINERY = {"TYPE_CHECKING", "lazy_exports", "__getattr__", "__dir__", "__all__", "__version__"}


# What a room exports.


def export_complaints(name: str, source: str) -> list[str]:
    """A lazy room's three lists of names are equal, and it holds nothing but exports."""
    tree = ast.parse(source)
    public = literal(tree, "__all__")
    if public is None:
        return [f"{name}: no `__all__`"]
    homes = lazy_homes(tree)
    declared: dict[str, str] = {}
    complaints: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                declared |= dict(imported(statement))
        else:
            others = set(bound(node)) - MACHINERY
            complaints += [
                f"{name}: {unexported} is no export; move it" for unexported in sorted(others)
            ]
    if declared != homes:
        differing = sorted({key for key, _ in declared.items() ^ homes.items()})
        complaints.append(f"{name}: imports and lazy_exports differ in {differing}")
    if set(public) - {"__version__"} != set(homes):
        differing = sorted(set(public) - {"__version__"} ^ set(homes))
        complaints.append(f"{name}: `__all__` and lazy_exports differ in {differing}")
    return complaints


def literal(tree: ast.Module, name: str) -> Any:
    """The value that a module assigns to a name, if it is written out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def lazy_homes(tree: ast.Module) -> dict[str, str]:
    """The module of each name that `lazy_exports` is called with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_exports":
            modules = ast.literal_eval(node.args[1])
            return {name: module for module, names in modules.items() for name in names}
    return {}


def imported(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, str(statement.module)


def bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    for part in ast.walk(node):
        if isinstance(part, ast.alias):
            yield (part.asname or part.name).split(".")[0]
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


def dir_complaints(module: ModuleType) -> list[str]:
    """What `dir` shows is `__all__`, and every name of it is there."""
    public = list(module.__all__)
    shown = [name for name in dir(module) if not name.startswith("__") or name in public]
    complaints = [
        f"{module.__name__}: {name} is in only one of dir() and `__all__`"
        for name in sorted(set(shown) ^ set(public))
    ]
    return complaints + [
        f"{module.__name__}: there is no {name}" for name in public if not hasattr(module, name)
    ]


# How its names are documented and typed.


def documentation_complaints(name: str, value: Any, comment: str | None = None) -> list[str]:
    """A public object, and each public method of a class, has a docstring that begins a sentence.

    comment: the docstring below an assignment, for values that have none of their own.
    """
    if not callable(value):
        text = comment
    else:
        text = inspect.getdoc(value)
        generated = dataclasses.is_dataclass(value) and str(text).startswith(f"{value.__name__}(")
        if generated or (isinstance(value, type) and "__doc__" not in vars(value)):
            text = None
    complaints = [] if text and SENTENCE.match(text) else [f"{name}: no sentence says what it is"]
    if isinstance(value, type):
        for method, function in own_functions(value):
            if not method.startswith("_") and not SENTENCE.match(function.__doc__ or ""):
                complaints.append(f"{name}.{method}: no sentence says what it does")
    return complaints


def own_functions(value: type) -> Iterator[tuple[str, Any]]:
    """The functions of a class of ours, those of its methods, properties and class methods."""
    for name, member in vars(value).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(function) and function.__module__.startswith("packhorse."):
            yield name, function


def type_complaints(name: str, value: Any) -> list[str]:
    """Every parameter and result of a public function, or of a class's methods, has its type."""
    functions = [("", value)] if inspect.isfunction(value) else []
    if isinstance(value, type):
        functions = [
            (f".{method}", function)
            for method, function in own_functions(value)
            if not method.startswith("_") or method in ("__init__", "__call__")
        ]
    complaints: list[str] = []
    for method, function in functions:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        missing = [
            parameter.name
            for position, parameter in enumerate(parameters)
            if parameter.annotation is parameter.empty
            and not (position == 0 and parameter.name in ("self", "cls"))
        ]
        if signature.return_annotation is signature.empty:
            missing.append("the result")
        complaints += [f"{name}{method}: no type for {which}" for which in missing]
    return complaints


def attribute_comment(source: str, name: str) -> str | None:
    """The docstring below the assignment of a module's attribute."""
    body = ast.parse(source).body
    for node, after in pairwise(body):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if target is not None and ast.unparse(target) == name and isinstance(after, ast.Expr):
            return ast.literal_eval(after.value)
    return None


# What README, docs and examples use.


def snippets(path: Path) -> Iterator[str]:
    """The Python of a file: all of a script, the code blocks of a page."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        yield text
        return
    yield from FENCED.findall(text)
    for block in INDENTED.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if IMPORT.search(block):
            yield inspect.cleandoc("\n" + block)


def used_names(code: str) -> Iterator[str]:
    """The dotted names of packhorse that Python code imports or reaches through an import."""
    tree = ast.parse(code)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == FACADE:
                    yield alias.name
                    aliases[alias.asname or FACADE] = alias.name if alias.asname else FACADE
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == FACADE:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name
                aliases[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in aliases and re.fullmatch(r"[\w.]+", rest):
                yield f"{aliases[first]}.{rest}"


def resolve(name: str, exports: Mapping[str, Iterable[str]]) -> tuple[str, str] | str | None:
    """The room and the export that a dotted name begins with; None for a room; else a complaint."""
    parts = name.split(".")
    room = FACADE
    while len(parts) > len(room.split(".")):
        following = parts[len(room.split("."))]
        if f"{room}.{following}" in exports:
            room = f"{room}.{following}"
        elif following in exports[room]:
            return room, following
        else:
            return f"{name}: {following} is no public name of {room}"
    return None


def pages() -> list[Path]:
    """README, docs, examples and tutorials."""
    docs = sorted((REPOSITORY / "docs").rglob("*.md"))
    readmes = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("packages/*/README.md"))]
    scripts = sorted((REPOSITORY / "examples").rglob("*.py"))
    course = [
        path
        for path in sorted((REPOSITORY / "tutorials").rglob("*"))
        if path.suffix in (".md", ".py")
    ]
    return [*readmes, *docs, *scripts, *course]


def names_on(path: Path) -> Iterator[str]:
    """All names of packhorse that a page or script shows to users."""
    for code in snippets(path):
        yield from used_names(code)
    place = path.relative_to(REPOSITORY).as_posix()
    if path.suffix == ".md" and not place.startswith(ABOUT_THE_INSIDE):
        for code in INLINE.findall(path.read_text("utf-8")):
            yield from set(CHAIN.findall(code)) - NO_PYTHON


@pytest.fixture(scope="module")
def exports() -> dict[str, list[str]]:
    return {room: list(import_module(room).__all__) for room in PUBLIC}


@pytest.mark.parametrize("room", PUBLIC)
def test_a_room_exports_what_it_lists(room: str) -> None:
    module = import_module(room)
    assert module.__file__ is not None
    if Path(module.__file__).name == "__init__.py":
        assert export_complaints(room, Path(module.__file__).read_text("utf-8")) == []
    assert dir_complaints(module) == []


@pytest.mark.parametrize("room", PUBLIC)
def test_every_public_name_is_documented_and_typed(room: str) -> None:
    module = import_module(room)
    homes = lazy_homes(ast.parse(Path(str(module.__file__)).read_text("utf-8")))
    complaints: list[str] = []
    for name in module.__all__:
        if name == "__version__":
            continue
        comment = None
        if name in homes:
            home = Path(str(import_module(homes[name]).__file__))
            comment = attribute_comment(home.read_text("utf-8"), name)
        value = getattr(module, name)
        complaints += documentation_complaints(f"{room}.{name}", value, comment)
        complaints += type_complaints(f"{room}.{name}", value)
    assert complaints == []


def test_every_other_room_says_that_it_is_internal() -> None:
    for path in sorted(SOURCE.glob("*/__init__.py")):
        room = f"{FACADE}.{path.parent.name}"
        tree = ast.parse(path.read_text("utf-8"))
        internal = "\nInternal: " in str(ast.get_docstring(tree))
        assert internal == (room not in ROOMS), room
        assert (literal(tree, "__all__") is not None) == (room in ROOMS), room


def test_pages_and_examples_use_public_names_only(exports: dict[str, list[str]]) -> None:
    complaints = [
        f"{path.relative_to(REPOSITORY)}: {result}"
        for path in pages()
        for name in names_on(path)
        if isinstance(result := resolve(name, exports), str)
    ]
    assert complaints == []


def test_pages_show_every_public_name(exports: dict[str, list[str]]) -> None:
    """The reference has every room; the names of `packhorse` itself stand in its first lines."""
    text = REFERENCE.read_text("utf-8")
    assert sorted(re.findall(r"^::: ([\w.]+)$", text, re.M)) == sorted(ROOMS)
    shown = set(INLINE.findall(text))
    assert set(exports[FACADE]) - {"__version__"} <= shown
    used = {resolve(name, exports) for path in pages() for name in names_on(path)}
    assert {(FACADE, "load"), ("packhorse.packing", "Packed")} <= used, "nothing was read"


ROOM = """
from typing import TYPE_CHECKING
from packhorse.exports import lazy_exports
if TYPE_CHECKING:
    from packhorse.packing.batch import Packed
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"packhorse.packing.batch": ["Packed"]})
__all__ = ["Packed"]
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("__all__ =", "names ="),
        ('["Packed"]\n', '["Packed", "plan"]\n'),
        ("import Packed", "import Packed, Other"),
        ('batch": [', 'online": ['),
        ("__all__ =", "import os\n__all__ ="),
        ("__all__ =", "def late() -> None: ...\n__all__ ="),
        ("__all__ =", "LIMIT = 3\n__all__ ="),
    ],
)
def test_a_room_with_other_names_is_caught(before: str, after: str) -> None:
    assert export_complaints("room", ROOM) == []
    assert before in ROOM
    assert export_complaints("room", ROOM.replace(before, after))


def test_a_dir_that_differs_is_caught() -> None:
    room = ModuleType("room")
    vars(room).update({"__all__": ["plan"], "plan": 1})
    assert dir_complaints(room) == []
    vars(room)["other"] = 2
    assert dir_complaints(room)
    del vars(room)["other"], vars(room)["plan"]
    assert dir_complaints(room)


@dataclasses.dataclass
class Silent:
    number: int


class Partly:
    """A class of which one method says nothing."""

    def told(self, number: int) -> int:
        """Return the number."""
        return number

    def untold(self, number: int) -> int:
        return number


class Untyped(Partly):
    """A class with a method without types."""

    def told(self, number, *others) -> int:  # type: ignore[no-untyped-def]
        """Return the number."""
        return number


def untyped(number: int):
    """Return nothing."""


def test_what_says_nothing_or_has_no_type_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (Partly.told, Partly.untold, Untyped.told):
        monkeypatch.setattr(function, "__module__", "packhorse.room")
    assert documentation_complaints("Silent", Silent)
    assert documentation_complaints("Partly", Partly) == [
        "Partly.untold: no sentence says what it does"
    ]
    assert documentation_complaints("TABLE", {"a": 1})
    assert documentation_complaints("TABLE", {"a": 1}, "The letters by number.") == []
    assert type_complaints("Partly", Partly) == []
    assert len(type_complaints("Untyped", Untyped)) == 2
    assert type_complaints("untyped", untyped) == ["untyped: no type for the result"]


@pytest.mark.parametrize(
    "code",
    [
        "from packhorse.packing.batch import Packed",
        "from packhorse.packing import as_integer",
        "from packhorse import device",
        "import packhorse\npackhorse.encode()",
        "import packhorse.hf as room\nroom.attention.register()",
        "from packhorse import attention\nattention.NO_BIAS",
    ],
)
def test_a_private_name_on_a_page_is_caught(
    code: str, exports: dict[str, list[str]], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    for text in (f"```python\n{code}\n```\n", "Write:\n\n" + indent(code + "\n", "    ")):
        page.write_text(text, "utf-8")
        names = [name for block in snippets(page) for name in used_names(block)]
        assert any(isinstance(resolve(name, exports), str) for name in names)


def test_a_public_name_on_a_page_passes(exports: dict[str, list[str]]) -> None:
    code = "import packhorse\nfrom packhorse import attention, hf as room\nroom.register()\n"
    code += "attention.pick(1)\npackhorse.load('x').embed([]).shape\npackhorse.Packed.build"
    results = [resolve(name, exports) for name in used_names(code)]
    assert ("packhorse.hf", "register") in results and (FACADE, "Packed") in results
    assert not any(isinstance(result, str) for result in results)
