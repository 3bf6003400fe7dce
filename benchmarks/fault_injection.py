"""How many faults in layers, surgery and checkpoints the tests notice: one line broken at a time, in a copy.

    nice -n 10 python benchmarks/fault_injection.py [--faults 30] [--seed 0] [--code DIR] [--all] [--write]

A fault swaps an operator, turns a comparison or a condition round, or adds 1 to a number, in an expression drawn at
random outside of messages and annotations. The tests that use the file run, the fast ones, then the slow ones
(`docs_build/changed_tests.py`), and with `--all` the fast ones of all files, a quarter of an hour for each fault that
others miss. A test that notices one is run again without it, and has to pass. What no test notices is shown with its
line: it may be a test that is missing, or a change without effect.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from interleave import show, update

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs_build"))
import changed_tests  # noqa: E402

FOLDERS = ("layers", "surgery", "checkpoints")
SECONDS = 1800
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Fault(NamedTuple):
    """An expression of a file and what stands there instead."""

    path: Path
    line: int
    before: str
    after: str
    start: int
    stop: int


def broken(node: ast.expr) -> ast.expr | None:
    """Return another expression in place of one, or None if it is of another kind."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(OPERATORS[type(node.op)](), node.values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [OPERATORS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    return None


def is_text(node: ast.AST) -> bool:
    """True for what only a reader sees: messages of errors, texts put together, annotations."""
    return isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.arguments)


def expressions(node: ast.AST) -> list[ast.expr]:
    found = [node] if isinstance(node, ast.expr) else []
    for child in ast.iter_child_nodes(node):
        if not is_text(child):
            found += expressions(child)
    return found


def faults_of(path: Path) -> list[Fault]:
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    contents = text.encode()
    faults = []
    for node in expressions(ast.parse(text)):
        other = broken(node)
        if other is None or node.end_lineno is None or node.end_col_offset is None:
            continue
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        before = contents[start:stop].decode()
        faults.append(Fault(path, node.lineno, before, f"({ast.unparse(other)})", start, stop))
    return faults


def draw(source: Path, count: int, seed: int) -> list[Fault]:
    """Return faults in as many lines, drawn from all of the folders."""
    faults = []
    for folder in FOLDERS:
        for path in sorted((source / folder).rglob("*.py")):
            faults += faults_of(path)
    return random.Random(seed).sample(faults, count)


def failing_test(copy: Path, tests: list[str], marker: str = "") -> str | None:
    """Return the first test that fails, None if all pass; "" if they do not end, or cannot be collected."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", marker, *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, text=True
        )
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode in (0, 5):  # 5: no test has the marker
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--code", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--all", action="store_true", help="also the fast tests of all files")
    parser.add_argument("--write", action="store_true", help="write results/fault_injection.json")
    given = parser.parse_args()
    copy = Path(tempfile.mkdtemp(prefix="faults-")) / "checkout"
    shutil.copytree(
        given.code,
        copy,
        ignore=shutil.ignore_patterns(".venv", ".git", "site", "runs", "__pycache__"),
    )
    package = copy / "src" / "isomorph"
    tests_by_file = sorted((copy / "tests").glob("test_*.py"))
    used = {path: changed_tests.uses_of(path) for path in tests_by_file}
    rows = []
    for fault in draw(package, given.faults, given.seed):
        tests = [
            str(path.relative_to(copy))
            for path in sorted(changed_tests.tests_of(fault.path, used, package))
        ]
        contents = fault.path.read_bytes()
        fault.path.write_bytes(
            contents[: fault.start] + fault.after.encode() + contents[fault.stop :]
        )
        by = "no test"
        failed: str | None = None
        stages = [("fast", tests, "not slow"), ("slow", tests, "slow")]
        if given.all:
            stages.append(("fast, of other files", ["tests"], "not slow"))
        for name, chosen, marker in stages:
            failed = failing_test(copy, chosen, marker)
            if failed is not None:
                by = name
                break
        fault.path.write_bytes(contents)
        if failed and failing_test(copy, [failed]) is not None:
            raise SystemExit(f"{failed} fails where nothing is broken")
        place = f"{fault.path.relative_to(package)}:{fault.line}"
        change = " ".join(f"{fault.before[:50]} -> {fault.after[:52]}".split())
        rows.append({"seed": given.seed, "place": place, "change": change, "noticed by": by})
        show(
            f"{sum(row['noticed by'] != 'no test' for row in rows)} of {len(rows)} noticed",
            rows[-1:],
        )
        if given.write:
            update("fault_injection", {f"seed {given.seed}": rows})


if __name__ == "__main__":
    main()
