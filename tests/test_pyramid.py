"""Pyramids in closed form equal the branch-by-branch form: outputs, all gradients, running statistics."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import isomorph as iso
import references
from isomorph.layers import JointPyramid, PyramidConv2d, PyramidLinear, patches
from isomorph.layers.pyramid import moments
from isomorph.layers.pyramid.base import BranchLayout
from refusals import refused
from test_operations import saved_mib

LAYOUTS = ["P-W1S", "P-W3", "P-W4S", "R-D1W4", "R-D3W2S", "naive-W1", "naive-W3"]
CONVS = {
    "1x1": dict(kernel_size=1),
    "1x1 strided": dict(kernel_size=1, stride=2),
    "patchify": dict(kernel_size=4, stride=4),
    "3x3 strided": dict(kernel_size=3, stride=2, padding=1),
    "grouped, dilated": dict(kernel_size=(3, 5), padding=(1, 2), groups=3, dilation=(1, 2)),
    "3x3": dict(kernel_size=3, padding=1),
    "even, padded by its height": dict(kernel_size=(4, 9), padding=(4, 4), groups=3),
    "not padded": dict(kernel_size=3),
    "depthwise": dict(kernel_size=3, padding=1, groups=6),
    "depthwise, 1x1": dict(kernel_size=1, groups=6),
}
EXACT = dict(rtol=0, atol=1e-10)


def by_branches(layer):
    """The layer as its parts compute it one after the other, pyramids branch by branch."""

    def run(x):
        parts = [layer]
        if isinstance(layer, JointPyramid):
            parts = layer.pyramids
        outputs = []
        for part in parts:
            if type(part) is nn.Linear:
                outputs.append(part(x))
            else:
                outputs.append(references.pyramid(part, x))
        return torch.cat(outputs, -1)

    return run


def step(layer, run, x):
    """Output, input gradient and parameter gradients of one training step on x."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = run(x)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    loss = (y * weights.to(y.dtype)).sum()
    loss.backward()
    gradients = [p.grad for p in layer.parameters()]
    return [y.detach(), x.grad, *gradients]


def assert_same_step(layer, twin, x, **tolerance):
    """One training step of a layer, and of its twin branch by branch."""
    expected = step(twin, by_branches(twin), x)
    same(step(layer, layer, x), expected, **tolerance)


def same(a, b, **tolerance):
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, **(tolerance or EXACT))


def agree(layer, shape, steps=2, **tolerance):
    """Closed form and branch by branch, over several steps, then in eval mode and fused, in float64."""
    layer = layer.double()
    twin = copy.deepcopy(layer)
    for _ in range(steps):
        x = torch.randn(shape, dtype=torch.float64) * 2 + 1
        assert_same_step(layer, twin, x, **tolerance)
        same(layer.buffers(), twin.buffers(), **tolerance)
    layer.eval()
    twin.eval()
    assert_same_step(layer, twin, x, **tolerance)
    fused = layer.fuse()
    same([fused(x)], [by_branches(twin)(x)], **tolerance)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rectify", ["batchnorm", "rescale", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_equals_the_branches(layout, rectify, affine):
    agree(PyramidLinear(5, 9, layout, rectify, affine), (4, 7, 5))


