"""Maps of timm's attention layers are those that the forward applies, fused or not."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import isomorph as iso
from isomorph.analysis.windows import WindowMembers
from refusals import refused

SMALL = {
    "vit_tiny_patch16_224": dict(img_size=32, depth=1, embed_dim=24, num_heads=3),
    "eva02_tiny_patch14_224": dict(img_size=28, depth=1, embed_dim=24, num_heads=3),
    "cait_xxs24_224": dict(img_size=32, depth=1, embed_dim=24, num_heads=3),
    "swin_tiny_patch4_window7_224": dict(
        img_size=32, window_size=4, embed_dim=24, depths=(2,), num_heads=(3,)
    ),
    "volo_d1_224": dict(img_size=64),
    "twins_svt_small": dict(
        img_size=32,
        embed_dims=(12, 12, 12, 12),
        num_heads=(3, 3, 3, 3),
        depths=(2, 1, 1, 1),
        wss=(4, 2, 1, 1),
    ),
    "pvt_v2_b0": {},
    "vit_dwee_patch16_reg1_gap_256": dict(img_size=32, depth=1, embed_dim=24, num_heads=3),
    "test_vit_relpos": dict(img_size=32, depth=1),
}


def built(name):
    model = timm.create_model(name, num_classes=3, **SMALL[name]).eval()
    size = SMALL[name].get("img_size", 64)
    return model, torch.randn(2, 3, *((size, size) if isinstance(size, int) else size))


def factors(model, x):
    """Both factors of every product with a softmax's shape behind it that the model's plain form really takes."""
    seen = []
    plain = torch.Tensor.__matmul__

    def noted(a, b):
        seen.append((a.detach().clone(), b.detach().clone()))
        return plain(a, b)

    torch.Tensor.__matmul__ = noted
    try:
        with torch.no_grad():
            model(x)
    finally:
        torch.Tensor.__matmul__ = plain
    return seen


def set_fused(model, fused):
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused


@pytest.mark.parametrize("name", SMALL)
def test_it_is_a_factor_of_a_product_in_the_plain_form_and_the_same_when_fused(name):
    model, x = built(name)
    set_fused(model, False)
    maps = iso.attention_maps(model, x)
    taken = factors(model, x)
    assert maps
    for layer, found in maps.items():
        same = []
        for a, _ in taken:
            if a.numel() == found.numel() and a.shape[-2:] == found.shape[-2:]:
                same.append(a)
        for _, b in taken:
            if b.numel() == found.numel() and b.mT.shape[-2:] == found.shape[-2:]:
                same.append(b.mT)
        like = []
        for a in same:
            for form in as_laid_out(a, found.shape):
                like.append(form)
        assert any(torch.allclose(a, found, atol=1e-6) for a in like), (
            f"{layer} {tuple(found.shape)}"
        )
    set_fused(model, True)
    for layer, found in iso.attention_maps(model, x).items():
        torch.testing.assert_close(found, maps[layer], atol=2e-5, rtol=1e-4)
    if name == "vit_dwee_patch16_reg1_gap_256":
        assert model.blocks[0].attn.fused_attn  # put back


def as_laid_out(a, shape):
    """A factor as it is, and with groups before or behind its heads, where that gives the shape of the maps."""
    forms = [a, *([a.flatten(0, 1), a.transpose(1, 2).flatten(0, 1)] if a.ndim == 5 else [])]
    return [form for form in forms if form.shape == shape]


class TestWhere:
    def model(self):
        return timm.create_model(
            "vit_tiny_patch16_224", depth=3, embed_dim=24, num_heads=3, img_size=32
        )

    def test_only_what_is_asked_for_is_formed(self):
        model = self.model()
        x = torch.randn(2, 3, 32, 32)
        everything = iso.attention_maps(model, x)
        one = iso.attention_maps(model, x, where="blocks.1.*")
        assert list(one) == ["blocks.1.attn"]
        torch.testing.assert_close(one["blocks.1.attn"], everything["blocks.1.attn"])
        assert list(iso.nonlocality(model, x, "blocks.[02].attn")) == [
            "blocks.0.attn",
            "blocks.2.attn",
        ]
        assert list(iso.analysis.attention_from(model, x, where="blocks.2.*")) == ["blocks.2.attn"]
        said = r"where='blocks\.7\.\*' matches no attention layer; nearest names: .*attn$"
        refused(said, iso.attention_maps, model, x, "blocks.7.*")


def test_padding_of_windows_is_no_query_and_no_key():
    windows = WindowMembers((1, 3), torch.tensor([[0, 1], [2, -1]]))
    distances, tokens = windows.distances(range(2, 4))  # those of the second image
    assert distances.tolist() == [[[0, 1], [1, 0]], [[0, 0], [0, 0]]]
    assert tokens == 3


class Attending(nn.Module):
    """Self-attention of one head by a kernel. Shape: x (B, N, C) -> (B, N, C)"""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        return self.kernel(x[:, None], x[:, None], x[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_kernel_that_hides_its_map_is_said_and_torch_s_own_is_read():
    x = torch.randn(2, 16, 8)
    hidden = nn.Sequential(Attending(flex_attention)).eval()
    said = "or let it attend by torch's softmax or scaled_dot_product_attention, .*flex_attention"
    refused(said, iso.attention_maps, hidden, x)
    read = nn.Sequential(Attending(F.scaled_dot_product_attention)).eval()
    assert [maps.shape for maps in iso.attention_maps(read, x).values()] == [(2, 1, 16, 16)]


def test_attention_without_a_map_is_refused_with_its_reason():
    x = torch.randn(1, 3, 32, 32)
    for name, said in (
        ("edgenext_xx_small", "CrossCovarianceAttn.*attends between channels"),
        ("mobilevitv2_050", "LinearSelfAttention.*softmax of its keys alone"),
        ("cifar_resnet20", "no attention layer with a known map"),
    ):
        refused(said, iso.attention_maps, timm.create_model(name), x)
    xcit = timm.create_model("xcit_nano_12_p8_224", img_size=32, depth=1, embed_dim=24, num_heads=3)
    # of the class
    assert {tuple(found.shape) for found in iso.attention_maps(xcit, x).values()} == {(1, 3, 1, 17)}
    refused(r"XCA.*channels", iso.attention_maps, xcit, x, "blocks.*")
