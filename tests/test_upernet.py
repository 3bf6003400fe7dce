"""UPerNet: published sizes, every kind of backbone, the head against its formula, and surgery on the whole network."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath, gen_relative_position_index
from torch import nn

import isomorph as iso
from isomorph.layers.relative.attention import expand_table
from isomorph.models.task_networks.upernet import UPerHead, average_cells

VIT = dict(depth=2, embed_dim=24, num_heads=2)
BACKBONES = {
    "tdrl_vit_ti": VIT | dict(relative_bias=True),
    "vit_tiny_patch16_224": VIT,
    "convit_ti": dict(depth=2, embed_dim=24, local_up_to_layer=1),
    "refined_vit_b": VIT,
    "coatnet_0": dict(depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 16, 16), head_dim=8),
    "swin_tiny_patch4_window7_224": dict(depths=(1, 1, 1, 1), embed_dim=8, num_heads=(1, 1, 1, 1)),
    "cifar_resnet20": {},
    "t_cifar_resnet20": {},
}
PUBLISHED = {  # heads, layout: whole network, without the auxiliary head (TASKS.md, in millions)
    (3, "plain"): (11.03, None),
    (12, "plain"): (11.46, 10.98),
    (3, "P-W2S"): (54.2, None),
    (12, "P-W2S"): (54.6, None),
}


def build(backbone="tdrl_vit_ti", classes=5, **kwargs):
    torch.manual_seed(0)
    arguments = dict(num_classes=classes, img_size=64, channels=12, auxiliary_channels=8)
    arguments |= dict(backbone_kwargs=BACKBONES[backbone])
    return timm.create_model("upernet", backbone=backbone, **arguments | kwargs)


def perturb(model):
    """Give every parameter and statistic random values, so that no part is hidden by zeros or ones."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator).to(tensor)
                tensor.copy_(tensor + 0.1 * noise if "var" not in name else 0.5 + noise)
    return model


def test_drop_path_is_the_one_that_is_given_last():
    kwargs = BACKBONES["tdrl_vit_ti"] | dict(drop_path_rate=0.3)
    for given, used in ((0.1, 0.1), (0.0, 0.3)):
        model = build(backbone_kwargs=kwargs, drop_path_rate=given)
        rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
        assert max(rates) == pytest.approx(used)


@pytest.fixture(scope="module")
def network():
    return perturb(build()).eval()


@pytest.mark.parametrize(("heads", "layout"), PUBLISHED)
def test_published_sizes(heads, layout):
    arguments = dict(layout=layout, num_heads=heads, init_values=1.0, relative_bias=True)
    with torch.device("meta"):
        model = timm.create_model("upernet", backbone="tdrl_vit_ti", backbone_kwargs=arguments)
    counts = [
        sum(p.numel() for n, p in model.named_parameters() if not n.startswith(skip))
        for skip in ("-", "aux")
    ]
    for count, millions in zip(counts, PUBLISHED[heads, layout], strict=True):
        assert millions is None or abs(count / 1e6 - millions) < (
            0.005 if layout == "plain" else 0.05
        )


@pytest.mark.parametrize("name", BACKBONES)
def test_any_backbone_and_any_size(name):
    model = build(name)
    x = torch.randn(2, 3, 41, 70)
    assert model.eval()(x[:1]).shape == (1, 5, 41, 70)
    coarse = model.train()(x, coarse=True)
    (coarse.logits.mean() + coarse.auxiliary.mean()).backward()
    for p in model.backbone.parameters():
        if p.requires_grad:
            assert p.grad is not None
    assert coarse.logits.shape[-1] >= 2 * coarse.auxiliary.shape[-1] - 1


def test_average_cells_is_adaptive_pooling():
    for size in ((7, 5), (6, 12), (2, 1)):
        x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
        for cells in (1, 2, 3, 6):
            own = average_cells(x, cells)
            torchs = F.adaptive_avg_pool2d(x, cells)
            torch.testing.assert_close(own, torchs)
            torch.testing.assert_close(
                *(torch.autograd.grad(y.square().sum(), x)[0] for y in (own, torchs))
            )


