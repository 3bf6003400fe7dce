"""Test files that use what a change defines, for `make test-changed`.

    python docs_build/changed_tests.py [SINCE]

SINCE is a commit, by default HEAD: what is not committed yet. A test file is chosen if it changed, or if it names a
public class or function of a changed file of src; where no test names one, those of the files that import it count.
Laws that read all sources are always chosen.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "isomorph"
TESTS = ROOT / "tests"
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


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


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


def names_used(path: Path) -> set[str]:
    """Return the modules and names that a file imports, and those that it takes from `iso`."""
    tree = ast.parse(path.read_text())
    used = imported_modules(tree)
    used |= {module.rpartition(".")[2] for module in used if module.startswith("isomorph.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root_name(node) in ("iso", "isomorph"):
            used.add(node.attr)
    return used


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def tests_that_use(path: Path, used: dict[Path, set[str]], package: Path) -> set[Path]:
    """Return the test files that import a file of a package or use what it defines."""
    words = public_names(path) | {module_name(path, package)}
    return {test for test, names in used.items() if words & names}


def tests_of(path: Path, used: dict[Path, set[str]], package: Path) -> set[Path]:
    """Return the tests of a file of src, or of the files nearest to it that import it and have some."""
    imports: dict[Path, set[str]] = {}
    seen = {path}
    level = {path}
    while level:
        found: set[Path] = set()
        for file in level:
            found |= tests_that_use(file, used, package)
        if found:
            return found
        if not imports:
            files = package.rglob("*.py")
            imports = {file: imported_modules(ast.parse(file.read_text())) for file in files}
        names = {module_name(file, package) for file in level}
        level = {file for file, modules in imports.items() if names & modules} - seen
        seen |= level
    return set()


def tests_that_import(helper: Path, used: dict[Path, set[str]]) -> set[Path]:
    """Return the test files that use a file of tests, all of them for conftest.py."""
    if helper.name.startswith("test_"):
        return {helper}
    if helper.name == "conftest.py":
        return set(used)
    return {test for test, names in used.items() if helper.stem in names}


def main() -> None:
    since = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    used = {path: names_used(path) for path in sorted(TESTS.glob("test_*.py"))}
    chosen: set[Path] = set()
    for path in changed_files(since):
        is_source = path.is_relative_to(SOURCE)
        chosen |= tests_of(path, used, SOURCE) if is_source else tests_that_import(path, used)
    if chosen:
        chosen |= {TESTS / name for name in ALWAYS}
    print(*(str(path.relative_to(ROOT)) for path in sorted(chosen)))


if __name__ == "__main__":
    main()
