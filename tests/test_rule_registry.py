"""Rules by name, in recipes and on the command line; every option of every rule, and values beyond reason."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

import isomorph as iso
from isomorph.lab.training.recipe.recipe import document_fields, validate
from isomorph.lab.training.recipe.rule_options import rule_options
from isomorph.surgery.insert import BLOCKS
from isomorph.surgery.rule import RULES
from refusals import refused


@dataclass(frozen=True)
class Kept(iso.surgery.Rule):
    """A module stays as it is."""

    init: Literal["copy"] = "copy"
    """How it stays."""
    depth: int | None = None

    atol: ClassVar[float] = 0.0

    def reason(self, site: iso.surgery.Site) -> str | None:
        return None

    def build(self, site: iso.surgery.Site) -> nn.Module:
        return site.module


class Anew(Kept):
    """A layer made anew, as torch makes it."""

    def build(self, site: iso.surgery.Site) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4))


def test_what_a_rule_makes_has_dtype_device_and_mode_of_what_it_replaces():
    old = nn.Sequential(nn.Linear(3, 4)).to(torch.bfloat16).requires_grad_(False).eval()
    for model in (old, old.to("meta").double().requires_grad_(True).train()):
        new = iso.recast(model, Anew(), "0")[0][0]
        like = model[0].weight
        found = new.weight.dtype, new.weight.device, new.weight.requires_grad, new.training
        assert found == (like.dtype, like.device, like.requires_grad, model.training)


def recipe(**recast):
    return {"model": {"name": "cifar_resnet20", "recast": {"where": "fc", **recast}}}


def test_a_registered_rule_is_known_in_recipes(monkeypatch):
    monkeypatch.setitem(RULES, "Kept", Kept)
    options = rule_options()
    assert options["depth"].help.startswith("Kept: ")
    assert options["init"].type == Literal["exact", "near", "paper", "same-function", "copy"] | None
    assert "Kept: How it stays." in options["init"].help
    assert "--model.recast.depth" in document_fields()
    assert validate(recipe(rule="Kept", depth=3)).model.recast.build_rule() == Kept(depth=3)
    for fields, said in (
        (dict(rule="Kept", dept=3), r"model.recast.dept is not a field \(did you mean depth\?\)"),
        (dict(rule="Kept", depth=3.5), r"model\.recast\.depth: input should be a valid integer"),
        (dict(rule="Kept", ratio=3), "Kept has no ratio"),
        (dict(rule="Kep"), "Kep is not a rule; did you mean Kept"),
        (dict(rule="AttentionToRefined", ratio=HUGE), "ratio .*must be"),
    ):
        refused(said, validate, recipe(**fields))


def test_what_is_not_a_rule_or_has_a_name_that_is_taken_is_not_registered():
    own = {"__annotations__": {"depth": int}}
    frozen = dataclass(frozen=True)
    rules, blocks = dict(RULES), dict(BLOCKS)
    for given, said in (
        (type("Own", (iso.surgery.Rule,), {}), "Own is not a rule; make it a frozen dataclass"),
        (
            dataclass(type("Own", (iso.surgery.Rule,), own | {"atol": 0.0})),
            "make it a frozen dataclass",
        ),
        (frozen(type("Own", (), own | {"atol": 0.0})), "derive it from iso.surgery.Rule"),
        (frozen(type("Own", (iso.surgery.Rule,), own)), "derive it .* and give it an atol"),
        (iso.ConvToGPSA(), "derive it from iso.surgery.Rule"),
        (type("ConvToGPSA", (Kept,), {}), "a rule named ConvToGPSA is registered already"),
    ):
        refused(said, iso.surgery.register_rule, given)
    name = next(iter(blocks))
    said = f"a block named {name} is registered already; give another name"
    refused(said, iso.surgery.register_block, nn.Identity, name)
    assert (rules, blocks) == (RULES, BLOCKS)


HUGE = 99999999999999999999
NUMBERS = [0, -1, 1e-300, 1e300, 10**400, math.inf, math.nan, True, "2", []]
WHOLE = [-1, 2.5, HUGE, math.nan, True, "3", []]
GATED = iso.AttentionToGPSA
REFINED = iso.AttentionToRefined
RELATIVE = iso.AttentionToRelative
WIDE = iso.LinearToPyramid
HOSTILE = {
    (iso.ConvToGPSA, "init"): ["exakt", "", [], 1],
    (iso.ConvToGPSA, "locality"): NUMBERS,
    (iso.ConvToGPSA, "gate"): [1e300, -math.inf, math.nan, "1", []],
    (iso.ConvToGPSA, "content"): ["globl", "", {}, None],
    (iso.ConvToGPSA, "window"): [*WHOLE, 0, 4, 129, 7],
    (GATED, "init"): ["same-function", ["exact"]],
    (GATED, "locality"): NUMBERS,
    (GATED, "grid_size"): [14, (14,), (0, 3), (3, HUGE), (2.0, 3), "23", (), ("2", "3"), {1, 2}],
    (GATED, "prefix_tokens"): WHOLE,
    (REFINED, "ratio"): WHOLE,
    (REFINED, "kernel"): [*WHOLE, 0, 2, 1001],
    (REFINED, "init"): ["exact", None, []],
    (REFINED, "reduce"): [0, 1, "no", None],
    (REFINED, "span"): ["image", None, []],
    (REFINED, "recompute"): [0, "yes", None],
    (REFINED, "grid_size"): [(1, HUGE)],
    (RELATIVE, "prefix_tokens"): [HUGE],
    (RELATIVE, "prefix_bias"): [0, 1, "yes", None],
    (WIDE, "layout"): [
        *(
            "",
            "P",
            "P-W",
            "P-W0",
            "P-W2s",
            "P-W33S",
            f"P-W{HUGE}",
            "R-D99999W1S",
            "R-D0W1",
            "naive-W999",
        ),
        *("naive-W2S", "P-W\u0663S", "P-W2S\n", 2, None, []),
    ],
    (WIDE, "init"): ["exact", []],
    (WIDE, "rectify"): ["layernorm", "v=layernorm", "v=none,v=rescale", {}, [], None],
    (WIDE, "rescale_by"): NUMBERS,
    (iso.Anneal, "steps"): [0, 1.5, "3"],
    (iso.Anneal, "start"): [(0.0, 1.0), (1.0, math.nan), (1e30, 1.0)],
    (iso.Anneal, "stop"): [(-1.0, 1.0), (1.0, 1e30)],
}


@pytest.mark.parametrize(
    ("rule", "field"), HOSTILE, ids=lambda value: getattr(value, "__name__", value)
)
def test_values_beyond_reason_are_one_clear_line(rule, field):
    others = {"steps": 5} if rule is iso.Anneal and field != "steps" else {}
    for value in HOSTILE[rule, field]:
        said = refused(".", rule, **others, **{field: value})
        assert field in said or rule is iso.Anneal, said
        assert len(said) < 200, said


def test_a_rule_written_for_modules_is_told_what_to_change():
    def build(self, module):
        return module

    def attach(self, model):
        pass

    for name, method, said in (
        (
            "reason",
            build,
            r"Own\.reason takes a module, and rules get a Site now; write reason\(self, site\), and site\.module",
        ),
        ("build", build, r"write build\(self, site\)"),
        ("within", attach, r"Own\.within is never called: rules get a Site now; read site\.model"),
        ("attach", attach, r"name it connect\(self, site\)"),
    ):
        refused(said, type, "Own", (iso.surgery.Rule,), {name: method})
    refused(
        r"this is a Conv2d; give iso\.surgery\.Site\(module\)",
        iso.ConvToGPSA().build,
        nn.Conv2d(3, 4, 3),
    )


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(4, 12), "k": nn.Linear(4, 4)})


def test_a_site_knows_its_module_its_parent_and_what_is_found_once():
    model = Parts()
    calls = []
    root = iso.surgery.Site(model)
    assert root.module == model
    assert root.parent is None
    assert root.part_names == ()
    part = root.at("attn.v")
    whole = root.at("attn.qkv")
    own = root.at("attn.k")
    assert part.module == model.attn["qkv"]
    assert part.part == "v"
    assert part.path == "attn.qkv"
    assert part.name == "attn.v"
    assert part.parent is whole.parent is model.attn
    assert (own.module, own.part) == (model.attn["k"], ""), "a module has precedence over a part"
    assert root.find("attn.x") is None
    refused("the model has no module attn.x", root.at, "attn.x")
    found = [site.once(lambda model: model) for site in (part, whole)]
    assert found == [model, model]
    for site in (root, part, whole):
        site.once(calls.append)
    assert calls == [model]
