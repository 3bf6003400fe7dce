"""Pyramids in closed form equal the branch-by-branch form: outputs, all gradients, running statistics."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import isomorph as iso
import references
from isomorph.layers import JointPyramid, PyramidConv2d, PyramidLinear
from isomorph.layers.pyramid import moments
from isomorph.layers.pyramid.base import Layout

LAYOUTS = ["P-W1S", "P-W2S", "P-W3", "P-W4S", "R-D1W4", "R-D3W2S", "R-D5W1S", "naive-W3"]
CONVS = {
    "1x1": dict(kernel_size=1),
    "1x1 strided": dict(kernel_size=1, stride=2),
    "patchify": dict(kernel_size=4, stride=4),
    "3x3 strided": dict(kernel_size=3, stride=2, padding=1),
    "grouped, dilated": dict(kernel_size=(3, 5), padding=(1, 2), groups=3, dilation=(1, 2)),
    "depthwise": dict(kernel_size=3, padding=1, groups=6),
}


def step(layer, run, x, seed=0):
    """Output, input gradient and parameter gradients of one training step on x."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = run(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
    (y * weights).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def same(a, b, **tolerance):
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, **tolerance)


def agree(layer, inputs, **tolerance):
    """Closed form and branch by branch, over several steps, then in eval mode and fused."""
    tolerance = tolerance or dict(rtol=0, atol=1e-10)
    twin = copy.deepcopy(layer)
    for x in inputs:
        same(step(layer, layer, x), step(twin, lambda t: references.pyramid(twin, t), x), **tolerance)
        same(layer.buffers(), twin.buffers(), **tolerance)
    layer.eval(), twin.eval()
    same(step(layer, layer, x), step(twin, lambda t: references.pyramid(twin, t), x), **tolerance)
    torch.testing.assert_close(layer.fuse()(x), references.pyramid(twin, x), **tolerance)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rectify", ["batchnorm", "rescale", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_equals_the_branches(layout, rectify, affine):
    layer = PyramidLinear(5, 9, layout, rectify, affine).double()
    agree(layer, [torch.randn(4, 7, 5, dtype=torch.float64) * 2 + 1 for _ in range(3)])


