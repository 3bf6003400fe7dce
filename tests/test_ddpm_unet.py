"""The U-Net of diffusion models: equal to the published network written out, in size, function and checkpoints."""

import math
import sys

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import isomorph as iso
from isomorph.models.input_sizes import random_inputs
from isomorph.models.task_networks.ddpm_unet import sinusoids

ATTENTION_PROJECTIONS = ("unet.*.to_[qkv]", "unet.*.to_out.0")
SMALL = dict(channels=(16, 32, 48), blocks=2, attention=(1,), groups=8, time_steps=20)


class Residual(nn.Module):
    """The released residual block: norm, swish, convolution; the time; norm, swish, dropout, convolution; attention."""

    def __init__(self, width_in, width, time, groups, attends):
        super().__init__()
        self.block1 = nn.Sequential(
            nn.GroupNorm(groups, width_in), nn.SiLU(), nn.Conv2d(width_in, width, 3, padding=1)
        )
        self.temb_proj = nn.Sequential(nn.SiLU(), nn.Linear(time, width))
        self.block2 = nn.Sequential(
            nn.GroupNorm(groups, width),
            nn.SiLU(),
            nn.Dropout(0.0),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()
        self.attn = Attention(width, groups) if attends else nn.Identity()

    def forward(self, x, time):
        h = self.block1(x) + self.temb_proj(time)[:, :, None, None]
        return self.attn(self.block2(h) + self.shortcut(x))


class Attention(nn.Module):
    """The released attention: four 1x1 convolutions, one head, a residual connection."""

    def __init__(self, width, groups):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width)
        for name in ("proj_q", "proj_k", "proj_v", "proj"):
            setattr(self, name, nn.Conv2d(width, width, 1))

    def forward(self, x):
        h = self.group_norm(x)
        q, k, v = (
            layer(h).flatten(2) for layer in (self.proj_q, self.proj_k, self.proj_v)
        )  # (B, C, N)
        weights = torch.softmax(torch.einsum("bcq,bck->bqk", q, k) * x.shape[1] ** -0.5, -1)
        return x + self.proj(torch.einsum("bqk,bck->bcq", weights, v).view_as(x))


class Resample(nn.Module):
    """The released change of resolution: a strided convolution, or nearest neighbours and a convolution."""

    def __init__(self, width, up):
        super().__init__()
        self.up = up
        self.main = nn.Conv2d(width, width, 3, stride=1 if up else 2, padding=1)

    def forward(self, x, time):
        return self.main(F.interpolate(x, scale_factor=2, mode="nearest") if self.up else x)


class ReleasedUNet(nn.Module):
    """The published network, with the names of the released code."""

    def __init__(self, channels, blocks, attention, groups, time_steps):
        super().__init__()
        base = channels[0]
        time = 4 * channels[0]
        last = len(channels) - 1
        table = nn.Embedding.from_pretrained(sinusoids(time_steps, base).float())
        self.time_embedding = nn.Module()
        self.time_embedding.timembedding = nn.Sequential(
            table, nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time)
        )
        self.head = nn.Conv2d(3, base, 3, padding=1)
        self.downblocks = nn.ModuleList()
        self.upblocks = nn.ModuleList()
        widths = [base]
        now = base
        for level, width in enumerate(channels):
            for _ in range(blocks):
                self.downblocks.append(Residual(now, width, time, groups, level in attention))
                now = width
                widths.append(now)
            if level != last:
                self.downblocks.append(Resample(now, up=False))
                widths.append(now)
        self.middleblocks = nn.ModuleList(
            [Residual(now, now, time, groups, attends) for attends in (True, False)]
        )
        for level, width in reversed(list(enumerate(channels))):
            for _ in range(blocks + 1):
                self.upblocks.append(
                    Residual(now + widths.pop(), width, time, groups, level in attention)
                )
                now = width
            if level:
                self.upblocks.append(Resample(now, up=True))
        self.tail = nn.Sequential(
            nn.GroupNorm(groups, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1)
        )

    def forward(self, x, t):
        time = self.time_embedding.timembedding(t)
        h = self.head(x)
        skips = [h]
        for block in self.downblocks:
            h = block(h, time)
            skips.append(h)
        for block in self.middleblocks:
            h = block(h, time)
        for block in self.upblocks:
            h = block(h if isinstance(block, Resample) else torch.cat([h, skips.pop()], 1), time)
        return self.tail(h)


