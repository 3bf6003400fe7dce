"""Attention of transformers' vision models, with random weights: refined and gated through their own interface."""

import pytest
import torch

import isomorph as iso
from attention_layers import NETWORKS as ATTENTION_NETWORKS
from isomorph.layers import GatedMap
from isomorph.surgery.edited_attention import EditedAttention
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
    model = ATTENTION_NETWORKS[name]().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def run(model, x, **arguments):
    return model(x, **arguments)[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_takes_other_sizes_and_implementations(name):
    """Besides the laws of every row (test_recast_laws.py)."""
    model, (prefix, other) = build(name), NETWORKS[name]
    wide = torch.randn(1, 3, 32, 48)
    for rule in RULES.values():
        new = iso.recast(model, rule)
        torch.testing.assert_close(run(new, wide, **other), run(model, wide, **other), atol=1e-5, rtol=1e-4)
        before = run(train_edits(new), X)
        new.set_attn_implementation("eager")  # of the layers that were not recast: the edited ones keep their edit
        torch.testing.assert_close(run(new, X), before, atol=1e-5, rtol=1e-4)
        edited = [module for module in new.modules() if isinstance(module, EditedAttention)]
        if rule is RULES["gated"]:
            assert edited[0].prefix_tokens == prefix
            assert len(iso.gates(new)) == len(edited)


@pytest.fixture(scope="module")
def gated():
    return train_edits(iso.recast(build(), RULES["gated"], "*.attention"))


def test_edited_maps_are_captured_on_the_grid_of_the_image(gated):
    plain, names = build(), [f"layers.{i}.attention" for i in range(2)]
    maps = iso.attention_maps(gated, X)
    assert {name: tuple(found.shape) for name, found in maps.items()} == dict.fromkeys(names, (2, 4, 17, 17))
    ones = dict.fromkeys(names, torch.ones(2, 4, 17))
    torch.testing.assert_close({name: found.sum(-1) for name, found in maps.items()}, ones)
    assert list(iso.nonlocality(plain, X)) == list(iso.nonlocality(gated, X)) == names
    assert iso.analysis.attention_from(gated, X)[names[0]].shape == (2, 4, 4, 4)
    assert list(iso.nonlocality(build("transformers' CLIP"), X)) == [f"encoder.layers.{i}.self_attn" for i in range(2)]


def test_a_recast_network_is_saved_and_trained(gated, tmp_path):
    iso.save(gated, tmp_path / "vit.safetensors")
    loaded = iso.load(tmp_path / "vit.safetensors", base=build()).eval()
    torch.testing.assert_close(run(loaded, X), run(gated, X))
    gated.zero_grad()
    run(gated.train(), X).square().sum().backward()
    gates = [module.gate for module in gated.modules() if isinstance(module, GatedMap)]
    assert gates[0].grad.abs().max() > 0  # the last layer's class token attends by content only
    gated.eval()


def test_linear_layers_become_pyramids():
    model = build("transformers' DINOv2")
    names = iso.surgery.acceptance(model, iso.LinearToPyramid()).accepted
    wide = iso.recast(model, iso.LinearToPyramid(), [name for name in names if "encoder.layer.1" in name])
    iso.verify(model, wide, X)
    torch.testing.assert_close(run(iso.fuse(wide), X), run(model, X), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", [*RULES.values(), iso.LinearToPyramid()], ids=lambda rule: type(rule).__name__)
def test_the_hooks_by_which_transformers_records_outputs_are_handed_on(rule):
    model = build()
    model(X, output_hidden_states=True)  # registers them
    recorder = next(m for m in model.modules() if m._forward_hooks)._forward_hooks
    linear = model.get_submodule(iso.targets(model, iso.LinearToPyramid())[-1])
    linear.register_forward_hook(next(iter(recorder.values())))  # one on a layer that is replaced
    before = model(X, output_hidden_states=True)
    new = iso.recast(model, rule)
    after = new(X, output_hidden_states=True)
    assert len(after.hidden_states) == len(before.hidden_states) > 1
    torch.testing.assert_close(after.hidden_states, before.hidden_states, atol=1e-4, rtol=1e-3)
    assert sum(len(m._forward_hooks) for m in new.modules()) >= sum(len(m._forward_hooks) for m in model.modules())
    linear.register_forward_hook(lambda *_: None)
    if isinstance(rule, iso.LinearToPyramid):
        with pytest.raises(iso.UserError, match="has hooks"):
            iso.recast(model, rule)
