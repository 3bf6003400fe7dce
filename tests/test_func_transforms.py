"""torch.func: vmap over a model and gradients of every sample are what a loop gives."""

import pytest
import torch
from torch.func import (
    functional_call,
    grad,
    replace_all_batch_norm_modules_,
    stack_module_state,
    vmap,
)

import references
from isomorph.layers import PyramidConv2d, PyramidLinear
from isomorph.layers.pyramid.batchnorm import uses_batch_statistics
from small_models import MODELS, build

# torch's own, for timm's ViT too
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


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


LAYERS = {
    "linear": (lambda: PyramidLinear(12, 10), (3, 2, 7, 12)),
    "linear, batchnorm": (lambda: PyramidLinear(5, 4, rectify="batchnorm"), (3, 2, 7, 5)),
    "convolution": (
        lambda: PyramidConv2d(4, 4, 3, padding=1, groups=2, rectify="batchnorm"),
        (3, 2, 4, 4, 3),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
class TestPyramids:
    def test_eval_and_train_mode(self, name):
        make, shape = LAYERS[name]
        layer = make().double()
        layer(torch.randn(shape[1:]).double())
        check(layer.eval(), torch.randn(shape).double())
        with pytest.raises(RuntimeError, match=r"[Bb]atch ?[Nn]orm|in-place operation"):
            vmap(layer.train())(torch.randn(shape).double())
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


@pytest.mark.parametrize("rectify", ["rescale", "batchnorm"])
@pytest.mark.parametrize("training", [False, True])
def test_second_derivatives(rectify, training):
    """By plain autograd, in closed form; of the squared length of the gradient against the layers one by one."""
    layer = PyramidLinear(3, 2, rectify=rectify).double()
    layer(torch.randn(5, 3).double())
    replace_all_batch_norm_modules_(layer.train()) if training else layer.eval()
    x = torch.randn(6, 3).double().requires_grad_()
    assert torch.autograd.gradgradcheck(layer, (x,))
    found = []
    for run in (layer, lambda t: references.pyramid(layer, t)):
        inputs = [x, *(p for n, p in layer.named_parameters() if p.requires_grad)]
        grads = torch.autograd.grad(
            run(x).pow(3).sum(), inputs, create_graph=True, materialize_grads=True
        )
        penalty = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(penalty, inputs, materialize_grads=True))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


def test_second_derivatives_of_convolutions():
    layer = replace_all_batch_norm_modules_(LAYERS["convolution"][0]().double())
    weights = [p.detach().requires_grad_() for p in layer.parameters()]

    def call(x, *weights):
        named = zip(dict(layer.named_parameters()), weights, strict=True)
        return functional_call(layer, dict(named), (x,))

    x = torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, *weights), fast_mode=True)
