"""AttentionToRelative: a ViT's attention with a table of relative positions, exact while the table is zero."""

import copy

import timm
import torch
from timm.layers import Attention
from torch import nn

import isomorph as iso
from isomorph.layers import ViTRelativeAttention

RULE, WHERE = iso.AttentionToRelative(), "blocks.*.attn"


def vit(**kwargs):
    torch.manual_seed(0)
    arguments = dict(img_size=(32, 48), patch_size=8, depth=2, embed_dim=48, num_heads=4, num_classes=3)
    model = timm.create_model("vit_tiny_patch16_224", **arguments | kwargs).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def with_tables(model):
    """Draw every table at random."""
    for module in model.modules():
        if isinstance(module, ViTRelativeAttention):
            nn.init.normal_(module.relative_bias)
    return model


def test_the_map_is_that_of_the_slow_formula():
    layer = Attention(12, 3, qkv_bias=True).double().eval()
    new = iso.recast(nn.Sequential(layer), iso.AttentionToRelative(grid_size=(3, 4), prefix_tokens=2), "0")
    relative = with_tables(new)[0]
    x = torch.randn(2, 14, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / 2
    table = relative.relative_bias  # (nh, 5, 7): offsets -2..2 and -3..3
    for i, j in ((i, j) for i in range(12) for j in range(12)):
        rows, columns = i // 4 - j // 4, i % 4 - j % 4
        scores[:, :, 2 + i, 2 + j] += table[:, rows + 2, columns + 3]
    maps = scores.softmax(-1)
    torch.testing.assert_close(relative.attention(x), maps)
    torch.testing.assert_close(relative(x), layer.proj((maps @ v).transpose(1, 2).flatten(2)))


def test_the_table_follows_the_image(tmp_path):
    new = with_tables(iso.recast(vit(dynamic_img_size=True), RULE, WHERE))
    small, large = torch.randn(1, 3, 32, 48), torch.randn(1, 3, 64, 40)
    first = new(small)
    assert new(large).shape == (1, 3)
    torch.testing.assert_close(new(small), first)
    assert iso.attention_maps(new, large)["blocks.1.attn"].shape == (1, 4, 41, 41)
    iso.save(new, tmp_path / "relative.safetensors")
    loaded = iso.load(tmp_path / "relative.safetensors").eval()
    torch.testing.assert_close(loaded(large), new(large))
    assert loaded.no_weight_decay() >= {"pos_embed"}
    assert "relative_bias" in loaded.blocks[0].attn.no_weight_decay()


def test_it_compiles_exports_and_recomputes_blocks():
    new, x = with_tables(iso.recast(vit(), RULE, WHERE)), torch.randn(2, 3, 32, 48)
    compiled = torch.compile(copy.deepcopy(new), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), new(x))
    torch.testing.assert_close(torch.export.export(new, (x,)).module()(x), new(x))
    grads = []
    for checkpointing in (False, True):
        new.set_grad_checkpointing(checkpointing)
        new.zero_grad()
        new.train()(x).sum().backward()
        grads.append(new.blocks[0].attn.relative_bias.grad.clone())
    torch.testing.assert_close(*grads)