def test_its_inputs_are_drawn_on_the_cpu_whatever_the_default_device_is():
    model = timm.create_model("ddpm_unet", **SMALL)
    with torch.device("meta"):
        found = random_inputs(2, model)
    for name, x in random_inputs(2, model).items():
        assert torch.equal(found[name], x)


def test_it_has_the_published_size_with_and_without_pyramids():
    with torch.device("meta"):
        model = timm.create_model("ddpm_unet")
        wide = iso.recast(model, iso.LinearToPyramid("P-W2S"), where=ATTENTION_PROJECTIONS)
    assert len(iso.edits(wide)[0].names) == 24
    assert sum(p.numel() for p in model.parameters()) == 83_086_979
    assert sum(p.numel() for p in wide.parameters()) == 103_192_195
    assert sum(p.numel() for p in iso.fuse(wide.eval()).parameters()) == 83_086_979


def test_a_released_checkpoint_loads_and_computes_the_published_network(tmp_path):
    torch.manual_seed(0)
    released = ReleasedUNet(**SMALL).double()
    for parameter in released.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    torch.save(
        {f"module.{name}": tensor for name, tensor in released.state_dict().items()},
        tmp_path / "released.pt",
    )
    model = timm.create_model("ddpm_unet", **SMALL).double().eval()
    assert iso.load_weights(model, tmp_path / "released.pt") == []
    x = torch.randn(3, 3, 8, 12, dtype=torch.float64)
    t = torch.tensor([0, 7, 19])
    torch.testing.assert_close(model(x, t), released(x, t), atol=1e-12, rtol=1e-12)
    for m in (model, released):
        m(x, t).square().sum().backward()
    torch.testing.assert_close(
        model.unet.conv_in.weight.grad, released.head.weight.grad, rtol=1e-10, atol=1e-10
    )


def test_the_initialisation_is_that_of_the_released_code():
    model = timm.create_model("ddpm_unet", **SMALL)
    conv = model.unet.down_blocks[1].resnets[1].conv1.weight
    middle = model.unet.mid_block
    bound = (6 / (9 * (conv.shape[0] + conv.shape[1]))) ** 0.5
    assert 0.98 * bound < conv.abs().max() <= bound
    for last in (model.unet.conv_out, middle.attentions[0].to_out[0], middle.resnets[0].conv2):
        assert 0 < last.weight.abs().max() < 1e-5
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert not layer.bias.any()
    assert not model.unet.time_proj.weight.requires_grad
    angle = 3 * 10_000 ** (-2 / 6)  # the second of three frequencies
    torch.testing.assert_close(sinusoids(5, 6)[3, 2:4].tolist(), [math.sin(angle), math.cos(angle)])


def test_pyramids_keep_the_function_and_fuse_back_at_every_time_step():
    unet = timm.create_model("ddpm_unet", **SMALL).eval()
    for parameter in unet.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    wide = iso.recast(unet, iso.LinearToPyramid("P-W2S"), where=ATTENTION_PROJECTIONS)
    steps = [
        {"x": torch.randn(2, 3, 8, 12), "t": torch.tensor(t)} for t in ([0, 1], [5, 5], [19, 3])
    ]
    assert iso.verify(unet, wide, steps).fp64 < 1e-7
    for parameter in wide.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    for norm in (m for m in wide.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)):
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    fused = iso.fuse(wide)
    assert iso.verify(wide, fused, steps).fp64 < 1e-7
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in unet.named_modules()]


@pytest.mark.parametrize(
    ("arguments", "installed", "message"),
    [
        (dict(num_classes=10), True, "no classes"),
        (SMALL, True, "6 x 8 do not fit this U-Net; its sides must be multiples of 4"),
        (SMALL, False, r"ddpm_unet needs diffusers; run pip install .*diffusion"),
    ],
)
def test_networks_and_images_that_do_not_fit(arguments, installed, message, monkeypatch):
    if not installed:
        monkeypatch.setitem(sys.modules, "diffusers.models.unets.unet_2d", None)
    with pytest.raises(iso.UserError, match=message):
        timm.create_model("ddpm_unet", **arguments)(torch.randn(1, 3, 6, 8), 0)
