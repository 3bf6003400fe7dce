"""Moments of overlapping patches, computed without them: equal to those of the patches, with gradients."""

import pytest
import torch

from isomorph.layers.pyramid import moments
from isomorph.layers.pyramid.moments import measure_moments
from isomorph.layers.pyramid.patch_moments import measure_patches
from isomorph.layers.pyramid.tokens import Window, read_tokens

CASES = [(1, 4, 6, 5), (2, 4, 5, 6), (4, 4, 3, 3), (1, 3, 1, 5), (1, 3, 4, 1), (2, 2, 1, 1), (1, 2, 2, 2)]


STRIDED = [
    ((3, 3), (2, 2), (1, 1), 8, 7),
    ((3, 3), (2, 2), (1, 1), 7, 8),
    ((5, 3), (1, 2), (2, 0), 6, 9),
    ((3, 7), (2, 1), (0, 3), 4, 5),
    ((7, 7), (1, 1), (3, 3), 5, 5),
    ((5, 5), (3, 3), (2, 2), 3, 3),
    ((3, 3), (1, 1), (2, 2), 1, 2),
    ((3, 3), (2, 2), (1, 1), 5, 67),
    ((5, 5), (1, 1), (2, 2), 4, 37),
]
"""Kernel size, stride, padding, height and width."""


def window(groups, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)):
    return Window(kernel_size, stride, padding, (1, 1), groups)


def from_patches(x, reading):
    """Mean and covariance as they are defined."""
    tokens = read_tokens(x, reading)
    centred = tokens - tokens.mean(1, keepdim=True)
    return tokens.mean(1), centred.mT @ centred / tokens.shape[1]


def assert_equal_with_gradients(x, reading):
    x = x.requires_grad_()
    ours, theirs = measure_patches(x, reading), from_patches(x, reading)
    factors = [torch.randn_like(t) for t in theirs]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad(sum((t * f).sum() for t, f in zip(m, factors, strict=True)), x) for m in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("groups", "channels", "height", "width"), CASES)
def test_equals_the_patches_with_gradients(groups, channels, height, width):
    assert_equal_with_gradients(torch.randn(3, channels, height, width, dtype=torch.float64) + 3, window(groups))


@pytest.mark.parametrize(("kernel_size", "stride", "padding", "height", "width"), STRIDED)
def test_depthwise_with_any_kernel_and_stride(kernel_size, stride, padding, height, width):
    x = torch.randn(3, 2, height, width, dtype=torch.float64) + 3
    assert_equal_with_gradients(x, window(2, kernel_size, stride, padding))


@pytest.mark.parametrize(("groups", "stride"), [(1, (1, 1)), (2, (1, 1)), (2, (2, 2))])
def test_second_derivatives(groups, stride):
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: measure_patches(t, window(groups, stride=stride))[1], x)


def test_depthwise_vmap():
    reading, x = window(2, stride=(2, 2)), torch.randn(3, 4, 2, 5, 6, dtype=torch.float64)
    for power in (1, 2):
        found = torch.vmap(torch.func.grad(lambda t, p=power: measure_patches(t, reading)[1].pow(p).sum()))(x)
        for own, gradient in zip(x, found, strict=True):
            own = own.clone().requires_grad_()
            from_patches(own, reading)[1].pow(power).sum().backward()
            torch.testing.assert_close(gradient, own.grad)
    jacobian = torch.func.jacrev(lambda t: measure_patches(t, reading)[1])(x[0])
    torch.testing.assert_close(jacobian, torch.func.jacrev(lambda t: from_patches(t, reading)[1])(x[0]))


@pytest.mark.parametrize("mean", [0, 100, -3000])
def test_float32_is_as_near_as_the_patches(mean):
    x = torch.randn(4, 3, 9, 7) + mean
    truth = from_patches(x.double(), window(1))[1]
    ours, theirs = (
        (m[1].double() - truth).abs().max() for m in (measure_patches(x, window(1)), from_patches(x, window(1)))
    )
    assert ours <= 3 * theirs + 1e-6


def test_half_precision_input_is_measured_in_float32():
    x = torch.randn(4, 3, 5, 5).bfloat16().requires_grad_()
    mean, covariance = measure_patches(x, window(1))
    assert mean.dtype == covariance.dtype == torch.float32
    torch.testing.assert_close(covariance, from_patches(x.float(), window(1))[1], rtol=1e-5, atol=1e-5)
    covariance.sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_which_convolutions_are_measured_so(monkeypatch):
    used = []
    monkeypatch.setattr(moments, "measure_patches", lambda *a: used.append(a) or measure_patches(*a))
    x = torch.randn(8, 2, 6, 6)
    for changed in (dict(stride=(2, 2)), dict(padding=(0, 0)), dict(dilation=(2, 2)), dict(kernel_size=(5, 5))):
        measure_moments(x, window(1)._replace(**changed))
    assert not used
    measure_moments(x, window(2))
    measure_moments(x, window(2, (5, 5), (2, 2)))
    assert [len(images) for images, _ in used] == [8, 8]


@pytest.mark.parametrize("groups", [1, 4])
def test_memory_is_that_of_the_map(groups):
    saved = []
    x = torch.randn(8, 4, 16, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        measure_patches(x, window(groups))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    storages.pop(x.untyped_storage().data_ptr())
    assert sum(storages.values()) < 0.5 * x.nbytes


@pytest.mark.parametrize("groups", [1, 3])
def test_the_variance_of_a_tap_is_not_negative(groups):
    """Where one row is far larger than the others, the products of a later tap are what is left of an earlier one's."""
    x = torch.randn(2, 3, 8, 8)
    x[:, :, 0] *= 3e4
    own = measure_patches(x, window(groups))[1].diagonal(dim1=-2, dim2=-1)
    assert (own > 0).all()
