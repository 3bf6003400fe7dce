"""torch.func: vmap over a model and gradients of every sample are what a loop gives."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, stack_module_state, vmap

from isomorph.layers import PyramidConv2d, PyramidLinear
from isomorph.layers.pyramid.batchnorm import uses_batch_statistics
from small_models import MODELS, build

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, for timm's ViT too


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def tensors(model):
    return {name: p.detach() for name, p in model.named_parameters()}, dict(model.named_buffers())


def per_sample(model, batches):
    """The gradient of each batch's loss, all at once."""
    weights, buffers = tensors(model)

    def loss(weights, x):
        return functional_call(model, (weights, buffers), (x,)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(weights, batches)


def check(model, batches):
    """Shape: batches (samples, B, ...)"""
    equal(vmap(model)(batches), torch.stack([model(x) for x in batches]))
    found = per_sample(model, batches)
    for i, x in enumerate(batches):
        model.zero_grad()
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                equal(found[name][i], parameter.grad)


def some(name, samples=2, images=2):
    side = 8 if "cifar" in name else 32
    return torch.randn(samples, images, 3, 2 * side, side).double()


@pytest.mark.parametrize("name", MODELS)
class TestEveryModel:
    def test_eval_mode(self, name):
        check(build(name), some(name))

    def test_train_mode(self, name):
        """BatchNorm keeps one set of statistics: it raises, as in timm's networks, unless it keeps none."""
        model = build(name).train()
        if any(map(uses_batch_statistics, model.modules())):
            for call in (vmap(model), lambda x: per_sample(model, x)):
                with pytest.raises(RuntimeError, match=r"[Bb]atch ?[Nn]orm|in-place operation"):
                    call(some(name))
            replace_all_batch_norm_modules_(model)
        check(model, some(name))

    def test_images_one_by_one(self, name):
        model, batch = build(name), some(name)[0]
        equal(vmap(lambda x: model(x[None])[0])(batch), model(batch))


LAYERS = {
    "linear": (lambda: PyramidLinear(120, 100), (3, 2, 7, 120)),
    "linear, batchnorm": (lambda: PyramidLinear(5, 4, rectify="batchnorm"), (3, 2, 7, 5)),
    "patches": (lambda: PyramidConv2d(4, 6, 2, 2), (3, 2, 4, 4, 6)),
    "convolution": (lambda: PyramidConv2d(4, 6, 3, padding=1), (3, 2, 4, 4, 3)),
    "groups": (lambda: PyramidConv2d(4, 4, 3, padding=1, groups=2, rectify="batchnorm"), (3, 2, 4, 4, 3)),
    "pointwise": (lambda: PyramidConv2d(4, 6), (3, 2, 4, 4, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
class TestPyramids:
    def test_eval_and_train_mode(self, name):
        make, shape = LAYERS[name]
        layer = make().double()
        layer(torch.randn(shape[1:]).double())
        check(layer.eval(), torch.randn(shape).double())
        with pytest.raises(
            RuntimeError, match="BatchNorm in train mode cannot update its running statistics from each sample"
        ):
            vmap(layer.train())(torch.randn(shape).double())
        assert {int(b) for n, b in layer.named_buffers() if "num_batches" in n} == {1}
        check(replace_all_batch_norm_modules_(layer), torch.randn(shape).double())

    def test_an_ensemble_trains_with_statistics_of_its_own(self, name):
        make, shape = LAYERS[name]
        layers = [make().double().train() for _ in range(2)]
        x = torch.randn(shape[1:]).double()
        weights, buffers = stack_module_state(layers)
        found = vmap(lambda w, b: functional_call(layers[0], (w, b), (x,)))(weights, buffers)
        equal(found, torch.stack([layer(x) for layer in layers]))
        for i, layer in enumerate(layers):
            for key, buffer in layer.named_buffers():
                equal(buffers[key][i], buffer)

    def test_an_ensemble_is_stacked_without_a_loop(self, name):
        make, shape = LAYERS[name]
        layers = [make().double().train() for _ in range(2)]
        x = torch.randn(shape[1:]).double()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vmap(lambda w, b: functional_call(layers[0], (w, b), (x,)))(*stack_module_state(layers))
        assert not [str(warning.message) for warning in caught if "performance drop" in str(warning.message)]


class ByLayers(nn.Module):
    """A pyramid as its layers compute it, one after the other."""

    def __init__(self, pyramid):
        super().__init__()
        self.pyramid = pyramid

    def forward(self, x):
        total = sum(branch(x) for branch in self.pyramid.branches) + self.pyramid.skip(x)
        return self.pyramid.norm(total) if self.pyramid.norm else total * self.pyramid.output_scale


@pytest.mark.parametrize("rectify", ["rescale", "batchnorm"])
@pytest.mark.parametrize("training", [False, True])
def test_second_derivatives(rectify, training):
    """Of the squared length of the gradient, by every weight and by the input; once more by plain autograd."""
    layer = PyramidLinear(3, 2, rectify=rectify).double()
    layer(torch.randn(5, 3).double())
    replace_all_batch_norm_modules_(layer.train()) if training else layer.eval()
    x = torch.randn(6, 3).double()

    def penalty(model):
        def loss(weights, x):
            return functional_call(model, weights, (x,)).pow(3).sum()

        return lambda weights, x: sum(g.square().sum() for g in grad(loss)(weights, x).values())

    found = grad(penalty(layer), argnums=(0, 1))(dict(layer.named_parameters()), x)
    slow = ByLayers(layer)
    expected = grad(penalty(slow), argnums=(0, 1))(dict(slow.named_parameters()), x)
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, expected[0][f"pyramid.{name}"], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-7, atol=1e-7)
    assert torch.autograd.gradgradcheck(layer, (x.requires_grad_(),))


@pytest.mark.parametrize("name", ["groups"])
def test_second_derivatives_of_convolutions(name):
    layer = replace_all_batch_norm_modules_(LAYERS[name][0]().double())
    weights = [p.detach().requires_grad_() for p in layer.parameters()]

    def call(x, *weights):
        named = zip(dict(layer.named_parameters()), weights, strict=True)
        return functional_call(layer, dict(named), (x,))

    x = torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, *weights), fast_mode=True)
