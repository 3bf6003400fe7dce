"""What a test needs from the machine: real data, a browser, packages of other libraries."""

import os

import pytest


def missing(said):
    """Skip the test; where `ISOMORPH_REQUIRE_ALL` is set, as in .ci/run, it fails."""
    if os.environ.get("ISOMORPH_REQUIRE_ALL"):
        pytest.fail(f"ISOMORPH_REQUIRE_ALL is set, and the test {said}")
    pytest.skip(said)
