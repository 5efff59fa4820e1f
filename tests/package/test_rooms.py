"""The rooms of weft/: every module imports alone, imports point down, and docs/design.md lists the rooms in order."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "weft"
MAX_LINES, MAX_FILES = 450, 12
Graph = dict[str, set[str]]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    """`parallel` for weft.parallel.data and weft.parallel; `plan` for weft.plan."""
    return module.split(".")[1] if "." in module else ""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(delayed: bool) -> Graph:
    """What each module imports when it is imported; with `delayed`, what its functions import later, too."""
    return {name: set(_imported(tree(path), delayed)) - {name} for name, path in MODULES.items()}


def _imported(node: ast.AST, delayed: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "weft":
            for one in child.names:
                whole = f"{child.module}.{one.name}"
                yield whole if whole in MODULES else str(child.module)
        elif isinstance(child, ast.Import):
            yield from (one.name for one in child.names if one.name in MODULES)
        elif delayed or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imported(child, delayed)


def cycle(graph: Graph) -> list[str] | None:
    """One cycle of a graph, or None."""
    done, path = set[str](), list[str]()

    def visit(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        found = next(filter(None, map(visit, sorted(graph.get(node, ())))), None)
        path.pop()
        done.add(node)
        return found

    return next(filter(None, map(visit, sorted(graph))), None)


def rooms(graph: Graph) -> Graph:
    found: Graph = {}
    for module, others in graph.items():
        mine = found.setdefault(room_of(module), set())
        mine |= {room_of(other) for other in others} - {room_of(module)}
    return found


def test_modules_import_each_other_without_cycles() -> None:
    assert cycle(imports(False)) is None


def test_rooms_import_each_other_without_cycles() -> None:
    """Delayed imports count too. The package's own file imports the public names of all rooms."""
    graph = rooms(imports(True))
    assert all("" not in others for others in graph.values()), "a module imports weft itself"
    assert cycle(graph) is None


def test_folders_of_serve_import_each_other_without_cycles() -> None:
    """Modules beside the folders, such as the engine, count as one folder; imports of kernels count too. Options and
    refusals stand below the folders, which read them.
    """
    graph: Graph = {}
    for module, others in imports(True).items():
        if room_of(module) == "serve" and module != "weft.serve":
            mine = graph.setdefault(folder_of(module), set())
            mine |= {folder_of(other) for other in others if room_of(other) == "serve"} - {folder_of(module)}
    assert len(graph) > 5
    assert cycle(graph) is None


def folder_of(module: str) -> str:
    """`head` for weft.serve.head.sampling and weft.serve.head; nothing for weft.serve.engine."""
    if module in ("weft.serve.spec", "weft.serve.refusals"):
        return module
    path = MODULES[module]
    return path.parent.name if path.parent.parent == PACKAGE / "serve" else ""


def test_a_cycle_is_found() -> None:
    graph = {**rooms(imports(True)), "plan": {"schedule", "commands"}}
    assert cycle(graph) is not None


def test_delayed_imports_inside_a_room_are_of_kernels() -> None:
    """A function and its Triton kernel know each other: the kernel is imported where there is a GPU. The command line
    imports a command's code when that command runs.
    """
    delayed = {
        (module, other)
        for module, others in imports(True).items()
        if module not in ("weft.commands.main", "weft.commands.app", "weft.commands.plan_command")
        for other in others - imports(False)[module]
        if room_of(module) == room_of(other)
    }
    assert {other for _, other in delayed if not other.endswith("_kernel")} == set()


# Imports each module in a child that has all other libraries, and a `weft` without any module.
ALONE = """
import importlib, json, os, sys, types
import numpy, safetensors, torch, torch.distributed, torch.nn.functional
package = types.ModuleType("weft")
package.__path__ = [sys.argv[1]]
sys.modules["weft"] = package
for name in json.loads(sys.argv[2]):  # for the libraries alone: a child then reads nothing but files of weft
    try:
        importlib.import_module(name)
    except BaseException:
        pass  # the child says it
for name in [name for name in sys.modules if name.startswith("weft.")]:
    del sys.modules[name]
for name in [name for name in vars(package) if not name.startswith("__")]:
    delattr(package, name)
failed = {}
for name in json.loads(sys.argv[2]):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}"[:500].encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 500).decode()
    os.close(read)
    os.waitpid(child, 0)
    if text:
        failed[name] = text
print(json.dumps(failed))
"""


@pytest.mark.parametrize("one_in", [40, pytest.param(1, marks=pytest.mark.soak)])
def test_every_module_imports_alone(one_in: int) -> None:
    names = [name for name in MODULES if name not in ("weft", "weft.__main__") and not name.endswith("_kernel")]
    command = [sys.executable, "-c", ALONE, str(PACKAGE), json.dumps(names[::one_in])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    failed = {name: text for name, text in json.loads(done.stdout).items() if "is not installed" not in text}
    assert failed == {}  # but for modules whose library is an extra


def test_the_design_lists_every_room_above_what_it_imports() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    listed = re.findall(r"^    (\w+)(?:/|\.py) ", text.partition("## Rooms")[2].partition("\n## ")[0], re.MULTILINE)
    graph = rooms(imports(True))
    assert sorted(listed) == sorted(set(graph) - {"", "__main__"})
    order = {room: place for place, room in enumerate(listed)}
    wrong = [(a, b) for a, others in graph.items() for b in others if a in order and order[a] > order[b]]
    assert wrong == []


def test_few_files_stand_outside_of_rooms() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= MAX_FILES


def test_every_room_says_what_it_holds() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(tree(path)), path


def test_files_hold_one_idea() -> None:
    assert [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > MAX_LINES] == []


def test_production_code_replaces_nothing_by_mocks() -> None:
    assert [name for name, path in MODULES.items() if "unittest" in path.read_text()] == []


def test_one_class_name_has_one_meaning() -> None:
    """No two classes of weft/ share a name. A leading underscore makes no difference."""
    nodes = [node for path in MODULES.values() for node in ast.walk(tree(path))]
    names = [node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef)]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []


def imports_of_tests(files: Mapping[str, str]) -> list[str]:
    """Imports of a test file by another, or by a helper."""
    pattern = re.compile(r"^ *(?:from|import) +(?:\w+\.)*(test_\w+)", re.MULTILINE)
    return [f"{name} imports {one}" for name, text in files.items() for one in pattern.findall(text)]


def test_tests_share_helpers_and_no_test_imports_another() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert len(files) > 200
    assert imports_of_tests(files) == []
    wrong = {
        "test_a.py": "from test_b import case",
        "c_for_tests.py": "def late():\n    import test_b",
        "d.py": "import e",
    }
    assert imports_of_tests(wrong) == ["test_a.py imports test_b", "c_for_tests.py imports test_b"]
