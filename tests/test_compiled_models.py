"""Surgery on models under torch.compile: the model inside, under its own names, and a copy that is not compiled."""

import pytest
import timm
import torch
import torch.nn.utils.prune
from torch import nn

import isomorph as iso
from isomorph.surgery import fusible_modules

VIT = dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3, num_classes=5)
NOTE = "the model was compiled and its copy is not: compile the copy"
RULES = {
    "AttentionToGPSA": (iso.AttentionToGPSA(), "blocks.*.attn"),
    "AttentionToRefined": (iso.AttentionToRefined(span="spatial"), "blocks.*.attn"),
    "LinearToPyramid": (iso.LinearToPyramid(), ["blocks.*.attn.qkv", "blocks.*.mlp.fc?"]),
    "ConvToGPSA": (iso.ConvToGPSA(), "layer3.*.conv2"),
}


def plain(name):
    model = "cifar_resnet20" if name == "ConvToGPSA" else "vit_tiny_patch16_224"
    return timm.create_model(model, **({} if name == "ConvToGPSA" else VIT)).eval()


def compiled(model, how):
    """The model compiled in one of the ways that torch has; nothing is compiled before it is called."""
    if how == "whole":
        return torch.compile(model)
    if how == "in place":
        model.compile()
        return model
    parts = model.blocks if hasattr(model, "blocks") else model.layer3
    for i, part in enumerate(parts):
        parts[i] = torch.compile(part)
    return torch.compile(model) if how == "both" else model


@pytest.mark.parametrize("how", ["whole", "in place", "parts", "both"])
@pytest.mark.parametrize("name", RULES)
def test_recast_takes_the_model_inside(name, how):
    (rule, where), model, x = RULES[name], plain(name), torch.randn(1, 3, 32, 32)
    wanted = iso.recast(model, rule, where)
    given = compiled(model, how)
    assert iso.targets(given, rule, where) == list(iso.edits(wanted)[0].names)
    new = iso.recast(given, rule, where)
    assert [n for n, _ in new.named_modules()] == [n for n, _ in wanted.named_modules()]
    assert iso.edits(new) == iso.edits(wanted)
    assert iso.surgery.notes(new) == (NOTE,)
    report = iso.verify(given, new, x)
    assert report.notes == (NOTE,)
    assert len(report.targets) == len(iso.edits(new)[0].names)
    if name == "LinearToPyramid":
        assert fusible_modules(torch.compile(new))
        thin = iso.fuse(torch.compile(new))
        assert iso.surgery.notes(thin) == (NOTE,)
        iso.verify(given, thin, x)
    else:
        back = iso.revert(torch.compile(new))
        assert iso.edits(back) == ()
        iso.verify(given, back, x)


def test_unstride_and_recalibrate_take_the_model_inside():
    cnn = plain("ConvToGPSA")
    flat = iso.unstride(torch.compile(cnn), "layer3")
    assert iso.edits(flat)[0].names == ("layer3",)
    assert not hasattr(iso.recalibrate(torch.compile(flat), [torch.randn(2, 3, 16, 16)]), "_orig_mod")


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path):
    model = plain("ConvToGPSA")
    iso.save(torch.compile(model), tmp_path / "m.safetensors")
    assert iso.load(tmp_path / "m.safetensors").state_dict().keys() == model.state_dict().keys()


def test_hooks_on_the_wrapper_are_an_error():
    wrapped = torch.compile(nn.Linear(4, 4))
    wrapped.register_forward_hook(lambda *args: None)
    with pytest.raises(iso.UserError, match=r"the compiled model has hooks \(<lambda>\)"):
        iso.recast(wrapped, iso.LinearToPyramid(), "")


def test_modules_without_a_truth_value_are_left_alone():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), torch.compile(nn.Linear(4, 4)), nn.ModuleDict({}))
    with pytest.raises(TypeError):
        bool(net[1])
    assert isinstance(iso.recast(net, iso.LinearToPyramid(), "0")[0], iso.layers.PyramidConv2d)


def test_a_result_that_a_layer_keeps_is_named():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.cache = nn.Conv2d(4, 4, 3, padding=1, bias=False), {}

        def forward(self, x):
            self.cache["bias"] = self.conv.weight.sum()
            return self.conv(x) + self.cache["bias"]

    model = nn.Sequential(Keeps())
    model(torch.randn(1, 4, 8, 8))
    with pytest.raises(iso.UserError, match=r"cannot be copied .*; 0 keeps a result of its last call: call model"):
        iso.recast(model, iso.ConvToGPSA(), "0.conv")
    pruned = torch.nn.utils.prune.identity(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False))[0], "weight")
    pruned(torch.randn(1, 4, 8, 8))
    with pytest.raises(iso.UserError, match=r"cannot be copied .*; make pruning and weight norms permanent first"):
        iso.recast(nn.Sequential(pruned, nn.Conv2d(4, 4, 3, padding=1)), iso.ConvToGPSA(), "1")
