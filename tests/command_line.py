"""The command line as a user meets it: a process for each call, forked from one that has imported everything."""

import gc
import multiprocessing
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import isomorph as iso
import isomorph_command

MODULES = [
    module.name
    for module in pkgutil.walk_packages(iso.__path__, "isomorph.")
    if "__main__" not in module.name
]
SERVER = multiprocessing.get_context("forkserver")
EXPORT = [
    "onnxscript.function_libs.torch_lib",
    "torch.export._trace",
]  # what exporting imports late
SERVER.set_forkserver_preload(
    ["torch", "timm", "torchvision", "sklearn.datasets", *MODULES, *EXPORT]
)
LONGEST = 300
"""Seconds."""


def answer(arguments, folder, environment, out, err):
    """In the child: the command, or the script if the first argument is one, its output in files."""
    gc.freeze()  # a collection of garbage would look at all that the server imported, and so copy it
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return
    from isomorph.cli import main

    main(arguments)


def settings(**environment):
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment}


def start(arguments, folder, out, err, **environment):
    """Starts `isomorph ARGUMENTS` in a process of its own, and returns it."""
    child = SERVER.Process(
        target=answer, args=(arguments, str(folder), settings(**environment), out, err)
    )
    child.start()
    return child


def isomorph(*arguments, folder=None, processes=1):
    """`isomorph ARGUMENTS`, as subprocess.run gives it; several processes have what torchrun tells each of them."""
    arguments = [str(argument) for argument in arguments]
    with tempfile.NamedTemporaryFile("a") as out, tempfile.NamedTemporaryFile("a") as err:
        children = [
            start(arguments, folder or Path.cwd(), out.name, err.name, **place)
            for place in places(processes)
        ]
        for child in children:
            child.join(LONGEST)
        if any(child.is_alive() for child in children):
            for child in children:
                child.kill()
            raise TimeoutError(f"isomorph {' '.join(arguments)} took more than {LONGEST} seconds")
        stdout = Path(out.name).read_text()
        stderr = Path(err.name).read_text()
    worst = max((child.exitcode for child in children), key=abs)
    return subprocess.CompletedProcess(arguments, worst, stdout, stderr)


def places(processes):
    """The environment that torchrun gives to each process of a run; nothing for a process alone."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [{"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(processes)]
    return [{**address, "WORLD_SIZE": str(processes), **rank} for rank in ranks]


def alone(*arguments, folder=None, **environment):
    """The same in a process that starts from nothing, with an environment of its own."""
    command = [sys.executable, isomorph_command.__file__, *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env=settings(**environment),
        timeout=LONGEST,
    )


def refusal(run):
    """The one line of a command that fails as a user's error, after notes on the models that it opened."""
    said = [
        line
        for line in run.stderr.splitlines()
        if line.startswith("isomorph: ") and "were prepared" not in line
    ]
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert len(said) == 1, run.stderr
    assert run.stderr.splitlines()[-1] == said[0]
    return said[0]
