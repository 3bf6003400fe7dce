"""One way to watch the modules of a model: who runs, what each gets and gives, also when a call fails."""

import pytest
import torch
from torch import nn

from isomorph.operations import observing


class Picky(nn.Module):
    def forward(self, x, fail=False):
        if fail:
            raise RuntimeError("no")
        return 2 * x


def model():
    return nn.ModuleDict({"inner": nn.Sequential(Picky(), nn.ReLU())})


def test_calls_are_listed_in_the_order_in_which_they_end():
    outer = model()
    x = torch.ones(2)
    calls = []
    with observing(outer, after=calls.append):
        outer["inner"](x)
    assert [call.name for call in calls] == ["inner.0", "inner.1", "inner"]
    assert calls[0].input is x
    assert torch.equal(calls[-1].output, 2 * x)
    for part in outer.modules():
        assert not (part._forward_hooks)
        assert not (part._forward_pre_hooks)


def test_names_choose_what_is_watched_and_arguments_by_name_are_seen():
    outer = model()
    seen = []
    with observing(outer, before=seen.append, names=["inner.0"]):
        outer["inner"][0](x=torch.ones(1), fail=False)
        outer["inner"][1](torch.ones(1))
    assert [call.name for call in seen] == ["inner.0"]
    assert set(seen[0].kwargs) == {"x", "fail"}
    assert seen[0].input is seen[0].kwargs["x"]


def test_who_runs_is_known_also_after_a_call_that_failed():
    outer = model()
    ended = []
    inside = []
    outer["inner"][1].register_forward_pre_hook(lambda *_: inside.append(running.innermost))
    with observing(outer, after=ended.append) as running:
        with pytest.raises(RuntimeError, match="no"):
            outer["inner"][0](torch.ones(1), fail=True)
        assert running.innermost == ""
        outer["inner"](torch.ones(1))
    assert [call.name for call in ended] == ["inner.0", "inner.1", "inner"], (
        "a failed call has no output to show"
    )
    assert inside == ["inner"], "hooks of the model's own come first"
