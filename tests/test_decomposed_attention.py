"""Attention with positions by row and column equals its slow form; padding is no part of a pyramid's statistics."""

import copy

import pytest
import torch
from timm.layers import Attention

import isomorph as iso
import references
from isomorph.layers import DecomposedAttention
from isomorph.layers.relative.decomposed import offset_vectors
from torch_citizens import TorchCitizens


def layer(window=None, grid_size=None, **kwargs):
    torch.manual_seed(1)
    made = DecomposedAttention(
        12, 3, window=window, grid_size=grid_size, qkv_bias=True, **kwargs
    ).double()
    for table in (made.rel_pos_h, made.rel_pos_w):
        torch.nn.init.normal_(table)
    return made


@pytest.mark.parametrize(
    ("window", "size"),
    [(None, (3, 4)), ((2, 3), (4, 6)), ((2, 3), (3, 4)), ((4, 4), (3, 2))],
    ids=str,
)
def test_it_equals_its_slow_form_with_gradients(window, size):
    made = layer(window, window or size)
    x = torch.randn(2, *size, 12, dtype=torch.float64, requires_grad=True)
    expected = references.decomposed_attention(made, x)
    y = made(x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    inputs = [x, *made.parameters()]
    ours = torch.autograd.grad((y * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(ours, theirs)


def test_tables_of_zeros_are_plain_attention():
    plain = Attention(12, 3, qkv_bias=True).eval()
    made = DecomposedAttention.from_attention(plain, None, (3, 4))
    x = torch.randn(2, 3, 4, 12)
    torch.testing.assert_close(made(x).flatten(1, 2), plain(x.flatten(1, 2)))


def test_the_map_is_what_forward_applies():
    made = layer((2, 3))
    x = torch.randn(2, 3, 4, 12, dtype=torch.float64)
    maps = made.attention(x)
    assert maps.shape == (2 * 4, 3, 6, 6)
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))
    _, _, v = made.queries_keys_values_in_windows(x)
    torch.testing.assert_close(made.project_windows(maps @ v, x), made(x))


def test_tables_are_resized_to_other_maps():
    table = torch.arange(5.0)[:, None]  # offsets -2 to 2
    assert offset_vectors(table, 3)[0, 2].item() == 0  # the query is two before the key
    longer = offset_vectors(table, 6)
    assert longer.shape == (6, 6, 1)
    assert torch.allclose(longer.diagonal(), torch.tensor(2.0))  # offset 0 stays in the middle
    assert layer(None, (3, 4))(torch.randn(1, 5, 2, 12, dtype=torch.float64)).shape == (1, 5, 2, 12)


def test_padding_is_no_part_of_the_statistics_of_pyramids():
    attention = DecomposedAttention(12, 3, window=(4, 4), qkv_bias=True)
    wide = iso.recast(attention, iso.LinearToPyramid(), where="qkv")
    x = torch.randn(8, 5, 5, 12) + 3  # padded to 8 x 8: zeros would be 61 % of the tokens
    one_token_more = torch.cat([x.flatten(0, 2), torch.zeros(1, 12)])
    expected = copy.deepcopy(wide.qkv)
    expected(one_token_more)
    wide(x)
    for name, buffer in wide.qkv.named_buffers():
        torch.testing.assert_close(buffer, expected.get_buffer(name))
    wide.eval()
    torch.testing.assert_close(iso.fuse(wide)(x), wide(x), atol=1e-4, rtol=1e-4)


class TestEverywhere(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self):
        self.layer = layer((2, 3)).float()
        self.x = torch.randn(2, 3, 4, 12)

    @torch.no_grad()
    def test_compiles_and_exports(self):
        expected = self.layer(self.x)
        torch.testing.assert_close(
            torch.compile(self.layer, backend="eager", fullgraph=True)(self.x), expected
        )
        torch.testing.assert_close(
            torch.export.export(self.layer, (self.x,)).module()(self.x), expected
        )


@pytest.mark.parametrize(
    ("options", "shape", "more", "message"),
    [
        (dict(window=(0, 2)), (1, 2, 2, 12), {}, "at least 1"),
        ({}, (1, 4, 12), {}, "feature map"),
        ({}, (1, 2, 2, 12), dict(is_causal=True), "attn_mask"),
    ],
)
def test_errors(options, shape, more, message):
    with pytest.raises(ValueError, match=message):
        DecomposedAttention(12, 3, **options)(torch.zeros(shape), **more)
