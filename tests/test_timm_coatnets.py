"""timm's own CoAtNets and MaxViTs in our evaluation, analysis and surgery, through timm."""

import pytest
import timm
import torch

import isomorph as iso

RW, RMLP, PAPER, MAX = "coatnet_nano_rw_224", "coatnet_rmlp_nano_rw_224", "coatnet_0_224", "maxvit_rmlp_pico_rw_256"
SMALL = dict(depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64), stem_width=16, num_classes=5)
"""Depths and widths of a network that tests have time for; heads, positions and norms stay as each has them."""


def build(name, size=64, **more):
    torch.manual_seed(0)
    extra = dict(head_hidden_size=64) if name == PAPER else {}
    model = timm.create_model(name, img_size=size, **SMALL, **extra, **more)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def unfused(model):
    """timm's own slow path, in which the map exists."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


@pytest.mark.parametrize("name", [RW, RMLP, PAPER, MAX])
def test_maps_are_those_that_timm_applies(name):
    model, x = build(name), torch.randn(2, 3, 64, 64)
    maps = iso.attention_maps(model, x)
    seen = []
    slow = unfused(model)
    for layer in [m for m in slow.modules() if hasattr(m, "attn_drop")]:
        layer.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    with torch.no_grad():
        slow(x)
    assert len(maps) == len(seen) >= 2
    for name, found in zip(maps, seen, strict=True):
        torch.testing.assert_close(maps[name], found, msg=name)
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


@pytest.mark.parametrize("name", [RW, RMLP, MAX])
def test_measures_of_maps(name):
    model, x = build(name), torch.randn(2, 3, 64, 64)
    distances = iso.nonlocality(model, x)
    stats = iso.analysis.logit_stats(model, x)
    assert set(distances) == set(stats) == set(iso.attention_maps(model, x))
    assert all((d >= 0).all() for d in distances.values())
    assert all(((s.max_attention > 0) & (s.max_attention <= 1)).all() for s in stats.values())
    similar = iso.analysis.head_similarity(model, x)
    assert all(((m.diagonal() - 1).abs() < 1e-5).all() for m in similar.values())


@pytest.mark.slow
def test_pretrained_names_are_known_to_the_command_line(tmp_path):
    """Weights come from a file here, as `--weights` takes them; with a network timm fetches its own."""
    from isomorph.checkpoints.open import open_model

    model = timm.create_model("coatnet_nano_rw_224")
    iso.save(model, tmp_path / "nano.safetensors")
    again = open_model("coatnet_nano_rw_224.sw_in1k", weights=tmp_path / "nano.safetensors")
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model.eval()(x))


def from_timm(state):
    """Tensors of timm's coatnet_N under our names; its queries, keys and values stand head by head."""
    found = {}
    for name, tensor in state.items():
        name = name.replace("stem.norm1", "stem.norm").replace("conv1_1x1", "expand").replace("conv2_kxk", "depthwise")
        name = name.replace("conv3_1x1", "project").replace("pre_norm", "norm").replace("norm1.norm", "norm1")
        name = name.replace("shortcut.expand", "shortcut.1").replace(".blocks.", ".")
        if name.startswith("stages."):
            _, stage, rest = name.split(".", 2)
            name = f"stages.{int(stage) + 1}.{rest}"
        if "relative_position_bias_table" in name:
            side = int(len(tensor) ** 0.5)
            name, tensor = name.replace("rel_pos.relative_position_bias_table", "relative_bias"), tensor.T
            tensor = tensor.unflatten(1, (side, side))
        if ".attn." in name or ".mlp." in name:
            tensor = tensor.flatten(1) if tensor.ndim == 4 else tensor
        if ".qkv." in name:
            tensor = tensor.unflatten(0, (-1, 3, 32)).transpose(0, 1).flatten(0, 2)
        found[name] = tensor
    return found


@pytest.mark.parametrize("dw", [False, True])
def test_configured_alike_timm_and_we_compute_the_same(dw):
    """Max pooling of 2 x 2, GELU in the SE, a hidden layer in the head: the same function from the same tensors."""
    alike = dict(conv_pool_type="max2", transformer_pool_type="max2", conv_attn_act_layer="gelu")
    sizes = dict(depths=(1, 2, 2, 1), embed_dim=(32, 32, 64, 64), stem_width=16, head_hidden_size=64)
    torch.manual_seed(0)
    theirs = timm.create_model(
        PAPER, img_size=64, num_classes=5, conv_stride_mode="dw" if dw else "1x1", **alike, **sizes
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = timm.create_model(
        "coatnet_0",
        img_size=64,
        num_classes=5,
        depths=(2, 1, 2, 2, 1),
        widths=(16, 32, 32, 64, 64),
        stride_on="depthwise" if dw else "expand",
        head_hidden_size=64,
    )
    ours.load_state_dict(from_timm(theirs.state_dict()))
    x = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    theirs, ours = theirs.double().eval(), ours.double().eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.train()(x), theirs.train()(x), rtol=0, atol=1e-10)
