"""Freed memory stays in the process."""

import os
import platform
import subprocess
import sys

import pytest

from isomorph import process
from isomorph.cli.listing import _ALLOCATOR, _examine_environment

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
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    } | variables
    command = [sys.executable, "-c", SCRIPT, how, process.__file__, str(2**26)]
    kept, faults = subprocess.run(
        command, capture_output=True, text=True, env=env, check=True
    ).stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc returns memory in this way"
)
def test_memory_is_not_asked_for_again_unless_the_environment_decides(monkeypatch):
    (said, kept), (_, asked) = measure("keep"), measure("default")
    assert said == "True"
    assert kept * 10 < asked
    assert measure("keep", MALLOC_TRIM_THRESHOLD_="100000")[0] == "False"
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert process.keep_freed_memory() is False


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc returns memory in this way"
)
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_doctor_names_the_variables_until_they_are_set(monkeypatch, name):
    for variable in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(variable, raising=False)
    findings = {what: finding for what, finding, _ in _examine_environment()}
    assert f"{name}=" in findings["allocator"]
    monkeypatch.setenv(name, "1073741824")
    findings = {what: finding for what, finding, _ in _examine_environment()}
    assert findings["allocator"].startswith("keeps")


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc returns memory in this way"
)
def test_the_variables_that_doctor_names_keep_memory():
    named = dict(word.rstrip(",").split("=") for word in _ALLOCATOR.split() if "=" in word)
    _, asked = measure("default")
    _, kept = measure("default", **named)
    assert kept * 10 < asked
