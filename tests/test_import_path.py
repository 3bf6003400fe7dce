"""Code in the working folder is not run: neither by the command line nor by a process that isomorph starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isomorph
import isomorph_command

FOUND = str(Path(isomorph.__file__).parents[1])
STARTED = ["json", "torch", "pickle", "multiprocessing", "timm", "numpy", "sitecustomize"]
"""Modules that a child process imports."""
CHILDREN = """
CONFIG = dict(input_size=(3, 8, 8), mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear")
if __name__ == "__main__":
    import isomorph
    four = isomorph.data.open_source("digits", "test").subset(range(4))
    loader = isomorph.data.eval_loader(four, CONFIG, 2, workers=1)
    loader.multiprocessing_context = "forkserver"
    print(len(list(loader)))
"""


@pytest.fixture
def trap(tmp_path):
    """A folder of modules that say so when they are imported."""
    for name in STARTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')")
    return tmp_path


def run(folder, *arguments, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": FOUND, **environment}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    ran = folder / "ran"
    return done, ran.read_text() if ran.exists() else ""


def test_the_command_line_runs_nothing_that_lies_in_the_working_folder(trap):
    bench = ["bench", "cifar_resnet20", "--seconds", "0", "--batch-size", "1", "--json"]
    done, ran = run(trap, isomorph_command.__file__, *bench)
    assert (done.returncode, ran) == (0, ""), done.stderr


def test_the_workers_of_a_loader_run_nothing_that_lies_in_the_working_folder(trap, tmp_path_factory):
    """And end when the script does, though a fork server is their parent to the system."""
    (trap / "isomorph.py").write_text((trap / "torch.py").read_text())
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(CHILDREN)
    done, ran = run(trap, str(script))
    assert (done.returncode, ran, done.stdout.split()) == (0, "", ["2"]), done.stderr


def test_pythonpath_holds_as_the_user_set_it(trap):
    """Also where it names the working folder."""
    code = (
        f"import os, runpy, subprocess, sys\nnames = runpy.run_path({isomorph.process.__file__!r})\n"
        "with names['SafeChildProcesses']():\n"
        "    subprocess.run([sys.executable, '-c', 'import extra'], check=True)\n"
        "assert 'PYTHONSAFEPATH' not in os.environ"
    )
    (trap / "extra.py").write_text((trap / "torch.py").read_text())
    for name in STARTED:
        (trap / f"{name}.py").unlink()
    assert "No module named 'extra'" in run(trap, "-P", "-c", code)[0].stderr
    done, ran = run(trap, "-P", "-c", code, PYTHONPATH=f"{FOUND}{os.pathsep}{trap}")
    assert (done.returncode, ran.split()) == (0, ["torch"]), done.stderr
