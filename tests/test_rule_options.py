"""Every option of every rule: values beyond reason are one clear line, in Python and on the command line."""

import math

import pytest
import torch
from torch import nn

import isomorph as iso
from isomorph.training.recipe.recipe import validate
from refusals import refused

HUGE = 99999999999999999999
NUMBERS = [0, -1, 1e-300, 1e300, 10**400, math.inf, -math.inf, math.nan, True, "2", [], None]
WHOLE = [-1, 2.0, 2.5, HUGE, 10**5000, math.nan, True, "3", []]
HOSTILE = {
    (iso.ConvToGPSA, "init"): ["exakt", "", [], {}, 1],
    (iso.ConvToGPSA, "locality"): NUMBERS[:-1],
    (iso.ConvToGPSA, "gate"): [1e300, -1e300, math.inf, math.nan, "1", []],
    (iso.ConvToGPSA, "content"): ["globl", "", [], {}, 1, None],
    (iso.ConvToGPSA, "window"): [*WHOLE, 0, 4, 129, 7],
    (iso.AttentionToGPSA, "init"): ["same-function", ["exact"]],
    (iso.AttentionToGPSA, "locality"): NUMBERS[:-1],
    (iso.AttentionToGPSA, "gate"): [1e9, -HUGE, math.nan, "1"],
    (iso.AttentionToGPSA, "grid_size"): [14, (14,), (0, 3), (3, -1), (3, HUGE), (2.0, 3), "23", (), ("2", "3"), {1, 2}],
    (iso.AttentionToGPSA, "prefix_tokens"): WHOLE,
    (iso.AttentionToRefined, "ratio"): WHOLE,
    (iso.AttentionToRefined, "kernel"): [*WHOLE, 0, 2, 1001],
    (iso.AttentionToRefined, "init"): ["exact", None, []],
    (iso.AttentionToRefined, "reduce"): [0, 1, "no", None],
    (iso.AttentionToRefined, "span"): ["image", None, []],
    (iso.AttentionToRefined, "recompute"): [0, "yes", None],
    (iso.AttentionToRefined, "grid_size"): [(1, HUGE)],
    (iso.AttentionToRefined, "prefix_tokens"): [HUGE],
    (iso.AttentionToRelative, "grid_size"): [(1, HUGE)],
    (iso.AttentionToRelative, "prefix_tokens"): [HUGE],
    (iso.AttentionToRelative, "prefix_bias"): [0, 1, "yes", None],
    (iso.LinearToPyramid, "layout"): [
        *("", "P", "P-W", "P-W0", "P-W2s", "P-W33S", "P-W999999S", f"P-W{HUGE}", "P-W" + "9" * 5000, "R-D99999W1S"),
        *("R-D0W1", "naive-W999", "naive-W2S", "P-W\u0663S", "P-W2S\n", 2, None, 10**5000, []),
    ],
    (iso.LinearToPyramid, "init"): ["exact", []],
    (iso.LinearToPyramid, "rectify"): ["layernorm", "v=layernorm", "v=none,v=rescale", {}, [], None],
    (iso.LinearToPyramid, "rescale_by"): NUMBERS[:-1],
    (iso.Anneal, "steps"): [0, 1.5, "3"],
    (iso.Anneal, "start"): [(0.0, 1.0), (1.0, math.nan), (math.inf, 1.0), (1e30, 1.0)],
    (iso.Anneal, "stop"): [(-1.0, 1.0), (1.0, 1e30)],
}


@pytest.mark.parametrize(("rule", "field"), HOSTILE, ids=lambda value: getattr(value, "__name__", value))
def test_values_beyond_reason_are_one_clear_line(rule, field):
    others = {"steps": 5} if rule is iso.Anneal and field != "steps" else {}
    for value in HOSTILE[rule, field]:
        try:
            rule(**others, **{field: value})
        except iso.UserError as error:
            said = str(error)
        else:
            said = f"{value!r} was taken"
        assert field in said or rule is iso.Anneal, said
        assert len(said) < 200, said
        assert "was taken" not in said, said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("layer", "x", "rule"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), torch.randn(1, 3, 5, 6), iso.ConvToGPSA(locality=1e3, gate=1e3)),
        (nn.Conv2d(3, 4, 3, padding=1), torch.randn(1, 3, 5, 6), iso.ConvToGPSA(locality=1e-4, gate=-1e3)),
        (nn.Linear(4, 3), torch.randn(5, 4), iso.LinearToPyramid("P-W32S", rescale_by=1e6)),
        (nn.Linear(4, 3), torch.randn(5, 4), iso.LinearToPyramid("R-D32W1", rescale_by=1e-6)),
    ],
)
def test_values_at_the_bounds_work(layer, x, rule):
    new = iso.recast(nn.Sequential(layer), rule, "0").train()
    new(x).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in new.parameters())


def test_recipes_say_so_too():
    for rule, field, value in (("AttentionToRefined", "ratio", HUGE), ("ConvToGPSA", "locality", 1e300)):
        recast = {"where": "*", "rule": rule, field: value}
        refused(f"{field} .*must be", validate, {"model": {"name": "cifar_resnet20", "recast": recast}})
