"""The rules of the house (docs/design.md), executable.

A rule about the source is a function from a parsed tree to a list of complaints, each with the
place and the way out. Every rule runs twice: over the packages, where it must be silent, and over
small trees that break it on purpose (`BROKEN`), where it must speak. The source is read as syntax,
never run, so that a lazy import counts as much as one at the top.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = {
    name.replace("-", "_"): REPOSITORY / "packages" / name / "src" / name.replace("-", "_")
    for name in ("packhorse", "packhorse-port", "packhorse-bench")
}

# Highest first; imports point down only, and names on one level do not import each other.
LAYERS = (
    ("__main__", "port"),
    ("cli",),
    ("reports",),
    ("serve", "train", "monitor", "hf", "sbert"),
    ("runtime",),
    ("onnxpack", "checkpoint", "data", "results"),
    ("model",),
    ("attention",),
    ("packing",),
    ("tokens",),
    ("native",),
    ("executable", "dist", "optim", "status"),
    ("device", "exports"),
    (
        "wire",
        "gguf",
        "atomic",
        "json_types",
        "settings",
        "launcher",
        "cache",
        "environment",
        "processor",
        "progress",
    ),
    ("c_sources", "errors"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
ONLY = {"monitor": {"status", "device", "errors"}}
# What the other packages may import: the whole library, or some of its rooms, and each other.
MOVED = {"packhorse.port": "packhorse_port"}  # names of 0.1 that lead to another package
REACH = {
    "packhorse": {"packhorse"},
    "packhorse_bench": {"packhorse", "packhorse_bench", "packhorse_port"},
    "packhorse_port": {
        "packhorse_port",
        "packhorse.atomic",
        "packhorse.cache",
        "packhorse.cli",
        "packhorse.device",
        "packhorse.dist",
        "packhorse.errors",
        "packhorse.executable",
        "packhorse.launcher",
        "packhorse.optim",
        "packhorse.status",
    },
}
DRAWERS = {"base", "common", "core", "helper", "helpers", "misc", "util", "utils"}
MAY_PRINT = re.compile(r"cli(\.py|/.*)|commands/.*|command\.py")
# Reads only what processes that it has started wrote into a queue, as every such queue does.
OWN_PROCESSES = "sbert/pools.py"
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
AT_IMPORT = re.compile(
    r"(torch\.(set_|manual_seed|use_|cuda\.|accelerator\.|backends\.)|logging\.(basicConfig|disable)"
    r"|warnings\.(filter|simplefilter)|os\.(environ\.(set|update|pop|clear)|putenv|make|mkdir)"
    r"|(random|np\.random|numpy\.random)\.seed|signal\.signal|atexit\.register|sys\.path\.|open$)"
)
AMBIENT = re.compile(r"os\.environ|torch\.backends\.|sys\.path|warnings\.")


@dataclass(frozen=True)
class Module:
    """One source file: its place below the package, its dotted name, its syntax."""

    place: str
    name: str
    tree: ast.Module
    lines: int

    @property
    def room(self) -> str:
        return self.name.split(".")[1] if "." in self.name else ""

    def at(self, node: ast.AST, complaint: str) -> str:
        return f"{self.place}:{getattr(node, 'lineno', 1)}: {complaint}"


def read(root: Path) -> dict[str, Module]:
    """Every module under the package folder `root`, by dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        parts = place.with_suffix("").parts
        name = ".".join([root.name, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        text = path.read_text("utf-8")
        modules[name] = Module(place.as_posix(), name, ast.parse(text), len(text.splitlines()))
    return modules


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` of a chain of attributes, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def imports(module: Module, tables: bool = False) -> Iterator[tuple[ast.AST, str]]:
    """Each absolute dotted name that is imported, wherever it stands in the file.

    With `tables` also the modules that `import_module("packhorse.…")` fetches by name.
    """
    package = module.name.split(".")
    if not module.place.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*before, *([node.module] if node.module else [])])
            yield from ((node, f"{source}.{alias.name}") for alias in node.names)
        elif tables and isinstance(node, ast.Call) and (name := fetched(node)):
            yield node, name


def fetched(call: ast.Call) -> str:
    """What `import_module` is asked for, as far as it is written out."""
    if not call.args or dotted(call.func).split(".")[-1] not in {"import_module", "__import__"}:
        return ""
    first = call.args[0]
    first = first.values[0] if isinstance(first, ast.JoinedStr) else first
    return str(first.value).strip(".") if isinstance(first, ast.Constant) else ""


def internal(modules: dict[str, Module], name: str) -> str | None:
    """The module of ours that `name` reaches, or None; what the façade offers is for `layers`."""
    while "." in name and name not in modules:
        name = name.rpartition(".")[0]
    return name if "." in name else None


def layers(modules: dict[str, Module]) -> list[str]:
    """Imports point down; `packhorse/__init__.py` is the façade and may reach everywhere."""
    problems = []
    for module in modules.values():
        package = module.name.split(".")[0]
        for node, name in imports(module, tables=True):
            if module.name in MOVED and name == MOVED[module.name]:
                continue
            if name.split(".")[0] in REACH and not (
                name.split(".")[0] in REACH[package]
                or ".".join(name.split(".")[:2]) in REACH[package]
            ):
                problems.append(module.at(node, f"{package} must not import {name}"))
        if package != "packhorse":
            continue
        if module.room and module.room not in LEVEL:
            problems.append(f"{module.place}: room {module.room!r} has no layer; give it one here")
            continue
        for node, name in imports(module, tables=True):
            if name.split(".")[0] != "packhorse" or name == "packhorse.__version__":
                continue
            target = [*name.split("."), ""][1]
            if module.room and target != module.room and not may_import(module.room, target):
                problems.append(module.at(node, f"{module.room} must not import {name}"))
    return problems


def may_import(room: str, target: str) -> bool:
    if room in ONLY:
        return target in ONLY[room]
    return target in LEVEL and LEVEL[room] < LEVEL[target]


def cycles(modules: dict[str, Module]) -> list[str]:
    """No module reaches itself through import statements, lazy ones included."""
    graph = {
        name: {
            reached
            for _, target in imports(module)
            if (reached := internal(modules, target)) and reached != name
        }
        for name, module in modules.items()
    }
    # What imports none of those left, or is imported by none, is on no cycle: peel it off.
    while peeled := [
        name
        for name, targets in graph.items()
        if not targets & graph.keys() or not any(name in others for others in graph.values())
    ]:
        for name in peeled:
            del graph[name]
    return [f"{name}: on an import cycle, or between two" for name in graph]


def names(modules: dict[str, Module]) -> list[str]:
    """A module is named after what it does."""
    return [
        f"{module.place}: name it after what it does"
        for module in modules.values()
        if DRAWERS & set(module.name.split("."))
    ]


def docstrings(modules: dict[str, Module]) -> list[str]:
    """A module opens with what it does."""
    return [
        f"{module.place}:1: no docstring that says what the module does"
        for module in modules.values()
        if not ast.get_docstring(module.tree)
    ]


def signatures(modules: dict[str, Module]) -> list[str]:
    """Public functions and methods are typed, parameters and result."""
    return [
        module.at(function, f"{function.name}: no type for {', '.join(missing)}")
        for module in modules.values()
        for function, method in public_functions(module.tree.body)
        if (missing := untyped(function, method))
    ]


def public_functions(body: list[ast.stmt], method: bool = False) -> Iterator[tuple]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_") or (method and node.name.endswith("__")):
                yield node, method and "staticmethod" not in map(dotted, node.decorator_list)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, method=True)


def untyped(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args][1 if method else 0 :]
    annotated = [*named, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    missing = [arg.arg for arg in annotated if arg is not None and arg.annotation is None]
    return missing if function.returns else [*missing, "the result"]


def asserts(modules: dict[str, Module]) -> list[str]:
    """A user's mistake raises one of our errors; `python -O` would drop an assert."""
    return [
        module.at(node, "raise an error of packhorse.errors instead of assert")
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
    ]


def prints(modules: dict[str, Module]) -> list[str]:
    """Library code returns; only the commands and their reports speak."""
    return [
        module.at(node, "print belongs to cli.py and bench/report.py")
        for module in modules.values()
        if not MAY_PRINT.fullmatch(module.place)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]


def unpickling(modules: dict[str, Module]) -> list[str]:
    """No general unpickler is within reach of a file that a user hands us."""
    problems = []
    for module in modules.values():
        if module.place == OWN_PROCESSES:
            continue
        for node, name in imports(module):
            if name.split(".")[0] in UNPICKLERS or name == "torch.load":
                problems.append(module.at(node, f"{name} can run code from a file"))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
                problems.append(module.at(node, "torch.load can run code from a file"))
            if isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True":
                problems.append(module.at(node.value, "allow_pickle can run code from a file"))
    return problems


def import_effects(modules: dict[str, Module]) -> list[str]:
    """Importing changes nothing: no threads, seeds, devices, logging, environment, files."""
    problems = []
    for module in modules.values():
        for node in at_import(module.tree):
            if isinstance(node, ast.Call) and AT_IMPORT.match(dotted(node.func)):
                problems.append(module.at(node, f"{dotted(node.func)} runs at import"))
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
                targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
                for target in targets:
                    place = dotted(target.value if isinstance(target, ast.Subscript) else target)
                    if AMBIENT.match(place):
                        problems.append(module.at(node, f"{place} is written at import"))
    return problems


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in [*child.decorator_list, *child.args.defaults, *child.args.kw_defaults]:
                if part is not None:
                    yield part
                    yield from at_import(part)
        elif not isinstance(child, ast.Lambda):
            yield child
            yield from at_import(child)


# Made here, and extended by the port: PopTorch's LAMB is a class that scripts extend.
EXTENDED = {"packhorse.optim.LAMB"}


def abstract_or_final(modules: dict[str, Module]) -> list[str]:
    """A class of ours that others extend is never made itself."""
    extended, created = {}, {}
    for module in modules.values():
        known = {node.name for node in module.tree.body if isinstance(node, ast.ClassDef)}
        brought = {name.rpartition(".")[2]: name for _, name in imports(module)}
        for node in ast.walk(module.tree):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                base = dotted(base.value if isinstance(base, ast.Subscript) else base)
                extended[full_name(base, module, known, brought)] = module.at(node, "extends ")
            if isinstance(node, ast.Call):
                created[full_name(dotted(node.func), module, known, brought)] = module.at(node, "")
    return [
        f"{place}{name}, which is made at {created[name]}compose instead"
        for name, place in extended.items()
        if name in created and name.split(".")[0] in PACKAGES and name not in EXTENDED
    ]


def full_name(name: str, module: Module, known: set[str], brought: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return f"{module.name}.{name}" if first in known else brought.get(first, first) + dot + rest


def extras(modules: dict[str, Module]) -> list[str]:
    """A MissingExtra names an extra that exists and brings the package."""
    offered = tomllib.loads((PACKAGES["packhorse"].parents[1] / "pyproject.toml").read_text())[
        "project"
    ]
    problems = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and dotted(node.func).endswith("MissingExtra"):
                values = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if len(values) == 2:
                    brings = offered["optional-dependencies"].get(values[1], [])
                    if values[0] not in {distribution(line) for line in brings}:
                        problems.append(module.at(node, f"extra {values[1]!r} has no {values[0]}"))
    return problems


def distribution(requirement: str) -> str:
    """`name` of `name[extra]>=1`, as an index spells it."""
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-")


def class_names(modules: dict[str, Module]) -> list[str]:
    """No two classes of a package share a name."""
    first: dict[str, str] = {}
    problems = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                place = first.setdefault(node.name, module.place)
                if first[node.name] != module.place:
                    problems.append(module.at(node, f"{place} has a {node.name} too; rename one"))
    return problems


def literal_splats(modules: dict[str, Module]) -> list[str]:
    """No `*(a, b)` inside a list or call: the items can stand there themselves."""
    return [
        module.at(node, "write the items of this splat without it")
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    ]


RULES: dict[str, Callable[[dict[str, Module]], list[str]]] = {
    rule.__name__: rule
    for rule in (
        layers,
        cycles,
        names,
        docstrings,
        signatures,
        asserts,
        prints,
        unpickling,
        import_effects,
        abstract_or_final,
        extras,
        class_names,
        literal_splats,
    )
}

DOC = '"""A module."""\n'
MADE = DOC + "class A: ...\nclass B(A[int]): ...\n"
BROKEN: list[tuple[str, dict[str, str]]] = [
    ("layers", {"device.py": DOC + "import packhorse.tokens", "tokens.py": DOC}),
    ("layers", {"device.py": DOC + "def f() -> None:\n    from packhorse.model import bert\n"}),
    (
        "layers",
        {"packing/online.py": DOC + "if TYPE_CHECKING:\n    from ..model import heads\n"},
    ),
    ("layers", {"results.py": DOC + "from packhorse.checkpoint import read\n"}),
    ("layers", {"runtime/encoder.py": DOC + "from packhorse_bench import encode\n"}),
    ("layers", {"monitor.py": DOC + "from packhorse import optim\n"}),
    ("layers", {"model/bert.py": DOC + "import_module(f'packhorse.runtime.{name}')\n"}),
    ("layers", {"runtime/encoder.py": DOC + "from packhorse import load\n"}),
    ("layers", {"drawer.py": DOC}),
    (
        "cycles",
        {"packing/a.py": DOC + "from . import b", "packing/b.py": DOC + "from .a import c"},
    ),
    ("cycles", {"a.py": DOC + "import packhorse.b", "b.py": DOC + "def f():\n import packhorse.a"}),
    ("names", {"utils.py": DOC}),
    ("names", {"core/model.py": DOC}),
    ("docstrings", {"device.py": "import os\n"}),
    ("signatures", {"device.py": DOC + "def choose(name) -> str: ...\n"}),
    ("signatures", {"device.py": DOC + "def choose(name: str): ...\n"}),
    ("signatures", {"device.py": DOC + "async def choose(*names) -> None: ...\n"}),
    ("signatures", {"device.py": DOC + "class A:\n    def __init__(self): ...\n"}),
    ("signatures", {"device.py": DOC + "class A:\n    @staticmethod\n    def f(x) -> None: ...\n"}),
    ("asserts", {"device.py": DOC + "def f(x: int) -> None:\n    assert x > 0\n"}),
    ("prints", {"reports/packing.py": DOC + "def f() -> None:\n    print(1)\n"}),
    ("unpickling", {"checkpoint/hf.py": DOC + "def f() -> None:\n    from pickle import loads\n"}),
    ("unpickling", {"checkpoint/hf.py": DOC + "state = torch.load(path, weights_only=True)\n"}),
    ("unpickling", {"checkpoint/hf.py": DOC + "from torch import load\n"}),
    ("unpickling", {"data/shards.py": DOC + "np.load(path, allow_pickle=True)\n"}),
    ("import_effects", {"device.py": DOC + "torch.set_num_threads(2)\n"}),
    ("import_effects", {"device.py": DOC + "if x:\n    os.environ['A'] = '1'\n"}),
    ("import_effects", {"device.py": DOC + "os.environ.setdefault('A', '1')\n"}),
    ("import_effects", {"device.py": DOC + "torch.backends.mkldnn.enabled = False\n"}),
    ("import_effects", {"device.py": DOC + "def f(x: int = torch.cuda.device_count()): ...\n"}),
    ("import_effects", {"device.py": DOC + "class A:\n    logging.basicConfig()\n"}),
    ("abstract_or_final", {"device.py": MADE + "A()\n"}),
    ("abstract_or_final", {"device.py": MADE, "tokens.py": DOC + "from .device import A\nA()\n"}),
    ("extras", {"device.py": DOC + "MissingExtra('pyarrow', 'plots')\n"}),
    ("class_names", {"device.py": DOC + "class A: ...\n", "cache.py": DOC + "class A: ...\n"}),
    ("literal_splats", {"device.py": DOC + "NAMES = ['a', *('b', 'c')]\n"}),
]
SOUND = {
    "__init__.py": DOC + "def __getattr__(name: str) -> object:\n    from .runtime import run\n",
    "errors.py": DOC + "class Bad(Exception): ...\nclass Worse(Bad): ...\nWorse()\n",
    "packing/__init__.py": DOC,
    "packing/batch.py": DOC + "from packhorse.errors import Bad\nfrom .. import __version__\n",
    "attention/__init__.py": DOC + "def f() -> None: import_module('packhorse.attention.mask')",
    "attention/mask.py": DOC + "from packhorse.attention import f\nfrom ..packing import batch\n",
    "runtime/encoder.py": DOC + "class A:\n    def f(self) -> None: torch.set_num_threads(1)\n",
    "cli.py": DOC + "def main() -> None:\n    print(np.load('x', allow_pickle=False))\n",
}


def tree(root: Path, files: dict[str, str], package: str = "packhorse") -> dict[str, Module]:
    """A package of these files, read."""
    for place, text in files.items():
        path = root / package / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return read(root / package)


@pytest.fixture(scope="module", params=PACKAGES)
def source(request: pytest.FixtureRequest) -> dict[str, Module]:
    return read(PACKAGES[request.param])


@pytest.mark.parametrize("rule", RULES)
def test_source_keeps(rule: str, source: dict[str, Module]) -> None:
    assert len(source) > 5, "the source was not found"
    assert RULES[rule](source) == []


@pytest.mark.parametrize(("rule", "files"), BROKEN)
def test_a_broken_rule_is_caught(rule: str, files: dict[str, str], tmp_path: Path) -> None:
    assert RULES[rule](tree(tmp_path, files))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_class_is_abstract_or_final_in_every_package(package: str, tmp_path: Path) -> None:
    broken = {"device.py": MADE, "tokens.py": DOC + "from .device import A\nA()\n"}
    assert abstract_or_final(tree(tmp_path, broken, package))
    assert abstract_or_final(tree(tmp_path, broken | {"tokens.py": DOC}, package)) == []


def test_no_package_creates_what_another_extends() -> None:
    modules = {name: module for root in PACKAGES.values() for name, module in read(root).items()}
    assert abstract_or_final(modules) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_tree_passes(rule: str, tmp_path: Path) -> None:
    assert rule in {name for name, _ in BROKEN}, "a rule without a control proves nothing"
    assert RULES[rule](tree(tmp_path, SOUND)) == []


def test_the_design_tells_the_same_layers() -> None:
    layer_lines = re.findall(
        r"^`(cli > .*)`$", (REPOSITORY / "docs/design.md").read_text("utf-8"), re.M
    )
    assert layer_lines == [" > ".join(" | ".join(rooms) for rooms in LAYERS[1:])]
