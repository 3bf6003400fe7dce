"""Refined attention equals the paper's three convolutions: outputs and all gradients in float64; nothing leaks."""

import pytest
import timm
import torch
from timm.layers import Attention, LayerNorm

import isomorph as iso
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
    if kind is SpatialAttention:
        more |= dict(grid_size=(2, 4), prefix_tokens=1)
    refine = refiner(HEADS, init=init, **arguments)
    return kind(DIM, HEADS, refine=refine, qkv_bias=True, **more).double()


def doubles(*shape):
    return torch.randn(shape, dtype=torch.float64)


def outcome(layer, run, x):
    """Output, and gradients of input and all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = run(x)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    (y * weights).sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    return [y.detach(), x.grad, *gradients]


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("init", ["paper", "same-function"])
@pytest.mark.parametrize("name", FORMS)
def test_equals_the_paper(name, init, recompute):
    layer = build(name, init, recompute=recompute)
    x = doubles(3, 9, DIM)
    actual = outcome(layer, layer, x)
    same(actual, outcome(layer, lambda t: references.refined_attention(layer, t), x))
    same(layer.attention(x), references.refined_maps(layer, x))


FORMS_OF_MAPS = [name for name in FORMS if name != "local"]  # which forms no map to drop from


@pytest.mark.parametrize("name", FORMS_OF_MAPS)
def test_dropout_comes_between_softmax_and_refiner(name):
    layer = build(name, attn_drop=0.5)
    x = doubles(3, 9, DIM)
    torch.manual_seed(3)
    expected = references.refined_attention(layer, x)
    torch.manual_seed(3)
    same(layer(x), expected)


@pytest.mark.parametrize("name", FORMS)
def test_born_with_the_same_function_and_free_to_leave(name):
    layer = build(name, "same-function")
    x = doubles(2, 9, DIM)
    if name != "without reduction":
        layer.to_attention(1e-6)  # E is orthogonal to float32's rounding
    assert references.refined_maps(layer, x).min() > -1e-6
    _, _, *gradients = outcome(layer, layer, x)
    for gradient in gradients:
        assert gradient.abs().max() > 0
    if hasattr(layer.refine, "reduce"):  # no two maps learn alike
        kernel = next(layer.refine.local.parameters())
        taps = kernel.grad.flatten(1)
        assert torch.pdist(taps).min() > 1e-9


@pytest.mark.parametrize("where", ["end", "front"])
@pytest.mark.parametrize("name", MASKED)
def test_nothing_leaks_across_padding(name, where):
    """Real tokens compute what they would alone, whatever the padding holds."""
    layer = build(name).eval()
    x = doubles(3, 9, DIM)
    real = torch.arange(9) < torch.tensor([[9], [6], [4]])
    if where == "front":
        real = real.flip(1)
    y = layer(x, attn_mask=real)
    assert torch.equal(y, layer(x, attn_mask=real[:, None, None]))
    same(y[real], references.refined_attention(layer, x, real)[real])
    for i in range(3):
        alone = layer(x[i : i + 1, real[i]])
        same(y[i][real[i]], alone[0])
    other = torch.where(real[..., None], x, torch.randn_like(x) * 100)
    same(layer(other, attn_mask=real)[real], y[real])

    x.requires_grad_()
    y = layer(x, attn_mask=real)
    y[real].square().sum().backward()
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
    state = layer.state_dict()
    for key in list(state):
        if key.startswith("refine"):
            del state[key]
    plain.load_state_dict(state)
    x = torch.randn(2, 6, 12)
    torch.testing.assert_close(layer(x), plain(x), atol=1e-5, rtol=1e-5)


def test_shared_maps():
    """The next block weighs its own values with the map handed over; gradients reach the first block's queries."""
    layer = build("expanded, convolved, reduced")
    reuse = ReusedAttention(DIM, HEADS).double()
    x, z = doubles(2, 2, 9, DIM)
    y, maps = layer(x, return_maps=True)
    torch.testing.assert_close(y, layer(x))
    values = reuse.v(z).chunk(HEADS, -1)
    by_head = [maps[:, head] @ values[head] for head in range(HEADS)]
    output = reuse(z, maps)
    same(output, reuse.proj(torch.cat(by_head, -1)))
    assert reuse.attention(z, maps) is maps
    output.sum().backward()
    for parameter in [layer.qkv.weight, *layer.refine.parameters()]:
        assert parameter.grad.abs().max() > 0


def test_memory_of_base_width_at_224():
    """Recomputed maps: at most 1.5 times what plain attention keeps; local attention keeps no map either way."""
    x = torch.randn(2, 197, 768)
    maps = 2 * 12 * 197**2 * 4 / 2**20
    plain = saved_mib(Attention(768, 12, qkv_bias=True), x)
    assert saved_mib(RefinedAttention(768, 12, recompute=True), x) <= 1.5 * plain
    assert saved_mib(RefinedAttention(768, 12), x) > plain + 1.5 * maps

    def saved_by_network(recompute):
        network = timm.create_model("refined_vit_s", depth=2, recompute=recompute)
        return saved_mib(network, torch.randn(2, 3, 224, 224))

    # the map is passed on
    assert saved_by_network(recompute=True) < saved_by_network(recompute=False) - 1.1 * maps
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
        actual = outcome(self.layer, compiled, self.x)
        expected = outcome(self.layer, self.layer, self.x)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        for recompute in (False, True):
            layer = build(name, recompute=recompute).float().eval()
            more = torch.randn(5, 9, DIM)
            sizes = ({0: torch.export.Dim("B")},)
            exported = torch.export.export(layer, (self.x,), dynamic_shapes=sizes).module()
            torch.testing.assert_close(exported(more), layer(more), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_returned_maps_are_those_that_are_applied(name):
    layer = build(name)
    x = doubles(2, 9, DIM)
    y, maps = layer(x, return_maps=True)
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(maps, layer.attention(x))


def test_logits_are_those_before_the_softmax():
    """Of a pair of released blocks the map of the pair before is added after it; a padding mask hides keys."""
    model = timm.create_model(
        "refined_vit_s_released", img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    seen = {}
    layer = model.blocks[2].attn
    layer.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    found = iso.analysis.logit_stats(model, x)["blocks.2.attn"]
    q, k, _ = layer.qkv(seen["x"]).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    expected = (q @ k.mT * layer.scale).amax((2, 3)).mean(0)
    torch.testing.assert_close(found.max_logit, expected)
    refined = iso.layers.RefinedAttention(24, 3).eval()
    mask = torch.arange(5) < 3
    q, k, bias = refined.content_scores(torch.randn(2, 5, 24), mask.expand(2, 5))
    assert bias.shape == (2, 1, 1, 5)
    assert torch.equal(bias.isinf(), ~mask.expand(2, 1, 1, 5))
