"""Relative attention equals the paper's formula written as loops, on any rectangle."""

import pytest
import torch

import references
from isomorph.layers import PostRelativeAttention, RelativeAttention, ViTRelativeAttention
from isomorph.layers.relative import attention as relative_attention
from isomorph.layers.relative.attention import attend_with_bias, resize_table
from torch_citizens import TorchCitizens

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
    layer = build(kind, **wider)
    x = torch.randn(2, *grid, 12, dtype=torch.float64, requires_grad=True)
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


def test_prefix_tokens_have_a_bias_each_way_and_one_among_themselves():
    layer = build(ViTRelativeAttention, prefix_tokens=2, prefix_bias=True)
    bias = layer.expand_bias((4, 3), torch.float64)
    to_position, from_position, among = layer.prefix_bias
    torch.testing.assert_close(bias[:, 2:, 2:], references.relative_scores(layer, 4, 3))
    assert torch.equal(bias[:, :2, 2:], to_position[:, None, None].expand(-1, 2, 12))
    assert torch.equal(bias[:, 2:, :2], from_position[:, None, None].expand(-1, 12, 2))
    assert torch.equal(bias[:, :2, :2], among[:, None, None].expand(-1, 2, 2))


def test_a_table_alone_is_a_convolution():
    """Without content and softmax the layer shifts: a one at offset (1, -1) brings the place below, left of each."""
    layer = build(PostRelativeAttention)
    with torch.no_grad():
        layer.relative_bias.zero_()
        layer.relative_bias[:, 3 - 1, 2 + 1] = (
            1.0  # query - key = (-1, 1): the key lies one below, one to the left
        )
        values = torch.randn(1, 3, 12, 4, dtype=torch.float64)
        bias = layer.position_bias((4, 3), torch.float64)
        moved = relative_attention.convolve_values(bias, values).unflatten(2, (4, 3))
    grid = values.unflatten(2, (4, 3))
    torch.testing.assert_close(moved[:, :, :-1, 1:], grid[:, :, 1:, :-1])
    assert not moved[:, :, -1].any()
    assert not moved[:, :, :, 0].any()


def test_resizing_a_table_keeps_its_middle_and_constants():
    table = build().relative_bias.detach()
    larger = resize_table(table, (9, 8))
    assert larger.shape == (3, 17, 15)
    torch.testing.assert_close(larger[:, 8, 7], table[:, 3, 2])
    torch.testing.assert_close(
        resize_table(torch.full_like(table, 2.0), (2, 9)).unique(), table.new_tensor([2.0])
    )
    assert resize_table(table, (4, 3)) is table
    layer = build().eval()
    layer.set_grid_size((9, 8))
    assert layer.grid_size == (9, 8)
    assert torch.equal(layer.relative_bias, larger)


def test_the_kernel_of_other_devices_is_the_same():
    """`attend_with_bias` forms the map where a bias is trained; elsewhere it is scaled_dot_product_attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 12, 16, dtype=torch.float64).unbind(0)
    bias = torch.randn(2, 12, 12, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(attend_with_bias(bias, 0.0, 16**-0.5, q, k, v), expected)


@pytest.mark.parametrize("kind", [RelativeAttention, PostRelativeAttention])
class TestEverywhere(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self, kind):
        self.layer = build(kind, dtype=torch.float32)
        self.x = torch.randn(2, 5, 4, 12)

    def test_compiles_and_exports_for_any_batch(self):
        compiled = torch.compile(self.layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(self.x), self.layer(self.x), rtol=1e-4, atol=1e-4)
        self.layer.eval()
        with torch.no_grad():
            expected = self.layer(self.x)  # a bias is kept, which the graph must not contain
            sizes = ({0: torch.export.Dim("b", min=1, max=8)},)
            program = torch.export.export(self.layer, (self.x,), dynamic_shapes=sizes)
        torch.testing.assert_close(program.module()(self.x[:1]), expected[:1], rtol=1e-5, atol=1e-5)
