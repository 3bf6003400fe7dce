"""A file imports only from floors before its own, files import each other in no circle, and both stay readable."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "isomorph"
sys.path.insert(0, str(ROOT.parents[1] / "docs_build"))
import changed_tests  # noqa: E402
from changed_tests import module_name  # noqa: E402

ORDER = (
    "errors json_values < spec process terminal_tables slow_work yaml_values < layers < operations"
    " < surgery < models < analysis < checkpoints < deployment < lab < __init__ < cli < __main__"
)
LAB_ORDER = "distributed < data < evaluation < report training < recipes < demo tasks"
SHARED_RUNS = ("isomorph.deployment.hub", "isomorph.lab.training.run.summary")
"""The one import from the front of the library into the lab: a model card may describe a training run."""


def floors(order: str) -> dict[str, int]:
    return {
        room: number for number, rooms in enumerate(order.split(" < ")) for room in rooms.split()
    }


FILE_LINES = 700
FUNCTION_LINES = 60
"""Most lines of a file, and of a function without its parameters and docstring."""


TREES = {
    module_name(path, ROOT): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))
}
LINES = {module_name(path, ROOT): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}


def room(module: str, depth: int = 1) -> str:
    """The folder or file of a module, `depth` below the package."""
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else "__init__"


def imported_modules(tree: ast.Module) -> set[str]:
    """Modules of isomorph that a file imports, at the top, inside functions or for type checking."""
    found = set()
    for node in ast.walk(tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else []
        )
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names = [
                f"{node.module}.{name}" if f"{node.module}.{name}" in TREES else node.module
                for name in names
            ]
        found |= {name for name in names if name.split(".")[0] == "isomorph"}
    return found


IMPORTS = {module: imported_modules(tree) - {module} for module, tree in TREES.items()}


def upward_imports(modules: dict[str, set[str]], floor_of: dict[str, int], depth: int) -> list[str]:
    upward = []
    for module, imports in modules.items():
        own = room(module, depth)
        for other in imports & modules.keys():
            theirs = room(other, depth)
            if theirs == own or (module, other) == SHARED_RUNS:
                continue
            if floor_of[theirs] >= floor_of[own]:
                upward.append(f"{module} imports {other}")
    return upward


def test_imports_go_down():
    floor_of = floors(ORDER)
    assert {room(module) for module in TREES} <= set(floor_of), "a room without a floor"
    assert not upward_imports(IMPORTS, floor_of, depth=1)


def test_imports_inside_the_lab_go_down():
    floor_of = floors(LAB_ORDER)
    lab = {
        module: imports for module, imports in IMPORTS.items() if module.startswith("isomorph.lab.")
    }
    assert {room(module, 2) for module in lab} <= set(floor_of), "a room without a floor"
    assert not upward_imports(lab, floor_of, depth=2)


def test_files_import_each_other_in_no_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(
            f"files import each other in a circle: {' <- '.join(error.args[1])}"
        ) from None


def test_files_and_functions_stay_small():
    long = [f"{module} has {lines} lines" for module, lines in LINES.items() if lines > FILE_LINES]
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = len((ast.get_docstring(node) or "").splitlines())
                if node.end_lineno - node.body[0].lineno - docstring > FUNCTION_LINES:
                    long.append(f"{module}.{node.name} is long")
    assert not long


def test_files_and_public_classes_are_documented():
    undocumented = [module for module, tree in TREES.items() if not ast.get_docstring(tree)]
    for module, tree in TREES.items():
        for node in tree.body:
            public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                undocumented.append(f"{module}.{node.name}")
    assert not undocumented


def test_the_tests_of_a_changed_file_are_those_that_use_it():
    """What `make test-changed` runs."""
    tests = sorted(Path(__file__).parent.glob("test_*.py"))
    used = {path: changed_tests.uses_of(path) for path in tests}

    def chosen(name):
        return {path.name for path in changed_tests.tests_of(ROOT / name, used, ROOT)}

    assert "test_gpsa.py" in chosen("layers/gated/gpsa.py")
    assert "test_pyramid.py" not in chosen("layers/gated/gpsa.py")
    # no test imports them: those that call the functions and classes around them most
    assert "test_pyramid.py" in chosen("layers/pyramid/moments.py")
    assert "test_port.py" in chosen("surgery/port/pair.py")
    assert "test_fuse_norms.py" in chosen("surgery/merge_plan.py")
    assert changed_tests.tests_that_import(tests[0], used) == {tests[0]}
