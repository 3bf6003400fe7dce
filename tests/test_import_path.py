"""Code in the working folder is not run: neither by the command line nor by a process that isomorph starts."""

import os
import subprocess
import sys
from pathlib import Path

import isomorph
import isomorph_command
from isomorph.checkpoints.open import build_by_function

FOUND = str(Path(isomorph.__file__).parents[1])
STARTED = ["json", "torch", "pickle", "multiprocessing", "timm", "numpy", "sitecustomize"]
"""Modules that a child process imports."""
CHILDREN = """
CONFIG = dict(input_size=(3, 8, 8), mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear")
if __name__ == "__main__":
    import os, subprocess, sys
    import isomorph
    four = isomorph.data.open_source("digits", "test").subset(range(4))
    loader = isomorph.lab.data.eval_loader(four, CONFIG, 2, workers=1)
    loader.multiprocessing_context = "forkserver"
    print(len(list(loader)))
    with isomorph.process.SafeChildProcesses():  # PYTHONPATH holds as the user set it
        subprocess.run([sys.executable, "-c", "import extra"], check=True)
    assert "PYTHONSAFEPATH" not in os.environ
"""


def run(folder, *arguments, path=FOUND):
    """Run a process in a folder of modules that say so when they are imported; return it and what they said."""
    for name in STARTED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write('{name} ')")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done, (folder / "ran").read_text() if (folder / "ran").exists() else ""


def test_the_command_line_runs_nothing_that_lies_in_the_working_folder(tmp_path):
    bench = ["bench", "cifar_resnet20", "--seconds", "0", "--batch-size", "1", "--json"]
    done, ran = run(tmp_path, isomorph_command.__file__, *bench)
    assert (done.returncode, ran) == (0, ""), done.stderr


def test_the_workers_of_a_loader_run_nothing_that_lies_in_the_working_folder(tmp_path):
    """And end when the script does, though a fork server is their parent to the system."""
    for name in ("work", "script", "path"):
        (tmp_path / name).mkdir()
    (tmp_path / "path/extra.py").touch()
    script = tmp_path / "script/script.py"
    script.write_text(CHILDREN)
    done, ran = run(tmp_path / "work", str(script), path=f"{FOUND}{os.pathsep}{tmp_path / 'path'}")
    assert (done.returncode, ran, done.stdout.split()) == (0, "", ["2"]), done.stderr


def test_what_the_module_of_a_users_function_adds_to_the_path_stays(tmp_path, monkeypatch):
    """Also the function may import from there, later; the working folder is on the path no longer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_layers").mkdir()
    (tmp_path / "own_layers/narrow.py").write_text("from torch.nn import Linear as Narrow\n")
    (tmp_path / "own_network.py").write_text(
        f"import sys\nsys.path.append({str(tmp_path / 'own_layers')!r})\n"
        "def build():\n    from narrow import Narrow\n    return Narrow(2, 2)\n"
    )
    before = list(sys.path)
    assert build_by_function("own_network:build", {}).in_features == 2
    assert sys.path == [*before, str(tmp_path / "own_layers")]
