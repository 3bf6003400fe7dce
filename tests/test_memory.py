"""Freed memory stays in the process."""

import os
import platform
import subprocess
import sys

import pytest

from isomorph import process

SCRIPT = """
import resource, runpy, sys
process = runpy.run_path(sys.argv[2])  # without isomorph and torch
kept = process["keep_freed_memory"]() if sys.argv[1] == "keep" else None
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
letter = b"x"
letter * int(sys.argv[3])
before = faults()
for _ in range(3):
    letter * int(sys.argv[3])
print(kept, faults() - before)
"""


def measure(how, **variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, process.__file__, str(2**26)],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns memory in this way")
def test_memory_is_not_asked_for_again():
    assert measure("keep")[0] == "True"
    assert measure("keep")[1] * 10 < measure("default")[1]


def test_the_environment_decides():
    assert measure("keep", MALLOC_TRIM_THRESHOLD_="100000")[0] == "False"


def test_no_other_system_is_touched(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert process.keep_freed_memory() is False
