"""Refined attention equals the paper's three convolutions: outputs and all gradients in float64; nothing leaks."""

import pytest
import timm
import torch
from timm.layers import Attention, LayerNorm

import references
from isomorph.layers import ExpandedAttention, LocalAttention, RefinedAttention, SpatialAttention
from isomorph.layers.refined.attention import ReusedAttention
from isomorph.layers.refined.refiner import (
    CrossKernel,
    Expansion,
    MapConvolution,
    Refiner,
    SpatialRefiner,
)
from test_operations import saved_mib
from torch_citizens import TorchCitizens

HEADS = 4
DIM = 12
FORMS = {
    "expanded, convolved, reduced": (RefinedAttention, Refiner, dict(ratio=3)),
    "kernel 5": (RefinedAttention, Refiner, dict(ratio=2, kernel_size=5)),
    "no convolution": (RefinedAttention, Refiner, dict(ratio=2, kernel_size=1)),
    "row and column": (RefinedAttention, Refiner, dict(ratio=2, local=CrossKernel)),
    "spatial": (SpatialAttention, SpatialRefiner, dict(ratio=2)),
    "without reduction": (ExpandedAttention, Expansion, dict(ratio=3)),
    "map convolution": (RefinedAttention, MapConvolution, {}),
    "local": (LocalAttention, MapConvolution, {}),
}
MASKED = [name for name in FORMS if name != "spatial"]


def build(name, init="paper", **more):
    kind, refiner, arguments = FORMS[name]
    placed = dict(grid_size=(2, 4), prefix_tokens=1) if kind is SpatialAttention else {}
    return kind(
        DIM, HEADS, refine=refiner(HEADS, init=init, **arguments), qkv_bias=True, **placed, **more
    ).double()


def outcome(layer, run, x):
    """Output, and gradients of input and all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = run(x)
    (
        y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    ).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def same(a, b, **tolerance):
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, **tolerance or dict(rtol=0, atol=1e-12))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("init", ["paper", "same-function"])
@pytest.mark.parametrize("name", FORMS)
def test_equals_the_paper(name, init, recompute):
    layer = build(name, init, recompute=recompute)
    x = torch.randn(3, 9, DIM, dtype=torch.float64)
    same(
        outcome(layer, layer, x),
        outcome(layer, lambda t: references.refined_attention(layer, t), x),
    )
    torch.testing.assert_close(
        layer.attention(x), references.refined_maps(layer, x), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    "name", [name for name in FORMS if name != "local"]
)  # which forms no map to drop from
def test_dropout_comes_between_softmax_and_refiner(name):
    layer = build(name, attn_drop=0.5)
    x = torch.randn(3, 9, DIM, dtype=torch.float64)
    found = []
    for run in (layer, lambda x: references.refined_attention(layer, x)):
        torch.manual_seed(3)
        found.append(run(x))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_born_with_the_same_function_and_free_to_leave(name):
    layer = build(name, "same-function")
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    if name != "without reduction":
        layer.to_attention(1e-6)  # E is orthogonal to float32's rounding
    assert references.refined_maps(layer, x).min() > -1e-6
    grads = outcome(layer, layer, x)[2:]
    for g in grads:
        assert g.abs().max() > 0
    if hasattr(layer.refine, "reduce"):  # no two maps learn alike
        taps = next(layer.refine.local.parameters()).grad.flatten(1)
        assert torch.cdist(taps, taps).add(torch.eye(len(taps))).min() > 1e-9


@pytest.mark.parametrize("where", ["end", "front"])
@pytest.mark.parametrize("name", MASKED)
def test_nothing_leaks_across_padding(name, where):
    """Real tokens compute what they would alone, whatever the padding holds."""
    layer = build(name).eval()
    x = torch.randn(3, 9, DIM, dtype=torch.float64)
    lengths = [9, 6, 4]
    real = torch.arange(9) < torch.tensor(lengths)[:, None]
    real = real if where == "end" else real.flip(1)
    y = layer(x, attn_mask=real)
    torch.testing.assert_close(y, layer(x, attn_mask=real[:, None, None]), rtol=0, atol=0)
    torch.testing.assert_close(
        y[real], references.refined_attention(layer, x, real)[real], rtol=0, atol=1e-12
    )
    for i, _n in enumerate(lengths):
        alone = layer(x[i : i + 1, real[i]])[0]
        torch.testing.assert_close(y[i][real[i]], alone, rtol=0, atol=1e-12)
    other = torch.where(real[..., None], x, torch.randn_like(x) * 100)
    torch.testing.assert_close(layer(other, attn_mask=real)[real], y[real], rtol=0, atol=1e-12)
    x.requires_grad_()
    layer(x, attn_mask=real)[real].square().sum().backward()
    assert not x.grad[~real].any()
    maps = layer.attention(x, attn_mask=real)
    assert not maps.masked_select(~real[:, None, None]).any()


def test_all_of_timms_attention_is_kept():
    """Norms of queries, keys and output, gate, head width, dropout: with the identity it is that layer."""
    arguments = dict(
        qk_norm=True, scale_norm=True, gated=True, norm_layer=LayerNorm, attn_head_dim=5, dim_out=7
    )
    layer = RefinedAttention(12, 3, refine=Refiner(3), qkv_bias=True, **arguments)
    plain = Attention(12, 3, qkv_bias=True, **arguments)
    plain.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if not k.startswith("refine")}
    )
    x = torch.randn(2, 6, 12)
    torch.testing.assert_close(layer(x), plain(x), atol=1e-5, rtol=1e-5)


def test_shared_maps():
    """The next block weighs its own values with the map handed over; gradients reach the first block's queries."""
    layer = build("expanded, convolved, reduced")
    reuse = ReusedAttention(DIM, HEADS).double()
    x, z = torch.randn(2, 2, 9, DIM, dtype=torch.float64)
    y, maps = layer(x, return_maps=True)
    torch.testing.assert_close(y, layer(x))
    v = reuse.v(z).chunk(HEADS, -1)
    expected = reuse.proj(torch.cat([maps[:, h] @ v[h] for h in range(HEADS)], -1))
    torch.testing.assert_close(reuse(z, maps), expected, rtol=0, atol=1e-12)
    assert reuse.attention(z, maps) is maps
    reuse(z, maps).sum().backward()
    for p in [layer.qkv.weight, *layer.refine.parameters()]:
        assert p.grad.abs().max() > 0


