"""MBConv equals the paper's formula, folds its norms exactly, and halves any map alike on both branches."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import references
from isomorph.layers import LayerNormMBConv, MBConv
from isomorph.layers.relative.mbconv import BatchNormStem, LayerNormStem, MaxPool

SHAPES = {"same": (8, 8, 1), "wider": (6, 8, 1), "halves": (6, 8, 2), "halves only": (8, 8, 2)}
ON = ["expand", "depthwise"]
SIZES = [(6, 8), (7, 5), (1, 3)]


def perturbed(module, dtype=torch.float64):
    """Weights, norms and their statistics anywhere but where they are born."""
    torch.manual_seed(0)
    module = module.to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.weight.data.add_(1)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return module


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride_on", ON)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_paper_with_gradients(shape, stride_on, size):
    dim, dim_out, stride = SHAPES[shape]
    block = perturbed(MBConv(dim, dim_out, stride, stride_on=stride_on)).eval()
    x = torch.randn(2, dim, *size, dtype=torch.float64, requires_grad=True)
    expected = references.mbconv(block, x, stride, stride_on)
    actual = block(x)
    assert actual.shape == (2, dim_out, -(-size[0] // stride), -(-size[1] // stride))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    leaves = [x, *block.parameters()]
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    found = torch.autograd.grad(actual.square().sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


BLOCKS = {
    f"{name}, {on}": lambda s=s, on=on: MBConv(*s, stride_on=on)
    for name, s in SHAPES.items()
    for on in ON
}
BLOCKS["stem"] = lambda: BatchNormStem(6, 8)


@pytest.mark.parametrize("name", BLOCKS)
def test_fuses_exactly(name):
    block = perturbed(BLOCKS[name]()).eval()
    before = copy.deepcopy(block.state_dict())
    fused = block.fuse()
    x = torch.randn(3, next(block.parameters()).shape[0], 7, 5, dtype=torch.float64)
    x = torch.randn(3, 6, 7, 5, dtype=torch.float64) if name == "stem" else x
    torch.testing.assert_close(fused(x), block(x), rtol=0, atol=1e-12)
    for m in fused.modules():
        assert not isinstance(m, torch.nn.modules.batchnorm._BatchNorm)
    assert not hasattr(fused, "fuse")
    for a, b in zip(before.values(), block.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    fused(x).square().sum().backward()
    for p in fused.parameters():
        assert p.grad is not None
        assert p.grad.abs().sum() > 0
    single = perturbed(BLOCKS[name](), torch.float32).eval()
    torch.testing.assert_close(single.fuse()(x.float()), single(x.float()), rtol=1e-4, atol=1e-4)


def test_layer_norm_looks_at_one_image_and_has_nothing_to_fold():
    block = perturbed(LayerNormMBConv(6, 8, 2))
    x = torch.randn(3, 6, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(block(x)[:1], block(x[:1]))
    assert not hasattr(block, "fuse")
    assert not hasattr(LayerNormStem(3, 8), "fuse")
    norm = block.norm
    normed = F.layer_norm(x.movedim(1, -1), (6,), norm.weight, norm.bias, 1e-6)
    y = block.expand(normed.movedim(-1, 1))
    torch.testing.assert_close(block.expand(block.norm(x)), y)


def test_max_pool_fills_the_rim_with_what_is_there():
    x = -torch.arange(1.0, 16.0).view(1, 1, 3, 5)
    assert MaxPool()(x).tolist() == [[[[-1, -3, -5], [-11, -13, -15]]]]


@pytest.mark.parametrize(
    "wrong", [dict(stride=3), dict(expand_ratio=0), dict(se_ratio=-1), dict(stride_on="project")]
)
def test_what_cannot_be_built_is_refused(wrong):
    with pytest.raises(
        ValueError,
        match=r"must be 1 or 2, expand_ratio and se_ratio above 0|choose 'expand' or 'depthwise'",
    ):
        MBConv(4, 4, **wrong)


@pytest.mark.slow
def test_compiles_and_exports():
    block = perturbed(MBConv(4, 8, 2), torch.float32).eval()
    x = torch.randn(3, 4, 6, 6)
    for module in (block, block.fuse()):
        expected = module(x)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
        program = torch.export.export(
            module, (x,), dynamic_shapes=({0: torch.export.Dim("b", min=1, max=8)},)
        )
        torch.testing.assert_close(program.module()(x[:2]), expected[:2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [MBConv, LayerNormMBConv, BatchNormStem, LayerNormStem])
def test_no_class_holds_a_bare_partial(block):
    """Python 3.13 warns of one that an instance reads, as later versions will bind it like a method."""
    bare = [name for name, value in vars(block).items() if isinstance(value, partial)]
    assert bare == []
