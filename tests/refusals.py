"""What a user gets wrong is an error of one line."""

import pytest

import isomorph as iso


def refused(said, call, *args, **kwargs):
    """The call ends in a UserError of one line that the pattern is found in; returns the line."""
    with pytest.raises(iso.UserError, match=said) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
