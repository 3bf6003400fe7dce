"""What layers keep in eval mode follows every change of parameters, grids and precision, and is no part of copies."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import isomorph as iso
from isomorph.layers.modes import KeepsInEval
from law_rows import noisy


class Edited(nn.Module):
    """The edit of a map, called with scores."""

    def __init__(self, edit):
        super().__init__()
        self.edit = edit

    def forward(self, scores):
        return self.edit(
            scores.softmax(-1), iso.layers.MapCall(shapes=((3, 4),), prefix=scores.shape[-1] - 12)
        )


LAYERS = {  # a layer, an input, and one of another size
    "GPSA": (lambda: iso.layers.GPSA(16, 4, (3, 4)), (2, 12, 16), None),
    "ViTGPSA": (lambda: iso.layers.ViTGPSA(18, 6, (3, 4), prefix_tokens=1), (2, 13, 18), None),
    "PSA": (lambda: iso.layers.PSA(16, 4, (3, 4)), (2, 12, 16), None),
    "PositionalAttention": (
        lambda: iso.layers.PositionalAttention(16, 4, (3, 4)),
        (2, 12, 16),
        None,
    ),
    "GPSA2d": (lambda: iso.layers.GPSA2d(10, 6, 3, padding=1), (2, 10, 5, 6), (1, 10, 7, 4)),
    "WindowGPSA2d": (
        lambda: iso.layers.WindowGPSA2d(10, 6, 3, padding=1, window=3),
        (2, 10, 5, 6),
        (1, 10, 7, 4),
    ),
    "PositionalConv2d": (
        lambda: iso.layers.PositionalConv2d(20, 6, 3, padding=1),
        (2, 20, 5, 6),
        (1, 20, 7, 4),
    ),
    "RelativeAttention": (
        lambda: iso.layers.RelativeAttention(16, 4, (3, 4)),
        (2, 3, 4, 16),
        (1, 5, 4, 16),
    ),
    "PostRelativeAttention": (
        lambda: iso.layers.PostRelativeAttention(16, 4, (3, 4)),
        (2, 3, 4, 16),
        (1, 5, 4, 16),
    ),
    "ViTRelativeAttention": (
        lambda: iso.layers.ViTRelativeAttention(16, 4, (3, 4), prefix_tokens=1, prefix_bias=True),
        (2, 13, 16),
        None,
    ),
    "DecomposedAttention": (
        lambda: iso.layers.DecomposedAttention(16, 4, grid_size=(3, 4)),
        (2, 3, 4, 16),
        None,
    ),
    "RefinedAttention": (lambda: iso.layers.RefinedAttention(16, 4), (2, 12, 16), (1, 7, 16)),
    "RefinedMap": (
        lambda: Edited(iso.layers.RefinedMap(iso.layers.Refiner(4))),
        (2, 4, 12, 12),
        (1, 4, 13, 13),
    ),
    "GatedMap": (lambda: Edited(iso.layers.GatedMap(4)), (2, 4, 12, 12), (1, 4, 13, 13)),
}
KEEPING = [name for name in LAYERS if name != "DecomposedAttention"]


def build(name):
    torch.manual_seed(0)
    make, size, other = LAYERS[name]
    layer = noisy(make().double().eval(), 0.3)
    return (
        layer,
        torch.randn(size, dtype=torch.float64),
        torch.randn(other or size, dtype=torch.float64),
    )


def fresh(layer, x):
    """Return the output of a layer that has kept nothing, with the parameters of this one."""
    twin = copy.deepcopy(layer)
    assert not kept(twin)
    with torch.no_grad():
        return twin(x)


def kept(layer):
    return [
        each
        for module in layer.modules()
        if isinstance(module, KeepsInEval)
        for each in module._cache
    ]


def each_parameter(change):
    def apply(layer):
        for module in layer.modules():
            for name in list(module._parameters):
                if module._parameters[name] is not None:
                    change(module, name, module._parameters[name])

    return apply


CHANGES = {
    "in place": torch.no_grad()(each_parameter(lambda module, name, p: p.mul_(1.1))),
    "replaced": each_parameter(
        lambda module, name, p: setattr(module, name, nn.Parameter(p.detach() * 1.1))
    ),
    "assigned": lambda layer: layer.load_state_dict(
        {k: v + 0.1 for k, v in layer.state_dict().items()}, assign=True
    ),
    "rounded": lambda layer: layer.float().double(),
    "data written, then eval()": lambda layer: (
        each_parameter(lambda m, n, p: p.data.mul_(1.1))(layer),
        layer.eval(),
    ),
}


class Squared(KeepsInEval):
    """A layer whose result is a product of matrices, in the precision of the call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def square(self):
        return self.weight @ self.weight

    def forward(self, x):
        return x @ self.cached((self.weight,), self.square)


