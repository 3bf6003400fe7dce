"""Relative attention equals the paper's formula written as loops, on any rectangle."""

import pytest
import torch

import references
from isomorph.layers import PostRelativeAttention, RelativeAttention
from isomorph.layers.relative import attention as relative_attention
from isomorph.layers.relative.attention import attend_flex, attend_with_bias, expand_table, resize_table

GRIDS = [(4, 3), (1, 5), (6, 6), (3, 2)]
"""As the table, one row, larger, smaller."""


def build(kind=RelativeAttention, dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    layer = kind(12, 3, grid_size=(4, 3), qkv_bias=True, **kwargs).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", [RelativeAttention, PostRelativeAttention])
@pytest.mark.parametrize("wider", [{}, dict(dim_out=18, attn_head_dim=6)])
def test_equals_the_paper_with_gradients(kind, grid, wider):
    layer, x = build(kind, **wider), torch.randn(2, *grid, 12, dtype=torch.float64, requires_grad=True)
    expected = references.relative_attention(layer, x, post=kind is PostRelativeAttention)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    actual = layer(x)
    found = torch.autograd.grad(actual.square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with torch.no_grad():  # the kept bias
        torch.testing.assert_close(layer.eval()(x), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [RelativeAttention, PostRelativeAttention])
def test_hands_out_its_map(kind):
    layer, x = build(kind), torch.randn(2, 5, 4, 12, dtype=torch.float64)
    maps = layer.attention(x)
    v = layer.queries_keys_values(x.flatten(1, 2))[2]
    torch.testing.assert_close(layer.project_output(maps @ v, x.flatten(1, 2)).unflatten(1, (5, 4)), layer(x))
    if kind is RelativeAttention:
        torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 20, dtype=torch.float64))


def test_a_table_alone_is_a_convolution():
    """Without content and softmax the layer shifts: a one at offset (1, -1) brings the place below, left of each."""
    layer = build(PostRelativeAttention)
    with torch.no_grad():
        layer.relative_bias.zero_()
        layer.relative_bias[:, 3 - 1, 2 + 1] = 1.0  # query - key = (-1, 1): the key lies one below, one to the left
        values = torch.randn(1, 3, 12, 4, dtype=torch.float64)
        bias = layer.position_bias((4, 3), torch.float64)
        moved = relative_attention.convolve_values(bias, values).unflatten(2, (4, 3))
    grid = values.unflatten(2, (4, 3))
    torch.testing.assert_close(moved[:, :, :-1, 1:], grid[:, :, 1:, :-1])
    assert not moved[:, :, -1].any()
    assert not moved[:, :, :, 0].any()


class TestTable:
    def test_resizing_keeps_the_middle_and_constants(self):
        table = build().relative_bias.detach()
        larger = resize_table(table, (9, 8))
        assert larger.shape == (3, 17, 15)
        torch.testing.assert_close(larger[:, 8, 7], table[:, 3, 2])
        torch.testing.assert_close(resize_table(torch.full_like(table, 2.0), (2, 9)).unique(), table.new_tensor([2.0]))
        assert resize_table(table, (4, 3)) is table

    def test_set_grid_size_is_what_a_call_does(self):
        layer, x = build().eval(), torch.randn(1, 7, 5, 12, dtype=torch.float64)
        with torch.no_grad():
            expected = layer(x)
            layer.set_grid_size((7, 5))
            assert layer.grid_size == (7, 5)
            torch.testing.assert_close(layer(x), expected)

    def test_half_precision_is_resized_in_float32(self):
        table = build(dtype=torch.float32).relative_bias.detach()
        half = resize_table(table.bfloat16(), (7, 7))
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half, resize_table(table.bfloat16().float(), (7, 7)).bfloat16())


