"""What images a model takes: one data config for all commands, and no size whose edge the patches would drop."""

import pytest
import timm
import torch
from timm.data import resolve_data_config
from torch import nn

import isomorph as iso
from isomorph.checkpoints.model import record_data
from isomorph.cli import main
from isomorph.cli.analyze import open_page_model
from isomorph.cli.options import OpenOptions
from isomorph.lab.evaluation.model_data import evaluation_data
from isomorph.lab.training.open import open_model
from isomorph.models.input_sizes import evaluation_config, fit_to_size, training_config
from refusals import refused

SMALL = dict(depth=1, embed_dim=24, num_heads=3, num_classes=5)
CUTTING = {
    "vit": ("vit_tiny_patch16_224", SMALL, 16),
    "swin": (
        "swin_tiny_patch4_window7_224",
        dict(embed_dim=12, depths=(1, 1), num_heads=(1, 2), num_classes=5),
        4,
    ),
    "convit": ("convit_ti", dict(depth=2, num_classes=5, local_up_to_layer=1), 16),
    "convolved image": ("refined_vit_s", dict(depth=2, num_classes=5), 16),
}
WHOLE = {
    "resnet": ("resnet18", dict(channels=(8, 8, 8, 8), num_classes=5, zero_init_last=False)),
    "padded": (
        "vit_tiny_patch16_224",
        {**SMALL, "dynamic_img_size": True, "dynamic_img_pad": True},
    ),
    "padded convit": (
        "convit_ti",
        dict(depth=2, num_classes=5, local_up_to_layer=1, dynamic_img_pad=True),
    ),
}


def edge_seen(model, size):
    """Whether the last row and column of an image have a say in the answer."""
    x = torch.randn(1, 3, *size, requires_grad=True)
    model(x).square().sum().backward()
    return bool(x.grad[..., -1, :].any() and x.grad[..., :, -1].any())


@pytest.mark.parametrize("kind", CUTTING)
def test_a_size_that_patches_do_not_fill_is_refused(kind):
    name, arguments, patch = CUTTING[kind]
    model = timm.create_model(name, **arguments).eval()
    below = 64 - 64 % patch
    odd = (below + 1, 2 * below)
    said = rf"no images of {odd[0]} x {odd[1]}: patches of \d+ x \d+ do not fill them; give "
    nearest = f"{below} x {2 * below} or {below + patch} x {2 * below}"
    refused(said + nearest, fit_to_size, model, odd)
    if kind not in ("swin",):  # whose windows want more than whole patches
        assert edge_seen(fit_to_size(model, (below, 2 * below)), (below, 2 * below))


def test_the_own_size_of_a_model_that_takes_no_other_is_said():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    said = refused(r"takes no images of 16 x 16: ", fit_to_size, model, 16)
    assert "its own" not in said
    model.pretrained_cfg = dict(input_size=(3, 8, 8))
    refused(r"takes no images of 16 x 16: .*; its own are 8 x 8$", fit_to_size, model, 16)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_size_of_which_nothing_is_dropped_is_taken(kind):
    name, arguments = WHOLE[kind]
    model = timm.create_model(name, **arguments).eval()
    assert edge_seen(fit_to_size(model, (65, 71)), (65, 71))


@pytest.mark.parametrize("name", ["cifar_resnet20", "resnet18", "vit_tiny_patch16_224"])
def test_another_number_of_channels_is_normalised_by_the_mean(name):
    grey = timm.create_model(name, in_chans=1)
    colour = timm.create_model(name, in_chans=3)
    for config, test in ((evaluation_config, True), (training_config, False)):
        found = config(grey)
        plain = config(colour)
        assert plain == resolve_data_config({}, model=colour, use_test_size=test)
        assert found["input_size"] == (1, *plain["input_size"][1:])
        assert found["mean"] == pytest.approx((sum(plain["mean"]) / 3,))
        assert found["std"] == pytest.approx((sum(plain["std"]) / 3,))
        assert config(grey, (20, 30))["input_size"] == (1, 20, 30)
        refused("must be a height and a width in pixels", config, grey, (0, 30))


def test_a_command_says_so(tmp_path, capsys):
    vit = timm.create_model("vit_tiny_patch16_224", **{**SMALL, "num_classes": 10})
    iso.save(
        vit,
        tmp_path / "vit.safetensors",
        base={"name": "vit_tiny_patch16_224", **SMALL, "num_classes": 10},
    )
    with pytest.raises(SystemExit) as end:
        main(["bench", str(tmp_path / "vit.safetensors"), "--no-peak", "--size", "225"])
    assert end.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "patches of 16 x 16 do not fill them; give 224 x 224 or 240 x 240" in said


@pytest.mark.parametrize("name", ["resnet18"])
def test_a_trained_model_is_looked_at_as_it_was_trained(name, tmp_path):
    """evaluate and analyze read what images the checkpoint says, not what its base would have."""
    model = timm.create_model(name, num_classes=10)
    record_data(model, {"input_size": [3, 40, 48], "mean": [0.1, 0.2, 0.3], "source": "digits"})
    iso.save(model, path := tmp_path / "model.safetensors")
    looked = open_page_model(str(path), "it", OpenOptions(), "cpu").config
    assert looked["input_size"] == (3, 40, 48)
    assert list(looked["mean"]) == [0.1, 0.2, 0.3]
    assert looked == evaluation_data(open_model(str(path)))[1]
