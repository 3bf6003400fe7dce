"""The command line as a user meets it: a process for each call, forked from one that has imported everything."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["isomorph.cli"])
LONGEST = 300
"""Seconds."""


def answer(arguments, folder, environment, out, err):
    """In the child: the command, its output in files."""
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, number)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    from isomorph.cli import main

    main(arguments)


def settings(**environment):
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment}


def isomorph(*arguments, folder=None):
    """`isomorph ARGUMENTS`, as subprocess.run gives it."""
    arguments = [str(argument) for argument in arguments]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        child = SERVER.Process(
            target=answer, args=(arguments, str(folder or Path.cwd()), settings(), out.name, err.name)
        )
        child.start()
        child.join(LONGEST)
        if child.is_alive():
            child.kill()
            raise TimeoutError(f"isomorph {' '.join(arguments)} took more than {LONGEST} seconds")
        stdout, stderr = (Path(file.name).read_text() for file in (out, err))
    return subprocess.CompletedProcess(arguments, child.exitcode, stdout, stderr)


def alone(*arguments, folder=None, **environment):
    """The same in a process that starts from nothing, with an environment of its own."""
    command = [sys.executable, "-m", "isomorph", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=settings(**environment), timeout=LONGEST
    )


def refusal(run):
    """The one line of a command that fails as a user's error."""
    said = [line for line in run.stderr.splitlines() if line.startswith("isomorph: ")]
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert len(said) == 1, run.stderr
    assert run.stderr.splitlines()[-1] == said[0]
    return said[0]
