"""Windows of attention on the map they are cut from: shifted, padded, dilated as the model does it."""

import math

import pytest
import torch
from torch import nn

import isomorph as iso
from isomorph.analysis import attention_windows


def block(kind):
    """A block whose map of 10 x 12 is cut into windows of 4 x 4, and whether it is padded for that."""
    torch.manual_seed(0)
    from timm.models.maxxvit import (
        MaxxVitTransformerCfg,
        PartitionAttention2d,
        PartitionAttentionCl,
    )
    from timm.models.swin_transformer import SwinTransformerBlock
    from timm.models.swin_transformer_v2 import SwinTransformerV2Block

    made = {
        "swin": lambda: SwinTransformerBlock(8, (10, 12), num_heads=2, window_size=4, shift_size=0),
        "swin shifted": lambda: SwinTransformerBlock(
            8, (10, 12), num_heads=2, window_size=4, shift_size=2
        ),
        "swin v2 shifted": lambda: SwinTransformerV2Block(
            8, (10, 12), num_heads=2, window_size=4, shift_size=2
        ),
        "maxvit windows": lambda: maxvit("block"),
        "maxvit grid": lambda: maxvit("grid"),
        "maxvit convolved grid": lambda: maxvit("grid", PartitionAttention2d),
    }

    def maxvit(partition, kind=PartitionAttentionCl):
        return kind(
            8, partition, MaxxVitTransformerCfg(window_size=(5, 4), grid_size=(5, 4), dim_head=4)
        )

    found = made[kind]().eval()
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.5)
    return found.double()


KINDS = (
    "swin",
    "swin shifted",
    "swin v2 shifted",
    "maxvit windows",
    "maxvit grid",
    "maxvit convolved grid",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_depends_on_the_places_it_looks_at_and_on_no_others(kind):
    """The Jacobian of the block's own attention is the reference: where it is zero, the map has nothing."""
    net = block(kind)
    x = torch.randn(2, 10, 12, 8, dtype=torch.float64)
    last = (0, 2, 3, 1) if "convolved" in kind else (0, 1, 2, 3)  # of the axes, channels last
    x = x.permute(0, 3, 1, 2) if "convolved" in kind else x
    windows = attention_windows(net, x)["attn"]
    assert windows.grid == (10, 12)
    maps = windows.on_grid(iso.attention_maps(net, x)["attn"])
    partition = getattr(net, "_attn", None) or net._partition_attn
    assert (windows.members < 0).any() == kind.startswith("swin")
    z = net.norm1(x).detach().requires_grad_()
    y = partition(z).permute(last).flatten(1, 2)
    for query in (0, 37, 64, 119):
        (slope,) = torch.autograd.grad(y[1, query].square().sum(), z, retain_graph=True)
        # masks are -100: e^-100 is let through
        reference = slope.permute(last)[1].flatten(0, 1).abs().sum(-1) > 1e-25
        keys = windows.keys_of(query)
        seen = torch.zeros(120, dtype=torch.bool)
        seen[keys[keys >= 0]] = (maps[1, :, query] > 1e-30).any(0)[keys >= 0]
        assert seen.equal(reference)
        assert not slope[0].any()


@pytest.mark.parametrize("kind", ["swin shifted", "maxvit convolved grid"])
def test_nonlocality_is_in_steps_of_the_map(kind):
    """Query by query over the map: attention times distance, padding left out, mean."""
    net = block(kind)
    x = torch.randn(2, 10, 12, 8, dtype=torch.float64)
    x = x.permute(0, 3, 1, 2) if "convolved" in kind else x
    windows = attention_windows(net, x)["attn"]
    total = 0.0
    maps = windows.on_grid(iso.attention_maps(net, x)["attn"])
    for query in range(120):
        for k, key in enumerate(windows.keys_of(query).tolist()):
            if key >= 0:
                total += maps[:, :, query, k] * math.dist(divmod(query, 12), divmod(key, 12))
    torch.testing.assert_close(iso.nonlocality(net, x)["attn"], total.mean(0) / 120)
