"""Test files that use what a change defines, for `make test-changed`.

    python docs_build/changed_tests.py [SINCE]

SINCE is a commit, by default HEAD: what is not committed yet. A test file is chosen if it changed, or if it imports
what a changed file of src defines. Where tests reach a file through the functions of others alone, as `iso.fuse` calls
it, those files' tests are chosen that call them most. Laws that read all sources are always chosen.
"""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "isomorph"
TESTS = ROOT / "tests"
# Test files that are chosen for a function which many call.
MOST_CALLERS = 8
# Files around one are searched until so many test files are found.
FEWEST = 3
# As how many calls an import counts.
IMPORTED = 5
ALWAYS = ("test_floor_plan.py", "test_startup.py")


def changed_files(since: str) -> list[Path]:
    """Return the files of src and tests that differ from a commit, new ones too."""
    commands = (
        ["git", "diff", "--name-only", since, "--", "src", "tests"],
        ["git", "ls-files", "--others", "--exclude-standard", "src", "tests"],
    )
    names: list[str] = []
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names += done.stdout.splitlines()
    paths = [ROOT / name for name in names if name.endswith(".py")]
    return [path for path in paths if path.is_file()]


@cache
def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


@cache
def public_names(path: Path) -> set[str]:
    """Return the classes and functions that a file defines for others."""
    definitions = [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    return {name for name in definitions if not name.startswith("_")}


def imported_modules(tree: ast.Module) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    return modules


class Uses(NamedTuple):
    """What a test file uses: the modules and names that it imports, and how often it takes a name from `iso`."""

    imported: set[str]
    called: Counter[str]


def uses_of(path: Path) -> Uses:
    tree = ast.parse(path.read_text())
    called: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_public(node):
            called[node.attr] += 1
    return Uses(imported_modules(tree), called)


def is_public(node: ast.Attribute) -> bool:
    """True for iso.NAME and iso.ROOM.NAME."""
    around = node.value.value if isinstance(node.value, ast.Attribute) else node.value
    return isinstance(around, ast.Name) and around.id in ("iso", "isomorph")


def imports(uses: Uses, path: Path, package: Path) -> bool:
    """True if a test imports a file, or something from it."""
    module = module_name(path, package)
    return any(module in (name, name.rpartition(".")[0]) for name in uses.imported)


def calls(uses: Uses, path: Path, package: Path) -> int:
    """Return how often a test takes what a file defines from `iso`, or imports it from a package around the file."""
    names = public_names(path)
    count = sum(uses.called[name] for name in names)
    module = module_name(path, package)
    for imported in uses.imported:
        parent, _, name = imported.rpartition(".")
        if name in names and module.startswith(f"{parent}.") and module != parent:
            count += IMPORTED
    return count


@cache
def imports_of_files(package: Path) -> dict[Path, set[str]]:
    files = package.rglob("*.py")
    return {file: imported_modules(ast.parse(file.read_text())) for file in files}


def tests_of(path: Path, used: dict[Path, Uses], package: Path) -> set[Path]:
    """Return the tests that import a file of src, and those that call it, or the nearest files around it, most."""
    modules = imports_of_files(package)
    chosen = {test for test, uses in used.items() if imports(uses, path, package)}
    seen = {path}
    level = {path}
    while level:
        counts: Counter[Path] = Counter()
        for test, uses in used.items():
            counts[test] = sum(calls(uses, file, package) for file in level)
        chosen |= {test for test, count in counts.most_common(MOST_CALLERS) if count}
        if len(chosen) >= FEWEST:
            return chosen
        names = {module_name(file, package) for file in level}
        level = {file for file, imported in modules.items() if names & imported} - seen
        seen |= level
    return chosen


def tests_that_import(helper: Path, used: dict[Path, Uses]) -> set[Path]:
    """Return the test files that use a file of tests, all of them for conftest.py."""
    if helper.name.startswith("test_"):
        return {helper}
    if helper.name == "conftest.py":
        return set(used)
    return {test for test, uses in used.items() if helper.stem in uses.imported}


def main() -> None:
    since = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    used = {path: uses_of(path) for path in sorted(TESTS.glob("test_*.py"))}
    chosen: set[Path] = set()
    for path in changed_files(since):
        is_source = path.is_relative_to(SOURCE)
        chosen |= tests_of(path, used, SOURCE) if is_source else tests_that_import(path, used)
    if chosen:
        chosen |= {TESTS / name for name in ALWAYS}
    print(*(str(path.relative_to(ROOT)) for path in sorted(chosen)))


if __name__ == "__main__":
    main()