@pytest.mark.parametrize("shape", [(9, 5), (300, 40), (40, 300)])
def test_widths_and_symmetric_strips(shape):
    layer = PyramidLinear(*shape, "P-W2S", rescale_by=3).double()
    agree(layer, [torch.randn(400, shape[0], dtype=torch.float64) for _ in range(2)], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", ["P-W2S", "R-D2W2", "naive-W2"])
@pytest.mark.parametrize("name", CONVS)
def test_conv_equals_the_branches(name, layout):
    layer = PyramidConv2d(6, 12, **CONVS[name], layout=layout, rectify="batchnorm").double()
    agree(layer, [torch.randn(3, 6, 8, 12, dtype=torch.float64) + 1 for _ in range(2)])


def test_frozen_statistics_within_training():
    layer = PyramidLinear(5, 9, "P-W2S", "batchnorm").double()
    for norm in (m for m in layer.modules() if isinstance(m, nn.BatchNorm1d)):
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    layer.branches[0][1].eval(), layer.branches[1][3].eval()
    agree(layer, [torch.randn(20, 5, dtype=torch.float64) for _ in range(2)])


def test_cumulative_and_absent_statistics():
    layer = PyramidLinear(5, 9, "P-W2S").double()
    layer.branches[0][1].momentum = None
    layer.branches[1][1] = nn.BatchNorm1d(5, track_running_stats=False).double()
    twin = copy.deepcopy(layer)
    for _ in range(3):
        x = torch.randn(20, 5, dtype=torch.float64)
        same(step(layer, layer, x), step(twin, lambda t: references.pyramid(twin, t), x), rtol=0, atol=1e-10)
        same(layer.buffers(), twin.buffers(), rtol=0, atol=1e-10)


def test_joint_pyramids_measure_once(monkeypatch):
    q, k, v = (PyramidLinear(5, 9, rectify=r).double() for r in ("batchnorm", "batchnorm", "rescale"))
    joint = JointPyramid(copy.deepcopy([q, k, v]))
    calls, measure = [], moments.MeasureMoments.apply
    monkeypatch.setattr(moments.MeasureMoments, "apply", lambda *a: calls.append(a) or measure(*a))
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    got = step(joint, joint, x)
    assert len(calls) == 1
    apart = nn.ModuleList([q, k, v])
    same(got, step(apart, lambda t: torch.cat([references.pyramid(p, t) for p in apart], -1), x), rtol=0, atol=1e-10)
    joint.eval()
    torch.testing.assert_close(joint.fuse()(x), joint(x), rtol=0, atol=1e-12)
    with pytest.raises(iso.UserError, match=r"input widths \[4, 5\]"):
        JointPyramid([q, PyramidLinear(4, 9)])


@pytest.mark.parametrize(("mean", "spread"), [(0, 1e-7), (3, 0), (1e4, 1), (-300, 1e-2)])
def test_awkward_inputs_in_float32(mean, spread):
    """As near to float64 as the branch-by-branch form in float32 is, within a factor, and never off."""
    layer = PyramidLinear(16, 24, "P-W3S", "batchnorm")
    x = mean + spread * torch.randn(500, 16)
    exact = copy.deepcopy(layer).double()
    branches = copy.deepcopy(layer)
    truth = step(exact, lambda t: references.pyramid(exact, t), x.double())
    ours, theirs = step(layer, layer, x), step(branches, lambda t: references.pyramid(branches, t), x)
    for a, b, t in zip(ours, theirs, truth, strict=True):
        assert a.isfinite().all()
        assert (a - t).abs().max() <= 10 * (b - t).abs().max() + 1e-4 * t.abs().max() + 1e-4


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_correlated_channels_stay_bounded(ratio):
    """A mode that all channels share and rows that cancel it: float32 knows such variances to 1e-7 of the mode's.

    Where it cannot know them the closed form must not blow up, as 1 / sqrt(eps) would.
    """
    layer = PyramidLinear(16, 16, "P-W2S", "none")
    x = torch.randn(500, 16) + ratio * torch.randn(500, 1)
    for branch in layer.branches:
        branch[0].weight.data -= branch[0].weight.data.mean(1, keepdim=True)
    exact = copy.deepcopy(layer).double()
    truth = step(exact, lambda t: references.pyramid(exact, t), x.double())
    ours = step(layer, layer, x)
    if ratio <= 1e3:
        assert (ours[0] - truth[0]).abs().max() < 1e-7 * ratio**2 * truth[0].abs().max()
    for a, t in zip(ours, truth, strict=True):
        assert a.isfinite().all()
        assert a.abs().max() <= 3 * t.abs().max() + 1e-2


def test_float16_does_not_overflow():
    layer, x = PyramidLinear(16, 24, "P-W3S"), torch.full((50, 16), 3.0)
    with torch.autocast("cpu", torch.float16):
        assert layer(x).isfinite().all()


def test_other_shapes_are_refused():
    with pytest.raises(iso.UserError, match=r"shape \(4, 6\); the pyramid needs 5 features"):
        PyramidLinear(5, 9)(torch.randn(4, 6))
    with pytest.raises(iso.UserError, match=r"needs \(B, 5, H, W\)"):
        PyramidConv2d(5, 9)(torch.randn(4, 4, 4))


def test_autocast_keeps_float32_statistics():
    layer = PyramidLinear(32, 48, "P-W2S", "batchnorm")
    twin, x = copy.deepcopy(layer), torch.randn(300, 32) + 5
    expected = step(twin, twin, x)

    def low(t):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(t)

    got = step(layer, low, x)
    assert got[0].dtype == torch.bfloat16
    same(layer.buffers(), twin.buffers(), rtol=3e-4, atol=3e-4)  # of rounded tokens
    for a, b in zip(got, expected, strict=True):
        assert (a.float() - b).abs().max() <= 0.03 * b.abs().max() + 1e-2


def test_a_bfloat16_layer_computes_in_float32():
    layer = PyramidLinear(32, 48).bfloat16()
    y = layer(torch.randn(300, 32, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert layer.eval().fuse().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("layer", [PyramidLinear(5, 9), PyramidConv2d(5, 9, 4, 4)])
def test_one_token_is_batchnorms_own_error(layer):
    x = torch.randn(1, 5) if isinstance(layer, PyramidLinear) else torch.randn(1, 5, 4, 4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(x)
    assert layer.eval()(x).isfinite().all()


def test_accumulated_gradients_are_sums():
    layer = PyramidLinear(5, 9, "P-W2S").double()
    twin = copy.deepcopy(layer)
    for _ in range(2):
        x = torch.randn(20, 5, dtype=torch.float64)
        layer(x).square().sum().backward()
        references.pyramid(twin, x).square().sum().backward()
    same([p.grad for p in layer.parameters()], [p.grad for p in twin.parameters()], rtol=0, atol=1e-9)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_a_batch_once(reentrant):
    layer = PyramidLinear(5, 9, "P-W2S", "batchnorm").double()
    twin, x = copy.deepcopy(layer), torch.randn(20, 5, dtype=torch.float64)
    got = step(layer, lambda t: checkpoint(layer, t, use_reentrant=reentrant), x)
    same(got, step(twin, twin, x), rtol=0, atol=1e-12)
    same(layer.buffers(), twin.buffers())


def test_frozen_parameters_get_no_gradient_and_change_no_other():
    layer = PyramidLinear(5, 9, "P-W2S").double()
    twin, x = copy.deepcopy(layer), torch.randn(20, 5, dtype=torch.float64)
    layer.branches[1][2].weight.requires_grad_(False)
    layer.skip.requires_grad_(False)
    layer(x).square().sum().backward()
    twin(x).square().sum().backward()
    assert layer.skip.weight.grad is layer.branches[1][2].weight.grad is None
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=0, atol=1e-12)


def saved_bytes(layer, tokens, low=False):
    """Bytes kept for the backward pass behind a LayerNorm, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = nn.LayerNorm(layer.in_features)(torch.randn(tokens, layer.in_features).requires_grad_())
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=low):
        held = layer(x)  # noqa: F841
    return sum(kept.values())


@pytest.mark.parametrize("low", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("layout", ["P-W2S", "P-W4S"])
def test_a_token_costs_no_more_memory_than_in_a_plain_layer(layout, low):
    found = [
        saved_bytes(m, 900, low) - saved_bytes(m, 400, low) for m in (PyramidLinear(32, 64, layout), nn.Linear(32, 64))
    ]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [PyramidLinear(16, 24, "P-W2S", "batchnorm"), PyramidConv2d(3, 8, 4, 4)])
def test_compiles_whole_and_exports(layer):
    torch.compiler.reset()
    twin = copy.deepcopy(layer)
    x = torch.randn(40, 16) if isinstance(layer, PyramidLinear) else torch.randn(2, 3, 16, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same(step(layer, compiled, x), step(twin, twin, x), rtol=1e-4, atol=1e-4)
    same(layer.buffers(), twin.buffers(), rtol=1e-4, atol=1e-5)
    exported = torch.export.export(layer.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), layer(x), rtol=1e-4, atol=1e-5)


def test_copies_pickles_and_meta():
    layer = PyramidLinear(5, 9).eval()
    x = torch.randn(3, 5)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(x), layer(x))
    with torch.device("meta"):
        assert PyramidLinear(5, 9)(torch.empty(4, 5)).shape == (4, 9)


@pytest.mark.parametrize("layer", [PyramidLinear(5, 9), PyramidConv2d(5, 9), JointPyramid([PyramidLinear(5, 9)])])
def test_fuse_refuses_train_mode(layer):
    with pytest.raises(iso.UserError, match="eval mode"):
        layer.fuse()


def test_layouts_and_widths():
    assert Layout.parse("P-W3S") == Layout((1, 2, 3), skip=True)
    assert Layout.parse("R-D2W4") == Layout((2, 2, 2, 2), skip=False)
    assert Layout.parse("naive-W8") == Layout((1,) * 8, skip=False, last=False)
    shapes = [
        [tuple(m.weight.shape) for m in branch if isinstance(m, nn.Linear)] for branch in PyramidLinear(4, 6).branches
    ]
    assert shapes == [[(4, 4), (6, 4)], [(4, 4), (6, 4), (6, 6)]]
    assert PyramidConv2d(3, 192, 16, 16).branches[0][0].out_channels == 192  # no squeeze through 3 channels


@pytest.mark.parametrize("name", ["P-W0S", "P-2", "R-W2", "naive-W3S", "p-w2s", "", "R-D0W2", 3])
def test_unknown_layouts_are_named(name):
    shown = repr(name) if isinstance(name, str) else "of type int"
    with pytest.raises(iso.UserError, match=f"layout {shown} is unknown; write P-W2S"):
        PyramidLinear(4, 6, name)


def test_unknown_rectification_is_named():
    with pytest.raises(iso.UserError, match="'batchnorm', 'rescale' or 'none'"):
        PyramidLinear(4, 6, rectify="layernorm")
    with pytest.raises(iso.UserError, match="above 0"):
        PyramidLinear(4, 6, rescale_by=-1)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "backward hook", "parametrization", "adapter", "hook on a part"])
def test_layers_that_are_not_plain_run_one_after_the_other(kind):
    """Whatever is attached to a layer inside a pyramid takes effect, in train and eval mode, and is not fused away."""
    joint = JointPyramid([PyramidLinear(5, 5, rectify=r) for r in ("batchnorm", "rescale")]).double()
    layer, calls = joint.pyramids[1].branches[1][2], []
    if kind == "parametrization":
        nn.utils.parametrizations.weight_norm(layer)
    elif kind == "adapter":
        joint.pyramids[1].branches[1][2] = nn.Sequential(layer, nn.Linear(5, 5).double())
    elif kind == "backward hook":
        layer.register_full_backward_hook(lambda *_: calls.append(1))
    elif kind == "hook on a part":
        joint.pyramids[0].register_forward_hook(lambda *_: calls.append(1))
    else:
        register = layer.register_forward_hook if kind == "hook" else layer.register_forward_pre_hook
        register(lambda *_: calls.append(1))
    twin = copy.deepcopy(joint)
    for mode in (True, False):
        joint.train(mode), twin.train(mode)
        x = torch.randn(20, 5, dtype=torch.float64)
        apart = step(twin, lambda t: torch.cat([references.pyramid(p, t) for p in twin.pyramids], -1), x)
        calls.clear()
        same(step(joint, joint, x), apart, rtol=0, atol=1e-10)
        assert calls or kind in ("parametrization", "adapter")
        same(joint.buffers(), twin.buffers(), rtol=0, atol=1e-10)
    if kind != "hook on a part":
        with pytest.raises(iso.UserError, match="merge or remove them first"):
            joint.fuse()


@pytest.mark.parametrize(
    ("module", "shape"), [(nn.Linear(5, 9), (4, 7, 5)), (nn.Conv2d(4, 8, 3, padding=1, groups=2), (3, 4, 6, 5))]
)
def test_the_papers_own_form_is_the_same(module, shape):
    """`form="branches"`: the same state, output, gradients and statistics, and the same fused layer."""
    x = torch.randn(shape, dtype=torch.float64)
    closed, branched = (
        iso.recast(nn.Sequential(copy.deepcopy(module).double()), iso.LinearToPyramid(init=init, form=form), "0")
        for init, form in (("paper", "closed"), ("paper", "branches"))
    )
    assert type(branched[0]).__name__.startswith("Branched")
    branched.load_state_dict(closed.state_dict())
    same(step(closed.train(), closed, x), step(branched.train(), branched, x), rtol=0, atol=1e-10)
    same(closed.buffers(), branched.buffers(), rtol=0, atol=1e-10)
    torch.testing.assert_close(iso.fuse(branched.eval())(x), closed.eval()(x), rtol=0, atol=1e-10)
