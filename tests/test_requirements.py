"""A package that is not installed skips what needs it; where everything is required it fails."""

import json

import pytest
from _pytest.outcomes import Failed, Skipped

from requirements import optional


def test_a_missing_package_skips_and_fails_where_all_is_required(monkeypatch):
    assert optional("json", "dev") is json
    for required, outcome, said in (
        ("", Skipped, "^needs no_such_package: pip install 'isomorph.with.'$"),
        ("1", Failed, "ISOMORPH_REQUIRE_ALL is set, and the test needs no_such_package"),
    ):
        monkeypatch.setenv("ISOMORPH_REQUIRE_ALL", required)
        with pytest.raises(outcome, match=said) as caught:
            optional("no_such_package", "with")
        assert outcome is Failed or caught.value.allow_module_level
