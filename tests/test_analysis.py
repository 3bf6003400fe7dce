"""Maps, gates and spans by layer name."""

import itertools
import math

import pytest
import timm
import torch

import isomorph as iso


def test_maps_are_those_of_the_inputs_the_layers_really_see():
    model = timm.create_model("t_cifar_resnet20").train()
    batch = torch.randn(2, 3, 24, 20)
    maps = iso.attention_maps(model, batch)
    assert len(maps) == 6
    assert maps["layer3.0.conv1"].shape == (2, 9, 30, 14 * 12)
    assert maps["layer3.2.conv2"].shape == (2, 9, 30, 8 * 7)
    assert model.training
    model.eval()
    seen = {}
    model.layer3[1].conv1.register_forward_pre_hook(lambda layer, args: seen.update(x=args[0]))
    model(batch)
    torch.testing.assert_close(maps["layer3.1.conv1"], model.layer3[1].conv1.attention(seen["x"]))


def test_gates_and_spans_are_the_dials():
    model = timm.create_model("t_cifar_resnet20", locality=4.0, gate=0.0)
    for gate in iso.gates(model).values():
        assert torch.allclose(gate, torch.full((9,), 0.5))
    for span in iso.analysis.attention_spans(model).values():
        assert torch.allclose(span, torch.full((9,), 0.25))
    assert iso.analysis.centres(model)["layer3.0.conv1"].tolist() == [
        [y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)
    ]
    layer = torch.nn.Sequential(iso.layers.GPSA(36, 9, (4, 5)))
    layer[0].set_gating(locality=2.0)
    torch.testing.assert_close(iso.analysis.attention_spans(layer)["0"], torch.full((9,), 0.5))
    torch.testing.assert_close(iso.gates(layer)["0"], torch.full((9,), 0.7310586))
    assert iso.attention_maps(layer, torch.randn(1, 20, 36))["0"].shape == (1, 9, 20, 20)


