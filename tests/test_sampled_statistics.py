"""Pyramids that measure the input covariance on a random part of the tokens equal branches with the same statistics."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.func import replace_all_batch_norm_modules_, vmap
from torch.utils.checkpoint import checkpoint

import isomorph as iso
import references
from isomorph.layers import JointPyramid, PyramidConv2d, PyramidLinear
from isomorph.layers.marginals import measure_marginals
from isomorph.layers.tokens import Window, draw_tokens, read_tokens
from test_pyramid import CONVS, same, step


def seeded(run, seed=3):
    """The same function, with torch's generator seeded before each call."""

    def call(x):
        torch.manual_seed(seed)
        return run(x)

    return call


def drawn(tokens, part, seed=3):
    torch.manual_seed(seed)
    return draw_tokens(tokens, part, torch.device("cpu"))


def agree(layer, inputs, count, each=1):
    """Sampled closed form and branch by branch on the same part, over several steps, then in eval mode and fused.

    The part is drawn from `count` things that have `each` tokens.
    """
    twin = copy.deepcopy(layer)
    for seed, x in enumerate(inputs):
        part = drawn(count, layer.statistics, seed)
        part = (part.unsqueeze(1) * each + torch.arange(each)).flatten()
        expected = step(twin, lambda t, part=part: references.sampled_pyramid(twin, t, part), x)
        same(step(layer, seeded(layer, seed), x), expected, rtol=0, atol=1e-10)
        same(layer.buffers(), twin.buffers(), rtol=0, atol=1e-10)
    layer.eval(), twin.eval()
    torch.testing.assert_close(layer(x), references.pyramid(twin, x), rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.fuse()(x), references.pyramid(twin, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("part", [1 / 4, 0.6])
@pytest.mark.parametrize("rectify", ["batchnorm", "rescale"])
@pytest.mark.parametrize("layout", ["P-W2S", "R-D3W2S", "naive-W3"])
def test_linear_equals_the_branches(layout, rectify, part):
    layer = PyramidLinear(5, 9, layout, rectify, statistics=part).double()
    agree(layer, [torch.randn(4, 7, 5, dtype=torch.float64) * 2 + 1 for _ in range(3)], 28)


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
def test_wide_layers(shape):
    agree(PyramidLinear(*shape, statistics=0.5).double(), [torch.randn(900, shape[0], dtype=torch.float64)], 900)


@pytest.mark.parametrize("name", CONVS)
def test_conv_equals_the_branches(name):
    layer = PyramidConv2d(6, 12, **CONVS[name], rectify="batchnorm", statistics=1 / 3).double()
    inputs = [torch.randn(7, 6, 8, 12, dtype=torch.float64) + 1 for _ in range(2)]
    tokens = layer.eval()(inputs[0])[0, 0].numel()  # of an image
    of_images = name not in ("1x1", "1x1 strided", "patchify")  # patches overlap
    agree(layer.train(), inputs, *((7, tokens) if of_images else (7 * tokens, 1)))


def test_few_images_with_overlapping_patches_all_count():
    layer, x = PyramidConv2d(4, 6, 3, padding=1, statistics=1 / 4).double(), torch.randn(2, 4, 5, 6).double()
    same(step(layer, layer, x), step(layer, lambda t: references.pyramid(layer, t), x), rtol=0, atol=1e-10)
    for images in (1, 0):
        assert layer(x[:images]).shape == (images, 6, 5, 6)


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_channels_that_are_zero_in_the_part_do_not_explode(kernel_size):
    """ReLU leaves channels that are zero for nearly all images; in most parts their standard deviation is 0."""
    kwargs = dict(padding=kernel_size // 2, layout="naive-W1", rectify="none", statistics=1 / 4)
    layer, x = PyramidConv2d(8, 8, kernel_size, **kwargs), torch.randn(64, 8, 2, 2)
    with torch.no_grad():
        layer.branches[0][0].weight[:, :3] = 0  # reads channels 3 and above
    x[1:, 3:] = 0
    limit = layer.branches[0](x).abs().max()  # normalised by the variances of all tokens
    for seed in range(8):
        torch.manual_seed(seed)
        assert layer(x).abs().max() < 10 * limit  # with variances of the part: up to 23 times


def test_joint_pyramids_share_the_part():
    parts = [PyramidLinear(5, 9, rectify=r, statistics=1 / 4).double() for r in ("batchnorm", "rescale")]
    joint, apart = JointPyramid(copy.deepcopy(parts)), nn.ModuleList(parts)
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    part = drawn(28, 1 / 4)
    expected = step(apart, lambda t: torch.cat([references.sampled_pyramid(p, t, part) for p in apart], -1), x)
    same(step(joint, seeded(joint), x), expected, rtol=0, atol=1e-10)
    mixed, linear = JointPyramid([parts[0], nn.Linear(5, 3).double()]), slice(9, None)
    torch.testing.assert_close(mixed(x)[..., linear], mixed.pyramids[1](x), rtol=0, atol=1e-12)
    with pytest.raises(iso.UserError, match=r"have the statistics \[0.25, 1.0\]; give one value"):
        JointPyramid([parts[0], PyramidLinear(5, 9)])


def test_the_part_is_new_in_each_step_and_spread_over_the_images():
    first, second = (drawn(50 * 16, 1 / 4, seed) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, drawn(50 * 16, 1 / 4, 0))
    assert torch.bincount(first // 16).tolist() == [4] * 50  # images of 16 tokens
    assert torch.bincount(first % 16, minlength=16).min() > 0
    every = torch.cat([drawn(10, 0.37, seed) for seed in range(40)])
    assert every.min() == 0 and every.max() == 9  # noqa: PT018
    for count in (0, 1, 2, 3, 7):
        part = drawn(count, 0.01)
        assert len(part) == min(count, 2)
        assert len(part.unique()) == len(part)


def test_the_whole_is_the_same_as_all():
    layer, x = PyramidLinear(5, 9, statistics="1").double(), torch.randn(20, 5, dtype=torch.float64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    same(step(layer, layer, x), step(layer, lambda t: references.pyramid(layer, t), x), rtol=0, atol=1e-10)
    assert torch.equal(torch.get_rng_state(), state)  # draws nothing


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_draws_the_same_part(reentrant):
    layer = PyramidLinear(5, 9, "P-W2S", "batchnorm", statistics=1 / 4).double()
    twin, x = copy.deepcopy(layer), torch.randn(40, 5, dtype=torch.float64)
    got = step(layer, seeded(lambda t: checkpoint(layer, t, use_reentrant=reentrant)), x)
    same(got, step(twin, seeded(twin), x), rtol=0, atol=1e-12)
    same(layer.buffers(), twin.buffers())


@pytest.mark.parametrize("layer", [PyramidLinear(32, 48), PyramidConv2d(32, 48, 2, 2), PyramidConv2d(32, 48)])
def test_autocast(layer):
    layer.statistics = 1 / 4
    twin, x = copy.deepcopy(layer), torch.randn(300, 32) + 1
    x = x if isinstance(layer, PyramidLinear) else x[:256].T.reshape(1, 32, 16, 16)

    def low(t):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(t)

    expected, got = step(twin, seeded(twin), x), step(layer, seeded(low), x)
    assert got[0].dtype == torch.bfloat16
    same(layer.buffers(), twin.buffers(), rtol=1e-5, atol=1e-5)
    for a, b in zip(got, expected, strict=True):
        assert (a.float() - b).abs().max() <= 0.03 * b.abs().max() + 2e-2


def test_second_derivatives_and_ensembles():
    layer = replace_all_batch_norm_modules_(PyramidLinear(3, 2, statistics=0.5).double())
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(seeded(layer), (x,))
    batches = torch.randn(3, 8, 3, dtype=torch.float64)
    found = seeded(vmap(layer, randomness="same"))(batches)
    torch.testing.assert_close(found, torch.stack([seeded(layer)(x) for x in batches]), rtol=0, atol=1e-10)


def test_second_derivatives_and_ensembles_of_convolutions():
    layer = PyramidConv2d(2, 2, 3, 2, 1, layout="P-W1S", statistics=0.5).double()
    layer = replace_all_batch_norm_modules_(layer)
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(seeded(layer), (x,))
    batches = torch.randn(3, 4, 2, 3, 3, dtype=torch.float64)
    found = seeded(vmap(layer, randomness="same"))(batches)
    torch.testing.assert_close(found, torch.stack([seeded(layer)(x) for x in batches]), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("size", "kernel_size"), [(2, 3), (7, 7)])
def test_large_means_keep_digits_in_float32(size, kernel_size):
    """The value subtracted before squaring is the mean inside the map, without the zeros of the padding."""
    x = 100 + 0.1 * torch.randn(8, 3, size, size, dtype=torch.float64)
    near = torch.full((3 * kernel_size**2,), 100.0)
    window = Window((kernel_size,) * 2, (1, 1), (kernel_size // 2,) * 2, (1, 1), 1)
    inside = read_tokens(torch.ones_like(x[:1]), window).mean(0)
    patches = read_tokens(x, window)
    single = x.float()
    variance = measure_marginals(single, single, window, near * inside.float(), len(patches), None)[2]
    torch.testing.assert_close(variance.double(), patches.var(0, unbiased=False), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "3 x 3"])
def test_compiles_whole(kind):
    torch.compiler.reset()
    layer, x = PyramidLinear(16, 24, "P-W1S", statistics=1 / 4), torch.randn(40, 16)
    if kind == "3 x 3":
        layer, x = PyramidConv2d(4, 6, 3, padding=1, layout="P-W1S", statistics=1 / 4), torch.randn(8, 4, 5, 5)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same(step(layer, seeded(compiled), x), step(twin, seeded(twin), x), rtol=1e-4, atol=1e-4)
    same(layer.buffers(), twin.buffers(), rtol=1e-4, atol=1e-5)


def test_no_more_memory_per_token_than_a_plain_layer():
    from test_pyramid import saved_bytes

    def per_token(layer, low):
        return (saved_bytes(layer, 900, low) - saved_bytes(layer, 400, low)) / 500

    for low in (False, True):
        drawn_indices = 8 / 4
        assert (
            per_token(PyramidLinear(32, 64, statistics=1 / 4), low) <= per_token(nn.Linear(32, 64), low) + drawn_indices
        )


def test_rule_and_model():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_heads=3)
    wide = iso.recast(vit, iso.LinearToPyramid(statistics=1 / 4), where=["blocks.*.attn.qkv", "blocks.*.mlp.fc1"])
    assert wide.blocks[0].attn.qkv.pyramids[0].statistics == wide.blocks[0].mlp.fc1.statistics == 0.25
    assert "statistics=0.25" in repr(wide.blocks[0].mlp.fc1)
    assert "statistics" not in repr(PyramidLinear(3, 4))
    assert iso.LinearToPyramid(statistics="1/4") == iso.LinearToPyramid(statistics=0.25)
    assert iso.LinearToPyramid(statistics=1.0) == iso.LinearToPyramid()
    tdrl = timm.create_model("tdrl_vit_ti", depth=1, img_size=32, statistics=0.25)
    assert tdrl.blocks[0].mlp.fc2.statistics == 0.25
    for wrong in (0, -0.5, 2, "half", "1/0", float("nan"), True, None):
        with pytest.raises(iso.UserError, match="is not a part of the tokens; give 'all', or a number above 0"):
            PyramidLinear(3, 4, statistics=wrong)
