"""A file imports only from floors before its own; files and functions stay small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "isomorph"
FLOORS = [
    {"errors", "doctor", "import_path", "interrupt", "lazy_imports", "memory", "seeding", "terminal_tables"},
    {"distributed", "hub_names", "output_files"},
    {"layers"},
    {"surgery"},
    {"models"},
    {"data", "evaluation", "analysis"},
    {"suites"},
    {"checkpoints"},
    {"report", "training"},
    {"recipes"},
    {"demo", "tasks", "deployment"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of isomorph that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}: relative import"
            names = [f"isomorph.{a.name}" for a in node.names] if node.module == "isomorph" else [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "isomorph":
                found.add(parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else "__init__")
    return found


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} <= set(FLOOR_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = room(path)
    for other in imported_rooms(path) - {own}:
        assert FLOOR_OF[other] < FLOOR_OF[own], f"{path.relative_to(ROOT)} imports {other}, which is not below {own}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            docstring = len((ast.get_docstring(node) or "").splitlines())
            assert node.end_lineno - node.lineno - docstring <= 45, f"{path.name}: {node.name} is long"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
