"""A saved file rebuilds the network that was saved, with all arguments and changes, or saving is refused."""

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.checkpoints.difference import find_difference
from refusals import refused

VIT = dict(model_name="vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)


def shaken(model):
    """The model in eval mode, with weights by which all of its parts change the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def assert_round_trip(model, path, size=32):
    iso.save(shaken(model), path)
    loaded = iso.load(path)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)
    assert find_difference(model, loaded) is None
    return loaded


@pytest.mark.parametrize(
    "arguments",
    [
        dict(num_heads=6),
        dict(global_pool="avg", fc_norm=False),
        dict(pre_norm=True, qk_norm=True),
        dict(drop_rate=0.2),
    ],
)
def test_arguments_that_no_tensor_shows(tmp_path, arguments):
    loaded = assert_round_trip(timm.create_model(**VIT, **arguments), tmp_path / "m.safetensors")
    assert "p=0.2" in repr(loaded) if "drop_rate" in arguments else True


def test_a_head_that_was_changed_before_and_after_loading(tmp_path):
    model = timm.create_model(**VIT)
    model.reset_classifier(0, "")
    assert_round_trip(model, tmp_path / "features.safetensors")
    loaded = assert_round_trip(timm.create_model(**VIT), tmp_path / "plain.safetensors")
    loaded.reset_classifier(5, "avg")
    loaded.set_input_size(64)
    assert assert_round_trip(loaded, tmp_path / "large.safetensors", size=64).num_classes == 5


def test_edits_on_a_network_with_arguments(tmp_path):
    wide = iso.recast(
        timm.create_model(**VIT, num_heads=6), iso.LinearToPyramid(), "blocks.*.mlp.fc1"
    )
    assert_round_trip(wide, tmp_path / "wide.safetensors")
    assert_round_trip(iso.fuse(wide), tmp_path / "thin.safetensors")


def test_changes_that_cannot_be_rebuilt_are_named(tmp_path):
    model = timm.create_model(**VIT)
    rest = dict(VIT)
    name = rest.pop("model_name")
    with pytest.raises(iso.UserError, match=r"blocks\.0\.attn\.num_heads is 3, and would be 6"):
        iso.save(model, tmp_path / "m.safetensors", base={"name": name, **rest, "num_heads": 6})
    cnn = timm.create_model("cifar_resnet20")
    cnn.layer1[0].act1 = torch.nn.GELU()
    refused(
        r"layer1\.0\.act1\.__class__ is GELU, and would be ReLU",
        iso.save,
        cnn,
        tmp_path / "m.safetensors",
    )
    assert not list(tmp_path.iterdir())


def test_names_of_other_classes_are_dropped(tmp_path):
    path = tmp_path / "m.safetensors"
    iso.save(timm.create_model("cifar_resnet20", num_classes=5), path)
    assert "label_names" not in iso.load(path).pretrained_cfg
    iso.save(timm.create_model("cifar_resnet20"), path)
    assert len(iso.load(path).pretrained_cfg["label_names"]) == 10


def test_a_run_on_another_image_size_is_no_difference(tmp_path):
    model = timm.create_model(**{**VIT, "img_size": 64}, dynamic_img_size=True)
    for rule in (iso.AttentionToGPSA(), iso.AttentionToRefined(), iso.AttentionToRelative()):
        new = iso.recast(model, rule, "blocks.0.attn").eval()
        new(torch.randn(1, 3, 32, 96))
        assert_round_trip(new, tmp_path / f"{type(rule).__name__}.safetensors", size=64)


def test_tables_of_relative_positions_follow_another_image_size(tmp_path):
    """timm's set_input_size leaves them as they are: what the error advises keeps the function."""
    model = iso.recast(timm.create_model(**VIT, patch_size=8), iso.AttentionToRelative(), "*.attn")
    shaken(model).set_input_size((48, 32))
    images = torch.randn(2, 3, 48, 32)
    before = model(images).detach()
    refused(
        r"blocks.0.attn .* set_grid_size\(\(6, 4\)\)", iso.save, model, tmp_path / "m.safetensors"
    )
    for block in model.blocks:
        block.attn.set_grid_size((6, 4))
    torch.testing.assert_close(model(images), before, rtol=0, atol=0)
    iso.save(model, tmp_path / "m.safetensors")
    loaded = iso.load(tmp_path / "m.safetensors")
    torch.testing.assert_close(loaded(images), before, rtol=0, atol=0)


def test_each_tensor_comes_back_in_its_own_dtype(tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=4).bfloat16()
    vit.norm.float(), vit.head.half()
    iso.save(vit, tmp_path / "mixed.safetensors")
    loaded = iso.load(tmp_path / "mixed.safetensors").state_dict()
    for name, tensor in vit.state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)


def double_output(module, inputs, output):
    return 2 * output


def patch_forward(model):
    old = model.layer1.forward
    model.layer1.forward = lambda x: 2 * old(x)


ATTACHED = {
    "layer1 has hooks .double_output": lambda m: m.layer1.register_forward_hook(double_output),
    "the model has hooks": lambda m: m.register_forward_pre_hook(lambda m, x: (x[0] / 2,)),
    "layer1 has a patched forward": patch_forward,
}


@pytest.mark.parametrize("words", ATTACHED)
def test_a_file_does_not_lose_what_changes_the_function(words, tmp_path):
    model = timm.create_model("cifar_resnet20").eval()
    ATTACHED[words](model)
    refused(
        f"{words}.*which a file does not keep .remove them.*base",
        iso.save,
        model,
        tmp_path / "x.safetensors",
    )
    iso.save(model, tmp_path / "x.safetensors", base=model)
    opened = iso.load(tmp_path / "x.safetensors", base=model)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(opened(x), model(x))


def test_synchronised_norms_are_batch_norms_in_a_file(tmp_path):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(timm.create_model("cifar_resnet20")).eval()
    iso.save(model, tmp_path / "x.safetensors")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(iso.load(tmp_path / "x.safetensors")(x), model(x))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm, which resizes its tables
def test_a_swin_at_another_size_is_saved(tmp_path):
    shape = dict(img_size=56, window_size=7, embed_dim=12, num_heads=(2, 2, 2, 2))
    model = timm.create_model("swin_tiny_patch4_window7_224", **shape).eval()
    model.set_input_size((112, 112))
    iso.save(model, tmp_path / "x.safetensors")
    x = torch.randn(1, 3, 112, 112)
    assert torch.equal(iso.load(tmp_path / "x.safetensors")(x), model(x))


def test_weights_do_not_load_into_a_meta_model(tmp_path):
    iso.save(timm.create_model("cifar_resnet20"), tmp_path / "x.safetensors")
    with torch.device("meta"):
        empty = timm.create_model("cifar_resnet20")
    words = "conv1.weight of the model has no memory for values"
    refused(words, iso.load_weights, empty, tmp_path / "x.safetensors")
    refused(words, iso.load, tmp_path / "x.safetensors", base=empty)
