"""A file imports only from floors before its own, files import each other in no circle, and both stay readable."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "isomorph"
ORDER = (
    "errors < process terminal_tables slow_work < distributed < layers < operations < surgery < models < data analysis"
)
ORDER += " < evaluation < checkpoints < report training < recipes < demo tasks deployment < __init__ < cli < __main__"
FLOORS = [set(rooms.split()) for rooms in ORDER.split(" < ")]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILE_LINES, FUNCTION_LINES = 700, 60
"""Most lines of a file, and of a function without its docstring."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
LINES = {module_name(path): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}


def room(module: str) -> str:
    _, *inner = module.split(".")
    return inner[0] if inner else "__init__"


def imported_modules(tree: ast.Module) -> set[str]:
    """Modules of isomorph that a file imports, at the top, inside functions or for type checking."""
    found = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names = [f"{node.module}.{name}" if f"{node.module}.{name}" in TREES else node.module for name in names]
        found |= {name for name in names if name.split(".")[0] == "isomorph"}
    return found


IMPORTS = {module: imported_modules(tree) - {module} for module, tree in TREES.items()}


def test_imports_go_down():
    assert {room(module) for module in TREES} <= set(FLOOR_OF), "a room without a floor"
    upward = [
        f"{module} imports {other}"
        for module, imports in IMPORTS.items()
        for other in imports
        if room(other) != room(module) and FLOOR_OF[room(other)] >= FLOOR_OF[room(module)]
    ]
    assert not upward


def test_files_import_each_other_in_no_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(f"files import each other in a circle: {' <- '.join(error.args[1])}") from None


def test_files_and_functions_stay_small():
    long = [f"{module} has {lines} lines" for module, lines in LINES.items() if lines > FILE_LINES]
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = len((ast.get_docstring(node) or "").splitlines())
                if node.end_lineno - node.lineno - docstring > FUNCTION_LINES:
                    long.append(f"{module}.{node.name} is long")
    assert not long


def test_files_and_public_classes_are_documented():
    undocumented = [module for module, tree in TREES.items() if not ast.get_docstring(tree)]
    undocumented += [
        f"{module}.{node.name}"
        for module, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not undocumented
