"""What a test needs from the machine: real data, a browser, packages of other libraries."""

import os
import tempfile
from importlib import import_module

import pytest

NO_DOWNLOADS = os.path.join(tempfile.gettempdir(), "isomorph-tests-no-downloads")
"""A folder that does not exist, or holds nothing that was downloaded."""


def missing(said):
    """Skip the test; where `ISOMORPH_REQUIRE_ALL` is set, as in .ci/run, it fails."""
    if os.environ.get("ISOMORPH_REQUIRE_ALL"):
        pytest.fail(f"ISOMORPH_REQUIRE_ALL is set, and the test {said}")
    pytest.skip(said, allow_module_level=True)


def optional(package, extra):
    """Import a package that `pip install 'isomorph[EXTRA]'` brings; without it the test or the file is `missing` it."""
    try:
        return import_module(package)
    except ImportError:
        return missing(f"needs {package}: pip install 'isomorph[{extra}]'")


def is_alone():
    """Whether tests run as on a machine without the folder of data sets, which `ISOMORPH_ALONE` asks for."""
    return bool(os.environ.get("ISOMORPH_ALONE"))


def hide_network():
    """Hide the network, and what was downloaded before, from this process and from those that it starts."""
    nobody = "http://127.0.0.1:9"  # the port of the discard service, on which nothing listens
    for name in ("http_proxy", "https_proxy"):
        os.environ[name] = os.environ[name.upper()] = nobody
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    for name in ("HF_HOME", "TORCH_HOME"):
        os.environ[name] = NO_DOWNLOADS


def describe_skipped(reports):
    """Return lines that name the skipped tests, by what they want."""
    tests_of = {}
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        tests_of.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    lines = []
    for reason, tests in tests_of.items():
        lines.append(f"{len(tests)} skipped: {reason}")
        lines += [f"  {test}" for test in tests]
    return lines