@pytest.mark.parametrize("shape", [(9, 5), (300, 40), (40, 300)])
def test_widths_and_symmetric_strips(shape):
    layer = PyramidLinear(*shape, "P-W2S", rescale_by=3)
    agree(layer, (400, shape[0]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("affine", [True, False])
def test_one_unit_that_does_not_widen_equals_its_layers(affine, scale):
    """On a CPU its BatchNorm normalises the outputs, without the moments of the input."""
    layer = PyramidLinear(9, 5, "naive-W1", affine=affine, rescale_by=scale)
    assert layer.costs_less_by_outputs(torch.zeros(1))
    agree(layer, (4, 7, 9))
    layer.train()
    x = torch.randn(4, 9, dtype=torch.float64)
    zeros = torch.zeros(5, dtype=torch.float64)
    gradient = step(layer, layer, x)[3]
    same([gradient], [zeros], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["P-W2S", "R-D2W2", "naive-W2"])
@pytest.mark.parametrize("name", CONVS)
def test_conv_equals_the_branches(name, layout):
    out_channels = 6 if "depthwise" in name else 12
    layer = PyramidConv2d(6, out_channels, **CONVS[name], layout=layout, rectify="batchnorm")
    agree(layer, (3, 6, 8, 12), rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize(
    ("kernel", "padding"),
    [((3, 3), (1, 1)), ((2, 5), (1, 2)), ((5, 4), (2, 6)), ((7, 7), (3, 3))],
)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_sums_over_patches_by_lag(kernel, padding, groups):
    """Equal to sums over formed patches; and a tap that reads almost only zeros keeps a positive variance."""
    window = patches.Window(kernel, (1, 1), padding, (1, 1), groups)
    x = torch.randn(19, 6, 8, 7, dtype=torch.float64) + 2
    assert patches.is_summed_by_lag(x, window)

    tokens = patches.read_tokens(x, window)
    products = patches.sum_products(x, window)
    torch.testing.assert_close(products, tokens.mT @ tokens)

    width = tokens.shape[-1]
    half = torch.randn(groups, width, width, dtype=torch.float64)
    slope = half + half.mT
    applied = patches.apply_to_patches(x, slope, window)
    expected = patches.scatter_tokens(tokens @ slope, x.shape, window)
    torch.testing.assert_close(applied, expected)

    x[:, :, 1:] = 0
    measured = moments.measure_moments(x.float() * 1e3, window)
    variances = measured.covariance.diagonal(dim1=1, dim2=2)
    assert (variances > 0).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rectify", ["bbr", "rrr", "nbr", "brn", "blr", "lbl", "nll", "lll"])
def test_joint_layers_equal_their_parts(rectify, bias):
    """Pyramids rectified in any way, and linear layers, side by side."""
    kinds = dict(b="batchnorm", r="rescale", n="none")
    parts = []
    for letter in rectify:
        if letter in kinds:
            part = PyramidLinear(5, 7, rectify=kinds[letter])
        else:
            part = nn.Linear(5, 6, bias)
        parts.append(part)
    agree(JointPyramid(parts), (4, 7, 5))


@pytest.mark.parametrize("change", [dict(training=False), dict(momentum=None), dict(eps=1e-3)])
def test_norms_that_differ(change):
    layer = PyramidLinear(5, 9, "P-W2S", "batchnorm")
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    for norm in (layer.branches[0][1], layer.branches[1][3]):
        vars(norm).update(change)
    agree(layer, (20, 5), steps=3)


def test_absent_statistics_and_those_that_are_not_tracked():
    layer = PyramidLinear(5, 9, "P-W2S").double()
    plain_branch, branch = layer.branches
    branch[1] = nn.BatchNorm1d(5, track_running_stats=False).double()
    untracked = branch[3]
    untracked.track_running_stats = False
    before = untracked.running_mean.clone()
    twin = copy.deepcopy(layer)
    for _ in range(3):
        x = torch.randn(20, 5, dtype=torch.float64)
        assert_same_step(layer, twin, x)
    assert torch.equal(before, untracked.running_mean)
    same(plain_branch.buffers(), twin.branches[0].buffers())


def test_joint_pyramids_measure_once(monkeypatch):
    pyramids = [PyramidLinear(5, 9, rectify=r) for r in ("batchnorm", "batchnorm", "rescale")]
    joint = JointPyramid(pyramids)
    calls = []
    measure = moments.MeasureMoments.apply

    def counted(*arguments):
        calls.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(moments.MeasureMoments, "apply", counted)
    joint(torch.randn(4, 7, 5))
    assert len(calls) == 1


@pytest.mark.parametrize(("mean", "spread"), [(0, 1e-7), (3, 0), (1e4, 1), (-300, 1e-2)])
def test_awkward_inputs_in_float32(mean, spread):
    """As near to float64 as the branch-by-branch form in float32 is, within a factor, and never off."""
    layer = PyramidLinear(16, 24, "P-W3S", "batchnorm")
    x = mean + spread * torch.randn(500, 16)
    exact = copy.deepcopy(layer).double()
    branches = copy.deepcopy(layer)
    truth = step(exact, by_branches(exact), x.double())
    ours = step(layer, layer, x)
    theirs = step(branches, by_branches(branches), x)
    for a, b, t in zip(ours, theirs, truth, strict=True):
        assert a.isfinite().all()
        error = (a - t).abs().max()
        usual = (b - t).abs().max()
        rounding = 1e-4 * t.abs().max() + 1e-4
        assert error <= 10 * usual + rounding


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_correlated_channels_stay_bounded(ratio):
    """A mode that all channels share and rows that cancel it: float32 knows such variances to 1e-7 of the mode's.

    Where it cannot know them the closed form must not blow up, as 1 / sqrt(eps) would.
    """
    layer = PyramidLinear(16, 16, "P-W2S", "none")
    x = torch.randn(500, 16) + ratio * torch.randn(500, 1)
    for branch in layer.branches:
        weight = branch[0].weight.data
        weight -= weight.mean(1, keepdim=True)
    exact = copy.deepcopy(layer).double()
    truth = step(exact, by_branches(exact), x.double())
    ours = step(layer, layer, x)
    if ratio <= 1e3:
        y, expected = ours[0], truth[0]
        error = (y - expected).abs().max()
        assert error < 1e-7 * ratio**2 * expected.abs().max()
    for a, t in zip(ours, truth, strict=True):
        assert a.isfinite().all()
        assert a.abs().max() <= 3 * t.abs().max() + 1e-2


def test_half_precision():
    """Statistics are float32 under autocast, which does not overflow; a layer in bfloat16 keeps its dtype."""
    layer = PyramidLinear(16, 24, "P-W3S")
    x = torch.full((50, 16), 3.0)
    with torch.autocast("cpu", torch.float16):
        y = layer(x)
    assert y.isfinite().all()

    layer = PyramidLinear(32, 48, "P-W2S", "batchnorm")
    twin = copy.deepcopy(layer)
    x = torch.randn(300, 32) + 5
    expected = step(twin, twin, x)
    under_autocast = torch.autocast("cpu", torch.bfloat16)(layer)
    got = step(layer, under_autocast, x)
    assert got[0].dtype == torch.bfloat16
    same(layer.buffers(), twin.buffers(), rtol=3e-4, atol=3e-4)  # of rounded tokens
    for a, b in zip(got, expected, strict=True):
        error = (a.float() - b).abs().max()
        assert error <= 0.03 * b.abs().max() + 1e-2

    layer.bfloat16()
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    fused = layer.eval().fuse()
    assert fused.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "layer", [PyramidLinear(5, 9, "P-W2S", "batchnorm"), PyramidLinear(5, 4, "naive-W1")]
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_a_batch_once(reentrant, layer):
    layer = copy.deepcopy(layer).double()
    twin = copy.deepcopy(layer)
    x = torch.randn(20, 5, dtype=torch.float64)

    def checkpointed(t):
        return checkpoint(layer, t, use_reentrant=reentrant)

    expected = step(twin, twin, x)
    same(step(layer, checkpointed, x), expected)
    same(layer.buffers(), twin.buffers())


def test_frozen_parameters_get_no_gradient_and_change_no_other():
    layer = PyramidLinear(5, 9, "P-W2S").double()
    twin = copy.deepcopy(layer)
    x = torch.randn(20, 5, dtype=torch.float64)
    frozen = layer.branches[1][2].weight
    frozen.requires_grad_(False)
    layer.skip.requires_grad_(False)
    for net in (layer, twin):
        for _ in range(2):  # gradients are added up
            loss = net(x).square().sum()
            loss.backward()
    assert layer.skip.weight.grad is None
    assert frozen.grad is None
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        if a.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("layout", ["P-W2S", "P-W4S"])
def test_a_token_costs_no_more_memory_than_in_a_plain_layer(layout, low):
    def memory_of_500_tokens(layer):
        net = nn.Sequential(nn.LayerNorm(32), layer)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            many = saved_mib(net, torch.randn(900, 32))
            few = saved_mib(net, torch.randn(400, 32))
        return many - few

    plain = memory_of_500_tokens(nn.Linear(32, 64))
    assert memory_of_500_tokens(PyramidLinear(32, 64, layout)) == pytest.approx(plain)


JOINED = [PyramidLinear(16, 24, "P-W2S", "batchnorm"), nn.Linear(16, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer", [JointPyramid(JOINED), PyramidConv2d(3, 8, 4, 4), PyramidConv2d(3, 8, 3, 1, 1)]
)
def test_compiles_whole_and_exports(layer):
    torch.compiler.reset()
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 3, 16, 16)
    if isinstance(layer, JointPyramid):
        x = torch.randn(40, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = step(twin, twin, x)
    same(step(layer, compiled, x), expected, rtol=1e-4, atol=1e-4)
    same(layer.buffers(), twin.buffers(), rtol=1e-4, atol=1e-5)
    exported = torch.export.export(layer.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), layer(x), rtol=1e-4, atol=1e-5)


def test_a_compiler_may_fuse_all_products_with_a_vector():
    torch.compiler.reset()
    sizes = []

    def read(graph, _):
        for node in graph.graph.nodes:
            if "bmm" in str(node.target):
                for factor in node.args[-2:]:
                    value = factor.meta["val"]
                    sizes.extend(value.shape[-2:])
        return make_boxed_func(graph)

    layer = JointPyramid([PyramidLinear(16, 24, "P-W2S", "batchnorm"), PyramidLinear(16, 24)])
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=read))
    y = compiled(torch.randn(40, 16))
    y.sum().backward()
    assert min(sizes) > 1
    assert len(sizes) > 40


def test_layouts_and_widths():
    assert BranchLayout.parse("P-W3S") == BranchLayout((1, 2, 3), skip=True)
    assert BranchLayout.parse("R-D2W4") == BranchLayout((2, 2, 2, 2), skip=False)
    assert BranchLayout.parse("naive-W8") == BranchLayout((1,) * 8, skip=False, last=False)
    shapes = []
    for branch in PyramidLinear(4, 6).branches:
        shapes.append([tuple(m.weight.shape) for m in branch if isinstance(m, nn.Linear)])
    assert shapes == [[(4, 4), (6, 4)], [(4, 4), (6, 4), (6, 6)]]
    # no squeeze through 3 channels
    patchify = PyramidConv2d(3, 192, 16, 16)
    assert patchify.branches[0][0].out_channels == 192


@pytest.mark.parametrize("layout", ["P-W0S", "P-2", "R-W2", "naive-W3S", "p-w2s", "", "R-D0W2", 3])
def test_unknown_layouts(layout):
    refused("layout .* is unknown; write P-W2S", lambda: PyramidLinear(4, 6, layout))


REFUSED = [
    (lambda: PyramidLinear(4, 6, rectify="layernorm"), "'batchnorm', 'rescale' or 'none'"),
    (lambda: PyramidLinear(4, 6, rescale_by=-1), "above 0"),
    (lambda: PyramidLinear(5, 9)(torch.randn(4, 6)), r"shape \(4, 6\); a pyramid needs \(\*, 5\)"),
    (lambda: PyramidConv2d(5, 9)(torch.randn(4, 4, 4)), r"needs \(B, 5, H, W\)"),
    (lambda: JointPyramid([PyramidLinear(5, 9), PyramidLinear(4, 9)]), r"input widths \[4, 5\]"),
    (lambda: JointPyramid([PyramidLinear(5, 9)]).fuse(), "eval mode"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_is_refused(call, said):
    refused(said, call)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (PyramidLinear(5, 9), (1, 5)),
        (PyramidLinear(5, 4, "naive-W1"), (1, 5)),
        (PyramidConv2d(5, 9, 4, 4), (1, 5, 4, 4)),
    ],
)
def test_one_token_is_batchnorms_own_error(layer, x):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(torch.randn(x))
    assert layer.eval()(torch.randn(x)).isfinite().all()


@pytest.mark.parametrize(
    "kind", ["hook", "pre-hook", "backward hook", "parametrization", "adapter", "hook on a part"]
)
def test_layers_that_are_not_plain_run_one_after_the_other(kind):
    """Whatever is attached to a layer inside a pyramid takes effect, in train and eval mode, and is not fused away."""
    first = PyramidLinear(5, 5, rectify="batchnorm")
    second = PyramidLinear(5, 5, rectify="rescale")
    joint = JointPyramid([first, second]).double()
    branch = second.branches[1]
    layer = branch[2]
    calls = []
    if kind == "parametrization":
        nn.utils.parametrizations.weight_norm(layer)
    elif kind == "adapter":
        branch[2] = nn.Sequential(layer, nn.Linear(5, 5).double())
    else:
        register = {
            "pre-hook": layer.register_forward_pre_hook,
            "backward hook": layer.register_full_backward_hook,
            "hook": layer.register_forward_hook,
            "hook on a part": first.register_forward_hook,
        }
        register[kind](lambda *_: calls.append(1))
    twin = copy.deepcopy(joint)
    for mode in (True, False):
        joint.train(mode)
        twin.train(mode)
        x = torch.randn(20, 5, dtype=torch.float64)
        apart = step(twin, by_branches(twin), x)
        calls.clear()
        same(step(joint, joint, x), apart)
        assert calls or kind in ("parametrization", "adapter")
        same(joint.buffers(), twin.buffers())
    if kind != "hook on a part":
        refused("merge or remove them first", joint.fuse)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Linear(5, 9), (4, 7, 5)), (nn.Conv2d(4, 8, 3, padding=1, groups=2), (3, 4, 6, 5))],
)
def test_the_papers_own_form_is_the_same(module, shape):
    """`form="branches"`: the same state, output, gradients and statistics, and the same fused layer."""
    plain = nn.Sequential(module).double()
    branched = iso.recast(plain, iso.LinearToPyramid(init="paper", form="branches"), "0")[0]
    closed = iso.recast(plain, iso.LinearToPyramid(init="paper", form="closed"), "0")[0]
    assert branched.form == "branches"
    closed.load_state_dict(branched.state_dict())
    branched.train()
    closed.train()
    x = torch.randn(shape, dtype=torch.float64)
    expected = step(closed, closed, x)
    same(step(branched, branched, x), expected)
    agree(branched, shape)


@torch.no_grad()
def test_the_branches_read_one_vector_too():
    layer = PyramidLinear(8, 4).eval()
    x = torch.randn(8)
    expected = layer(x)
    layer.form = "branches"
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("layout", ["P-W2S", "naive-W1"])
def test_a_single_token_has_no_variance(layout):
    with pytest.raises(ValueError, match="more than 1 value"):
        PyramidLinear(6, 4, layout)(torch.randn(6))