@torch.no_grad()
def test_what_is_kept_has_the_precision_of_the_call():
    layer = Squared().eval()
    x = torch.randn(2, 4)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer.cached((layer.weight,), layer.square).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x), x @ layer.weight @ layer.weight)


@pytest.mark.parametrize("name", LAYERS)
class TestKept:
    def test_the_second_call_keeps_and_equals_the_first(self, name):
        layer, x, other = build(name)
        with torch.no_grad():
            first = layer(x)
            assert torch.equal(layer(x), first)
            assert bool(kept(layer)) == (name in KEEPING)
            for each in (other, x):
                torch.testing.assert_close(layer(each), fresh(layer, each))
        torch.testing.assert_close(layer(x), first)  # with gradients
        assert not kept(layer)

    @pytest.mark.parametrize("change", CHANGES)
    def test_follows_every_change(self, name, change):
        layer, x, _ = build(name)
        with torch.no_grad():
            before = layer(x)
            CHANGES[change](layer)
            after = layer(x)
        torch.testing.assert_close(after, fresh(layer, x))
        if change != "rounded":
            assert not torch.allclose(after, before)

    def test_modes_devices_and_copies_lack_it(self, name):
        layer, x, _ = build(name)
        for drop in (
            lambda: layer.train().eval(),
            layer.eval,
            lambda: layer.load_state_dict(layer.state_dict()),
        ):
            with torch.no_grad():
                expected = layer(x)
            drop()
            assert not kept(layer)
        with torch.no_grad():
            layer(x)
        before = len(pickle.dumps(build(name)[0]))
        assert len(pickle.dumps(layer)) == before
        for twin in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
            assert "_cache" not in vars(twin)
            torch.testing.assert_close(twin(x), expected)
        assert layer.to("meta")(x.to("meta")).shape == expected.shape

    def test_precision_and_inference_mode(self, name):
        layer, x, _ = build(name)
        layer = layer.float()
        x = x.float()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            low = layer(x)
        with torch.inference_mode():
            first = layer(x)
        torch.testing.assert_close(first.clone(), fresh(layer, x))
        layer.requires_grad_(False)
        given = x.clone().requires_grad_()
        layer(given).sum().backward()  # what inference mode made may be saved for the backward pass
        assert given.grad.isfinite().all()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), low)

    def test_graphs_read_the_parameters(self, name):
        """What is traced after a call computes from parameters that change later."""
        layer, x, _ = build(name)
        with torch.no_grad():
            layer(x)
            parameters = dict(layer.named_parameters())

            def call(parameters, x):
                return torch.func.functional_call(layer, parameters, (x,))

            graph = make_fx(call)(parameters, x)
            exported = torch.export.export(layer, (x,)).module()
            parameters = {key: p * 1.1 for key, p in parameters.items()}
            exported.load_state_dict(parameters)
            layer(x)
            layer.load_state_dict(parameters)
            torch.testing.assert_close(exported(x), fresh(layer, x))
            torch.testing.assert_close(graph(parameters, x), fresh(layer, x))

    def test_threads_at_two_sizes_and_a_trainer(self, name):
        layer, x, other = build(name)
        expected = [fresh(layer, each) for each in (x, other)]

        def serve(turn):
            with torch.no_grad():
                return all(
                    torch.allclose(layer((x, other)[turn]), expected[turn]) for _ in range(20)
                )

        def differentiate(_):
            return all(torch.allclose(layer(x), expected[0]) for _ in range(10))

        with ThreadPoolExecutor(3) as pool:
            assert all(
                pool.map(lambda job: job[0](job[1]), [(serve, 0), (serve, 1), (differentiate, 0)])
            )
