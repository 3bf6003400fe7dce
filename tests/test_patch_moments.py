"""Moments of 3 x 3 patches from lagged products: equal to those of the patches themselves, with gradients."""

import pytest
import torch

from isomorph.layers import moments
from isomorph.layers.moments import measure_moments
from isomorph.layers.patch_moments import measure_patches
from isomorph.layers.tokens import Window, read_tokens

CASES = [(1, 4, 6, 5), (2, 4, 5, 6), (4, 4, 3, 3), (1, 3, 1, 5), (1, 3, 4, 1), (2, 2, 1, 1), (1, 2, 2, 2)]


def window(groups):
    return Window((3, 3), (1, 1), (1, 1), (1, 1), groups)


def from_patches(x, groups):
    """Mean and covariance as they are defined."""
    tokens = read_tokens(x, window(groups))
    centred = tokens - tokens.mean(-2, keepdim=True)
    return tokens.mean(-2), centred.mT @ centred / tokens.shape[-2]


@pytest.mark.parametrize(("groups", "channels", "height", "width"), CASES)
def test_equals_the_patches_with_gradients(groups, channels, height, width):
    x = (torch.randn(3, channels, height, width, dtype=torch.float64) + 3).requires_grad_()
    ours, theirs = measure_patches(x, groups), from_patches(x, groups)
    factors = [torch.randn_like(t) for t in theirs]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad(sum((t * f).sum() for t, f in zip(m, factors, strict=True)), x) for m in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_second_derivatives():
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: measure_patches(t, 1)[1], x)


@pytest.mark.parametrize("mean", [0, 100, -3000])
def test_float32_is_as_near_as_the_patches(mean):
    x = torch.randn(4, 3, 9, 7) + mean
    truth = from_patches(x.double(), 1)[1]
    ours, theirs = ((m[1].double() - truth).abs().max() for m in (measure_patches(x, 1), from_patches(x, 1)))
    assert ours <= 3 * theirs + 1e-6


def test_half_precision_input_is_measured_in_float32():
    x = torch.randn(4, 3, 5, 5).bfloat16().requires_grad_()
    mean, covariance = measure_patches(x, 1)
    assert mean.dtype == covariance.dtype == torch.float32
    torch.testing.assert_close(covariance, from_patches(x.float(), 1)[1], rtol=1e-5, atol=1e-5)
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
    measure_moments(x, window(1), part=0.5)
    assert [len(images) for images, _ in used] == [8, 4]


def test_memory_is_that_of_the_map():
    saved = []
    x = torch.randn(8, 4, 16, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        measure_patches(x, 1)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    storages.pop(x.untyped_storage().data_ptr())
    assert sum(storages.values()) < 0.5 * x.nbytes
