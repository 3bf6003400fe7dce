"""Attention of transformers' vision models, with random weights: refined and gated through their own interface."""

import pytest
import torch

import isomorph as iso
from attention_layers import NETWORKS as ATTENTION_NETWORKS
from isomorph.surgery.edited_attention import EditedAttention
from law_rows import noisy
from refusals import refused
from test_map_edit import train_edits

NETWORKS = {  # prefix tokens, calls with images of another size
    "transformers' ViT": (1, dict(interpolate_pos_encoding=True)),
    "transformers' DINOv2": (1, {}),
    "transformers' DINOv2 with registers": (5, {}),
    "transformers' DINOv3": (3, {}),
    "transformers' SigLIP": (0, dict(interpolate_pos_encoding=True)),
    "transformers' CLIP": (1, dict(interpolate_pos_encoding=True)),
}
RULES = {"gated": iso.AttentionToGPSA(), "refined": iso.AttentionToRefined()}
X = torch.randn(2, 3, 32, 32)


def build(name="transformers' ViT"):
    torch.manual_seed(0)
    return noisy(ATTENTION_NETWORKS[name]().eval())


def run(model, x, **arguments):
    return model(x, **arguments)[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_takes_other_sizes_and_implementations(name):
    """Besides the laws of every row (test_recast_laws.py)."""
    model, (prefix, other) = build(name), NETWORKS[name]
    wide = torch.randn(1, 3, 32, 48)
    for rule in RULES.values():
        new = iso.recast(model, rule)
        torch.testing.assert_close(
            run(new, wide, **other), run(model, wide, **other), atol=1e-5, rtol=1e-4
        )
        before = run(train_edits(new), X)
        # of the layers that were not recast: the edited ones keep their edit
        new.set_attn_implementation("eager")
        torch.testing.assert_close(run(new, X), before, atol=1e-5, rtol=1e-4)
        edited = [module for module in new.modules() if isinstance(module, EditedAttention)]
        if rule is RULES["gated"]:
            assert edited[0].prefix_tokens == prefix
            assert len(iso.gates(new)) == len(edited)


def test_edited_maps_are_captured_on_the_grid_of_the_image():
    gated = train_edits(iso.recast(build(), RULES["gated"], "*.attention"))
    names = [f"layers.{i}.attention" for i in (0, 1)]
    maps = iso.attention_maps(gated, X)
    assert {name: tuple(found.shape) for name, found in maps.items()} == dict.fromkeys(
        names, (2, 4, 17, 17)
    )
    for found in maps.values():
        assert torch.allclose(found.sum(-1), torch.ones(()))
    assert list(iso.nonlocality(build(), X)) == list(iso.nonlocality(gated, X)) == names
    assert iso.analysis.attention_from(gated, X)[names[0]].shape == (2, 4, 4, 4)


@pytest.mark.parametrize(
    "rule", [*RULES.values(), iso.LinearToPyramid()], ids=lambda rule: type(rule).__name__
)
def test_the_hooks_by_which_transformers_records_outputs_are_handed_on(rule):
    model = build()
    model(X, output_hidden_states=True)  # registers them
    recorder = next(m for m in model.modules() if m._forward_hooks)._forward_hooks
    linear = model.get_submodule(iso.targets(model, iso.LinearToPyramid())[-1])
    linear.register_forward_hook(next(iter(recorder.values())))  # one on a layer that is replaced
    before = model(X, output_hidden_states=True)
    new = iso.recast(model, rule)
    after = new(X, output_hidden_states=True)
    torch.testing.assert_close(after.hidden_states, before.hidden_states, atol=1e-4, rtol=1e-3)
    assert sum(len(m._forward_hooks) for m in new.modules()) >= sum(
        len(m._forward_hooks) for m in model.modules()
    )
    linear.register_forward_hook(lambda *_: None)
    if isinstance(rule, iso.LinearToPyramid):
        refused("has hooks", iso.recast, model, rule)
