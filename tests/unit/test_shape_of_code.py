"""The shape of the code, checked from its syntax tree: docstrings, names, cycles, slivers, error handling, and no torch where it is not due.

Each check is one test over all files; it fails with the list of every place that breaks it.
The direction of imports between packages is import-linter's business (`make lint`).
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tether"
FILES = sorted(SOURCE.rglob("*.py"))
LIGHT = ("core", "envs", "runs", "cli")
HEAVY = {"torch", "transformers"}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that importing a module runs: everything but the bodies of functions and of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not guarded and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _run_on_import(child)


def _imported(node: ast.AST) -> set[str]:
    """Top-level packages an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def test_there_is_code_to_check() -> None:
    assert len(FILES) > 10


def _module(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _first_party(node: ast.AST, known: Collection[str]) -> Iterator[str]:
    """The modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in known:
                yield inner
            elif node.module in known:
                yield node.module


def test_no_module_under_forty_lines_with_one_importer() -> None:
    """Such a sliver is a part of the file that imports it. A verb of the command line is a file of its own, however short."""
    modules = {_module(path): path for path in FILES}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(_tree(path)):
            for imported in _first_party(node, modules.keys()):
                importers[imported].add(name)
    slivers = [
        name
        for name, users in importers.items()
        if modules[name].name not in ("__init__.py", "__main__.py")
        and len(users - {name}) == 1
        and users != {"tether.cli.main"}
        and len(modules[name].read_text(encoding="utf-8").splitlines()) < 40
    ]
    assert not slivers, f"merge into their importers: {', '.join(sorted(slivers))}"


def test_no_import_cycles() -> None:
    """No import comes back to its module: neither one that runs, nor one for types only, nor one inside a function."""
    modules = {_module(path): path for path in FILES}
    edges = {
        name: {imported for node in ast.walk(_tree(path)) for imported in _first_party(node, modules.keys()) if imported != name}
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for imported in sorted(edges[name]):
                visit(imported, (*trail, name))
            done.add(name)

    for name in sorted(modules):
        visit(name, ())


def _at(path: Path, node: ast.AST | None = None) -> str:
    """A place in the source, as `package/file.py:line`."""
    line = getattr(node, "lineno", None)
    return str(path.relative_to(SOURCE)) + (f":{line}" if line else "")


def test_names_of_files() -> None:
    found = [_at(path) for path in FILES if re.search(r"utils?|helpers?|manager", path.stem)]
    assert not found, f"name these after what they hold: {found}"


def test_every_module_has_a_docstring() -> None:
    found = [_at(path) for path in FILES if not ast.get_docstring(_tree(path))]
    assert not found, f"no module docstring: {found}"


def test_nothing_left_for_later() -> None:
    found = [
        f"{_at(path)}: {hit.group()}" for path in FILES for hit in re.finditer(r"\b(TODO|FIXME)\b.*", path.read_text(encoding="utf-8"))
    ]
    assert not found, f"do it now or drop it: {found}"


def test_no_print_outside_the_command_line() -> None:
    found = [
        _at(path, node)
        for path in FILES
        if path.relative_to(SOURCE).parts[0] != "cli"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not found, f"these print; return the text, or raise: {found}"


def test_no_error_is_swallowed() -> None:
    found = [
        _at(path, node)
        for path in FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
        if not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]
    assert not found, f"a broad except must raise again; else name the errors you expect: {found}"


def test_light_packages_import_no_torch() -> None:
    found = [
        f"{_at(path, node)} ({', '.join(heavy)})"
        for path in FILES
        if path.relative_to(SOURCE).parts[0] in LIGHT
        for node in _run_on_import(_tree(path))
        if (heavy := sorted(_imported(node) & HEAVY))
    ]
    assert not found, f"import these where they are used: {found}"


@pytest.mark.parametrize("module", ["tether", "tether.cli.main"])
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