def test_memory_of_base_width_at_224():
    """Recomputed maps: at most 1.5 times what plain attention keeps; local attention keeps no map either way."""
    x = torch.randn(2, 197, 768)
    plain = saved_mib(Attention(768, 12, qkv_bias=True), x)
    assert saved_mib(RefinedAttention(768, 12, recompute=True), x) <= 1.5 * plain
    maps = 2 * 12 * 197**2 * 4 / 2**20
    assert saved_mib(RefinedAttention(768, 12), x) > plain + 1.5 * maps
    # map passed on
    shared = (timm.create_model("refined_vit_s", depth=2, recompute=each) for each in (False, True))
    kept, recomputed = (saved_mib(model, torch.randn(2, 3, 224, 224)) for model in shared)
    assert recomputed < kept - 1.1 * 2 * 12 * 197**2 * 4 / 2**20
    few = saved_mib(LocalAttention(96, 3), torch.randn(1, 512, 96))
    many = saved_mib(LocalAttention(96, 3), torch.randn(1, 1024, 96))
    assert many < 2.01 * few


@pytest.mark.parametrize("name", FORMS)
class TestEverywhere(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self, name):
        self.layer = build(name).float()
        self.x = torch.randn(2, 9, DIM)

    def test_compiles_and_exports_for_any_batch(self, name):
        torch._dynamo.reset()  # it compiles one code object eight times at most
        compiled = torch.compile(self.layer, fullgraph=True, backend="aot_eager")
        same(
            outcome(self.layer, compiled, self.x),
            outcome(self.layer, self.layer, self.x),
            atol=1e-5,
            rtol=1e-5,
        )
        for recompute in (False, True):
            layer = build(name, recompute=recompute).float().eval()
            more = torch.randn(5, 9, DIM)
            sizes = ({0: torch.export.Dim("B")},)
            exported = torch.export.export(layer, (self.x,), dynamic_shapes=sizes).module()
            torch.testing.assert_close(exported(more), layer(more), atol=1e-5, rtol=1e-5)