def test_the_head_computes_the_papers_formula():
    head = perturb(UPerHead((6, 8, 10), 4, 3)).double().eval()
    shapes = ((2, 6, 12, 9), (2, 8, 6, 5), (2, 10, 3, 3))
    maps = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def up(x, like):
        return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)

    def conv(layer, x):
        bn = layer.bn
        x = F.conv2d(x, layer.conv.weight, padding=layer.conv.weight.shape[2] // 2)
        return F.batch_norm(
            x, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps
        ).relu()

    cells = zip((1, 2, 3, 6), head.pooled, strict=True)
    pooled = [
        up(conv(layer, F.adaptive_avg_pool2d(maps[2], size)), maps[2]) for size, layer in cells
    ]
    top = conv(head.context, torch.cat([maps[2], *pooled], 1))
    middle = conv(head.lateral[1], maps[1]) + up(top, maps[1])
    fine = conv(head.lateral[0], maps[0]) + up(middle, maps[0])
    parts = [conv(head.smooth[0], fine), up(conv(head.smooth[1], middle), fine), up(top, fine)]
    expected = head.classifier(conv(head.join, torch.cat(parts, 1)))
    torch.testing.assert_close(head(maps), expected)


def test_prefix_bias_is_that_of_beit():
    H = 3
    W = 4
    heads = 2
    table = torch.randn((2 * H - 1) * (2 * W - 1) + 3, heads)
    index = gen_relative_position_index((H, W), class_token=True).view(-1)
    beit = table[index].view(H * W + 1, H * W + 1, heads).permute(2, 0, 1)
    positions = table[:-3].T.unflatten(1, (2 * H - 1, 2 * W - 1))
    torch.testing.assert_close(expand_table(positions, (H, W), 1, table[-3:]), beit)


def test_surgery_and_files_of_the_whole_network(network, tmp_path):
    x = torch.randn(1, 3, 48, 64)
    thin = iso.fuse(network)
    assert iso.verify(network, thin, x).passed
    assert type(thin.backbone.blocks[0].attn.qkv) is nn.Linear
    iso.save(thin, tmp_path / "thin.safetensors")
    torch.testing.assert_close(iso.load(tmp_path / "thin.safetensors")(x), thin(x))
    plain = build("vit_tiny_patch16_224").eval()
    relative = iso.recast(
        plain, iso.AttentionToRelative(prefix_bias=True), where="backbone.blocks.*.attn"
    )
    wide = iso.recast(relative, iso.LinearToPyramid(), where="backbone.blocks.*.mlp.fc?")
    assert iso.verify(plain, wide, [x, torch.randn(1, 3, 64, 32)]).passed
    assert len(wide.backbone.blocks[0].attn.prefix_bias) == 3


def test_a_classifiers_weights_load_into_the_backbone(tmp_path):
    classifier = timm.create_model("tdrl_vit_ti", img_size=32, num_classes=7, **VIT)
    iso.save(classifier, tmp_path / "classifier.safetensors")
    model = build()
    new = iso.load_weights(model, tmp_path / "classifier.safetensors", fresh_head=True)
    assert {"head.classifier.weight", "backbone.blocks.0.attn.relative_bias"} <= set(new)
    for name in new:
        assert "qkv" not in name
        assert "pos_embed" not in name
    own = model.backbone.blocks[1].mlp.fc1.state_dict()
    given = classifier.blocks[1].mlp.fc1.state_dict()
    for name in own:
        assert torch.equal(own[name], given[name])
    assert model.backbone.pos_embed.shape == (1, 17, 24)
    assert "backbone.blocks.0.attn.prefix_bias" in model.no_weight_decay()
    model.reset_classifier(9)
    assert (
        model.eval()(torch.randn(1, 3, 32, 32)).shape[1] == model.get_classifier().out_channels == 9
    )


@pytest.mark.slow
def test_export_with_open_size(tmp_path):
    """Of one block and one resolution of context: the tracer takes seconds for each."""
    vit = dict(layout="plain", depth=1, embed_dim=24, num_heads=2, relative_bias=True)
    network = perturb(build(pool_sizes=(3,), auxiliary=False, backbone_kwargs=vit)).eval()
    report = iso.export(network, tmp_path / "net.onnx", dynamic="batch,size", size=(64, 64))
    assert report.deviation.passed
    assert report.size_multiple == 16


def test_a_backbone_without_feature_maps_is_refused(monkeypatch):
    monkeypatch.delattr(timm.models.resnet.ResNet, "forward_intermediates")
    with pytest.raises(iso.UserError, match="resnet18 has no feature maps"), torch.device("meta"):
        timm.create_model("upernet", backbone="resnet18")