def test_looks_are_pictures_on_the_layers_own_map():
    model = timm.create_model("t_cifar_resnet20", init="exact")
    pictures = iso.analysis.attention_from(model, torch.randn(1, 3, 40, 24), (0.5, 0.5))
    assert pictures["layer3.0.conv1"].shape == (1, 9, 20, 12)
    assert pictures["layer3.2.conv2"].shape == (1, 9, 10, 6)
    peaks = pictures["layer3.2.conv2"][0].flatten(1).argmax(-1)
    places = [divmod(int(peak), 6) for peak in peaks]
    assert places == list(itertools.product((4, 5, 6), (2, 3, 4)))
    # without the class token
    tokens = timm.create_model("deit_tiny_patch16_224", img_size=(64, 96), depth=2)
    model = iso.recast(tokens, iso.AttentionToGPSA(locality=9.0, gate=30.0), "blocks.0.attn")
    pictures = iso.analysis.attention_from(model, torch.randn(1, 3, 64, 96), (0.5, 0.5))
    assert pictures["blocks.0.attn"].shape == pictures["blocks.1.attn"].shape == (1, 3, 4, 6)
    peaks = pictures["blocks.0.attn"][0].flatten(1).argmax(-1)
    assert [(int(p) // 6, int(p) % 6) for p in peaks] == [(2, 2), (2, 3), (2, 4)]


def grid_distances(H, W):
    cells = []
    for r in range(H):
        for c in range(W):
            cells.append((r, c))
    return torch.tensor(
        [[((a - c) ** 2 + (b - d) ** 2) ** 0.5 for c, d in cells] for a, b in cells]
    )


class TestNonlocality:
    """ConViT eq. 8 against closed forms, and against the maps it is made of."""

    def convit(self, **kwargs):
        shape = dict(
            embed_dim=36,
            num_heads=9,
            depth=3,
            local_up_to_layer=2,
            num_classes=5,
            patch_size=8,
            img_size=48,
        )
        return timm.create_model("convit_ti", **{**shape, **kwargs}).train()

    def test_uniform_attention_is_the_mean_distance(self):
        model = self.convit(gate=-60.0)
        for block in model.blocks:
            weight = (
                block.attn.qk.weight
                if isinstance(block.attn, iso.layers.GPSA)
                else block.attn.qkv.weight[:72]
            )
            weight.data.zero_()
        found = iso.nonlocality(model, torch.randn(2, 3, 48, 32))
        mean = grid_distances(6, 4).mean()
        for i in range(2):
            torch.testing.assert_close(found[f"blocks.{i}.attn"], mean.expand(9))
        # the class token takes its share
        torch.testing.assert_close(found["blocks.2.attn"], mean.expand(9) * 24 / 25)
        assert model.training

    def test_a_head_on_its_tap_is_as_far_as_its_centre(self):
        found = iso.nonlocality(
            self.convit(gate=60.0, locality_strength=60.0), torch.randn(1, 3, 80, 80)
        )
        edge = (
            10 * 10
        )  # at the border the nearest key inside is taken: a straight tap falls back on the query itself
        straight = 9 * 10 / edge
        corner = (9 * 9 * 2**0.5 + 2 * 9 * 1) / edge
        expected = torch.tensor(
            [corner, straight, corner, straight, 0, straight, corner, straight, corner]
        )
        torch.testing.assert_close(found["blocks.0.attn"], expected, atol=1e-4, rtol=0)

    def test_it_is_the_sum_over_the_maps_of_every_kind_of_layer(self):
        batch = torch.randn(11, 3, 48, 48).double()
        for model in (self.convit().double(), timm.create_model("t_cifar_resnet20").double()):
            maps = iso.attention_maps(model, batch)
            found = iso.nonlocality(model, batch)
            assert set(maps) == set(found)
        torch.testing.assert_close(
            found["layer3.1.conv2"], by_hand(maps["layer3.1.conv2"], 12, 1, 1)
        )
        torch.testing.assert_close(
            found["layer3.0.conv1"], by_hand(maps["layer3.0.conv1"], 12, 1, 2)
        )

    def test_plain_vits_have_it_too(self):
        vit = timm.create_model(
            "vit_tiny_patch16_224", depth=2, qk_norm=True, img_size=(64, 96), num_classes=3
        )
        batch = torch.randn(2, 3, 64, 96)
        found = iso.nonlocality(vit, batch)
        maps = iso.attention_maps(vit, batch)
        expected = (maps["blocks.1.attn"][:, :, 1:, 1:] * grid_distances(4, 6)).sum(-1).mean((0, 2))
        torch.testing.assert_close(found["blocks.1.attn"], expected)


def by_hand(maps, queries, padding, stride):
    """Mean distance from each query of a padded, strided window to its keys. Shape: maps (B, nh, Nq, Nk) -> (nh,)"""
    keys = round(maps.shape[-1] ** 0.5)
    q = []
    for r in range(queries):
        for c in range(queries):
            q.append((1 + stride * r, 1 + stride * c))
    k = []
    for r in range(keys):
        for c in range(keys):
            k.append((r, c))
    rows = []
    for a, b in q:
        rows.append([math.hypot(a - c, b - d) for c, d in k])
    distances = torch.tensor(rows)
    return (maps * distances).sum(-1).mean((0, 2))


class TestEvolution:
    def test_f_k_is_the_formula(self):
        model = timm.create_model(
            "vit_tiny_patch16_224", depth=3, img_size=32, embed_dim=24, num_heads=3
        ).eval()
        batches = [torch.randn(6, 3, 32, 32) for _ in range(3)]
        found = iso.analysis.feature_evolution(model, batches)
        assert list(found) == ["blocks.0", "blocks.1", "blocks.2"]
        expected = 0
        for batch in batches:
            x = model.patch_drop(model._pos_embed(model.patch_embed(batch)))
            outs = []
            for block in model.blocks:
                x = block(x)
                outs.append(x.flatten(1))
            expected += (
                iso.analysis.linear_cka(outs[1], outs[2])
                / iso.analysis.linear_cka(outs[0], outs[2])
                / 3
            )
        assert found["blocks.1"] == pytest.approx(expected.item(), rel=1e-5)
        assert found["blocks.0"] == pytest.approx(1.0)

    def test_features_are_pooled_over_positions(self):
        maps, tokens, vectors = torch.randn(2, 5, 3, 4), torch.randn(2, 12, 5), torch.randn(2, 5)
        torch.testing.assert_close(iso.analysis.pool_features(maps), maps.mean((2, 3)))
        torch.testing.assert_close(iso.analysis.pool_features(tokens), tokens.mean(1))
        assert torch.equal(iso.analysis.pool_features(vectors), vectors)

    def test_cka_by_either_route(self):
        """More features than samples, or fewer: the same number."""
        x = torch.randn(5, 9, dtype=torch.float64)
        y = torch.randn(5, 3, dtype=torch.float64)
        a = x - x.mean(0)
        b = y - y.mean(0)
        expected = (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
        torch.testing.assert_close(iso.analysis.linear_cka(x, y), expected)
        torch.testing.assert_close(iso.analysis.linear_cka(y, x), expected)
        wide = torch.randn(50, 4, dtype=torch.float64)
        torch.testing.assert_close(
            iso.analysis.linear_cka(wide, wide), torch.tensor(1.0, dtype=torch.float64)
        )

    def test_maps_of_blocks_and_heads(self):
        model = timm.create_model("deit_tiny_patch16_224", depth=3, img_size=64)
        x = torch.randn(2, 3, 64, 64)
        a, b, _ = iso.attention_maps(model, x).values()

        def correlation(a, b):
            a = a - a.mean(-1, keepdim=True)
            b = b - b.mean(-1, keepdim=True)
            return torch.nn.functional.cosine_similarity(a, b, dim=-1).mean()

        torch.testing.assert_close(
            iso.analysis.map_similarity(model, x)[0, 1], correlation(a, b), atol=1e-4, rtol=1e-4
        )
        found = iso.analysis.head_similarity(model, x)["blocks.0.attn"]
        torch.testing.assert_close(found[0, 2], correlation(a[:, 0], a[:, 2]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.diagonal(), torch.ones(3))
        wide = iso.recast(model, iso.AttentionToRefined(reduce=False), "blocks.1.attn")
        assert iso.analysis.map_similarity(wide, x).isnan().sum() == 4