def test_transforms_of_functions_keep_nothing():
    layer = build().eval().requires_grad_(False)
    x = torch.randn(1, 4, 3, 12, dtype=torch.float64)
    layer(x)
    table = layer.relative_bias.detach()

    def call(bias):
        return torch.func.functional_call(layer, {"relative_bias": bias}, x)

    tables = torch.stack([table, table + torch.randn_like(table)])
    both = torch.func.vmap(call)(tables)
    for found, one in zip(both, tables, strict=True):
        torch.testing.assert_close(found, call(one))
    direction = torch.randn_like(table)
    _, slope = torch.func.jvp(call, (table,), (direction,))
    step = 1e-6
    torch.testing.assert_close(slope, (call(table + step * direction) - call(table)) / step, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer(x), references.relative_attention(layer, x))


def test_flex_attention_is_for_large_maps_in_compiled_inference(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        assert relative_attention.uses_flex_attention(1024, 0.0)
        assert not relative_attention.uses_flex_attention(196, 0.0)
        assert not relative_attention.uses_flex_attention(1024, 0.1)
    assert not relative_attention.uses_flex_attention(1024, 0.0)  # gradients are wanted
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with torch.no_grad():
        assert not relative_attention.uses_flex_attention(1024, 0.0)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("grid", [(4, 3), (5, 7)])
def test_flex_attention_is_the_same(grid):
    """The form for compiled GPU code, run here as plain code."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, grid[0] * grid[1], 16).unbind(0)
    table = torch.randn(2, 2 * grid[0] - 1, 2 * grid[1] - 1)
    with torch.no_grad():
        torch.testing.assert_close(
            attend_flex(table, grid, q, k, v),
            attend_with_bias(expand_table(table, grid), 0.0, q, k, v),
            rtol=1e-5,
            atol=1e-5,
        )


def test_the_kernel_of_other_devices_is_the_same():
    """`attend_with_bias` forms the map where a bias is trained; elsewhere it is scaled_dot_product_attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 12, 16, dtype=torch.float64).unbind(0)
    bias = torch.randn(2, 12, 12, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(attend_with_bias(bias, 0.0, q, k, v), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((12, 5), "5 heads do not divide 12"), ((12, 3, (0, 4)), "grid_size .* at least 1"), ((12, 0), "0 heads")],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelativeAttention(*arguments)


def test_tokens_are_no_map():
    with pytest.raises(ValueError, match="give a feature map"):
        build()(torch.zeros(1, 12, 12, dtype=torch.float64))


def test_dropout_drops_in_training_only():
    layer, x = build(attn_drop=0.5), torch.randn(1, 4, 3, 12, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer.eval()(x), references.relative_attention(layer, x))


def test_options_of_timms_attention_are_kept():
    layer = build(qk_norm=True, gated=True, scale_norm=True, norm_layer=torch.nn.LayerNorm)
    layer.eval()
    x = torch.randn(2, 4, 3, 12, dtype=torch.float64)
    tokens = x.flatten(1, 2)
    maps, v = layer.attention(x), layer.queries_keys_values(tokens)[2]
    torch.testing.assert_close(layer(x), layer.project_output(maps @ v, tokens).unflatten(1, (4, 3)))


class TestPlaces:
    """Autocast, compilation, export, meta."""

    def test_autocast(self):
        layer, x = build(dtype=torch.float32).eval(), torch.randn(2, 4, 3, 12)
        with torch.no_grad():
            expected = layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                actual = layer(x)
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, rtol=0.1, atol=0.1)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [RelativeAttention, PostRelativeAttention])
    def test_compiles_without_breaks(self, kind):
        layer, x = build(kind, dtype=torch.float32), torch.randn(2, 5, 4, 12)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)
        compiled(x).sum().backward()
        assert layer.relative_bias.grad is not None

    def test_exports_without_what_is_kept(self):
        layer, x = build(dtype=torch.float32).eval(), torch.randn(2, 4, 3, 12)
        with torch.no_grad():
            expected = layer(x)
            program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("b", min=1, max=8)},))
        torch.testing.assert_close(program.module()(x), expected, rtol=1e-5, atol=1e-5)
        assert program.module()(x[:1]).shape == (1, 4, 3, 12)

    def test_meta(self):
        with torch.device("meta"):
            layer = RelativeAttention(12, 3, grid_size=(4, 3)).eval()
            with torch.no_grad():
                assert layer(torch.empty(2, 4, 3, 12)).shape == (2, 4, 3, 12)
