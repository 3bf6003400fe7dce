"""Entropy, rank, similarity of heads, logits, CKA and dials along a run, against closed forms; memory is bounded."""

import math
import re
import weakref
from contextlib import suppress

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.analysis.cka import cka_of_pairs, hsic
from isomorph.analysis.map_statistics import entropy
from isomorph.errors import DataWarning
from isomorph.operations import AppliedAttention
from refusals import refused


def vit(**kwargs):
    shape = dict(depth=2, embed_dim=24, num_heads=3, img_size=32, patch_size=8, num_classes=3)
    return timm.create_model("vit_tiny_patch16_224", **{**shape, **kwargs})


def uniform(model):
    for block in model.blocks:
        block.attn.qkv.weight.data[:48].zero_()
        block.attn.qkv.bias.data[:48].zero_()
    return model


@pytest.mark.parametrize(
    "inputs", [{"pixel_values": torch.zeros(1, 3, 32, 32)}, torch.zeros(1, 3), None]
)
def test_a_call_that_fails_leaves_no_hook(inputs):
    model = vit()
    for measure in (
        iso.attention_maps,
        iso.nonlocality,
        iso.analysis.attention_entropy,
        iso.analysis.head_similarity,
        iso.analysis.logit_stats,
        lambda model, x: iso.analysis.attention_from(model, x, position=(0.5, 0.5)),
        lambda model, x: iso.cka(model, model, [x]),
        lambda model, x: iso.verify(
            model, iso.recast(model, iso.AttentionToGPSA(grid_size=(4, 4))), x
        ),
        lambda model, x: iso.recalibrate(iso.recast(model, iso.LinearToPyramid()), [(x, x)]),
        lambda model, x: iso.fuse(model, x, affine=True),
        lambda model, x: iso.insert(model, iso.layers.MapAttention, after="blocks.0", example=x),
    ):
        with suppress(Exception):  # whatever it is
            measure(model, inputs)
        for module in model.modules():
            assert not (module._forward_hooks)
            assert not (module._forward_pre_hooks)


class TestSummaries:
    def test_uniform_attention(self):
        model = uniform(vit())
        x = torch.randn(3, 3, 32, 32)
        N = 17
        logits = {}
        shares = {}
        for name, stats in iso.analysis.logit_stats(model, x).items():
            logits[name] = stats.max_logit
            shares[name] = stats.max_attention
        entropy = iso.analysis.attention_entropy(model, x)
        for found, expected in ((entropy, math.log(N)), (logits, 0.0), (shares, 1 / N)):
            assert list(found) == ["blocks.0.attn", "blocks.1.attn"]
            torch.testing.assert_close(
                found["blocks.1.attn"], torch.full((3,), expected), atol=1e-4, rtol=1e-4
            )
        torch.testing.assert_close(
            iso.analysis.head_similarity(model, x)["blocks.0.attn"], torch.ones(3, 3)
        )

    def test_the_share_of_tokens_before_the_patches(self):
        x = torch.randn(3, 3, 32, 32)
        five = vit(reg_tokens=4)
        share = iso.analysis.prefix_attention(uniform(five), [(x, None)])["blocks.1.attn"]
        torch.testing.assert_close(share, torch.full((3,), 5 / 21))
        among = iso.nonlocality(five, x)["blocks.1.attn"] / (1 - share)
        alone = vit(class_token=False, global_pool="avg")
        torch.testing.assert_close(among, iso.nonlocality(uniform(alone), x)["blocks.1.attn"])
        refused("no class token or registers", iso.analysis.prefix_attention, alone, x)

    def test_the_grid_of_a_vit_of_ones_own_is_that_of_its_first_convolution(self):
        class OwnViT(nn.Module):
            def __init__(self):
                super().__init__()
                self.patches = nn.Conv2d(3, 24, 8, 8)
                self.token = nn.Parameter(torch.zeros(1, 1, 24))
                self.block = nn.MultiheadAttention(24, 3, batch_first=True)

            def forward(self, x):
                x = self.patches(x).flatten(2).transpose(1, 2)
                x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
                return self.block(x, x, x)[0]

        model = OwnViT().eval()
        x = torch.randn(2, 3, 24, 40)
        assert iso.analysis.attention_from(model, x)["block"].shape == (2, 3, 3, 5)
        model.patches = nn.Conv2d(3, 24, 9, 8, padding=4)
        refused("set the attribute grid_size", iso.nonlocality, model, x)
        model.block.grid_size = (3, 5)
        assert iso.analysis.attention_from(model, x)["block"].shape == (2, 3, 3, 5)

    def test_logits_of_a_t_cnn_are_those_of_its_content(self):
        """Padded keys count with a logit of 0; the softmax is the map with gates open."""
        layer = iso.layers.GPSA2d(6, 4, 3, stride=2, padding=1)
        layer.set_gating(gate=-50.0)
        model = nn.Sequential(layer)
        x = 3 * torch.randn(2, 6, 5, 7)
        found = iso.analysis.logit_stats(model, x)["0"]
        maps = layer.attention(x)
        torch.testing.assert_close(found.max_attention, maps.amax((2, 3)).mean(0))
        torch.testing.assert_close(found.entropy, torch.special.entr(maps).sum(-1).mean((0, 2)))
        q, k, _ = layer.content_scores(x)
        assert k.shape[2] == 7 * 9
        torch.testing.assert_close(found.max_logit, (q @ k.mT).amax((2, 3)).mean(0))

    @pytest.mark.parametrize(
        ("layer", "size"),
        [
            (iso.layers.DecomposedAttention(24, 4), (2, 3, 4, 24)),
            (iso.layers.RelativeAttention(24, 4, grid_size=(3, 4)), (2, 3, 4, 24)),
            (
                iso.layers.ViTRelativeAttention(24, 4, grid_size=(3, 4), prefix_tokens=1),
                (2, 13, 24),
            ),
            (iso.layers.PSA(24, 4, grid_size=(3, 4), prefix_tokens=1), (2, 13, 24)),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    def test_logits_of_a_layer_are_those_of_its_map(self, layer, size):
        x = 3 * torch.randn(size)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.2)
        stats = iso.analysis.logit_stats(nn.Sequential(layer), x)["0"]
        maps = layer.attention(x)
        torch.testing.assert_close(stats.max_attention, maps.amax((2, 3)).mean(0))
        torch.testing.assert_close(stats.entropy, torch.special.entr(maps).sum(-1).mean((0, 2)))

    def test_a_loader_is_the_mean_over_its_images(self):
        model = vit().double()
        x = torch.randn(10, 3, 32, 32)
        loader = [(x[:4], torch.zeros(4)), (x[4:8], torch.zeros(4)), (x[8:], torch.zeros(2))]
        assert entropy(torch.eye(9)).abs().max() == 0
        assert entropy(torch.tensor([1.5, -0.5])).isnan()
        for look in (iso.analysis.attention_entropy, iso.analysis.head_similarity, iso.nonlocality):
            whole = look(model, x)
            streamed = look(model, loader)
            torch.testing.assert_close(
                streamed["blocks.1.attn"], whole["blocks.1.attn"], atol=1e-5, rtol=1e-5
            )
        streamed = iso.analysis.logit_stats(model, loader)
        whole = iso.analysis.logit_stats(model, x)
        torch.testing.assert_close(
            streamed["blocks.0.attn"].entropy, whole["blocks.0.attn"].entropy
        )
        torch.testing.assert_close(
            iso.analysis.map_similarity(model, loader), iso.analysis.map_similarity(model, x)
        )
        refused("there is no batch", iso.analysis.attention_entropy, model, [])

    def test_masked_logits_have_an_entropy(self):
        from isomorph.analysis.attention_logits import summarise_scores

        bias = torch.zeros(1, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        stats = summarise_scores(
            AppliedAttention(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 3), bias)
        )
        expected = sum(math.log(n) for n in (1, 2, 3, 4)) / 4
        torch.testing.assert_close(stats[2], torch.full((2,), expected))


class Two(nn.Module):
    """Two layers whose features are known."""

    def __init__(self, first, second):
        super().__init__()
        self.a = nn.Linear(*first.shape[::-1], bias=False)
        self.b = nn.Linear(*second.shape[::-1], bias=False)
        self.a.weight.data = first
        self.b.weight.data = second

    def forward(self, x):
        return self.a(x), self.b(x)


def grams(x):
    """Gram matrices with zero diagonals of 300 unrelated layers. Shape: (B, features) -> (300, B, B)"""
    parts = (x - x.mean(0)).unflatten(1, (300, -1)).transpose(0, 1)
    return (parts @ parts.mT) * (1 - torch.eye(len(x), dtype=x.dtype))


def rotation(n):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]


class TestCKA:
    def test_rotated_features_are_the_same(self):
        turn = rotation(6)
        x = torch.randn(40, 6, dtype=torch.float64)
        a = Two(torch.eye(6).double(), 2 * turn)
        b = Two(turn.T, 3 * torch.eye(6).double())
        for found in (iso.cka(a, b, x, "?"), iso.cka(a, b, x.split(8), "?")):
            assert found.rows == ["a", "b"]
            assert found.columns == ["a", "b"]
            torch.testing.assert_close(found.matrix, torch.ones(2, 2).double())

    def test_the_layers_of_a_model_that_names_none_are_its_blocks(self):
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2)]
        x = torch.randn(16, 6)
        for items, rows in {
            (nn.Linear(6, 6), *blocks, nn.Linear(6, 6)): ["1", "2"],
            (nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)): ["0", "2"],
        }.items():
            model = nn.Sequential(*items)
            assert iso.cka(model, model, x).rows == rows

    def test_one_batch_is_the_formula(self):
        x = torch.randn(16, 5, dtype=torch.float64)
        y = torch.randn(16, 7, dtype=torch.float64)

        def slow(k, m):
            n = len(k)
            k = k - torch.diag(k.diag())
            m = m - torch.diag(m.diag())
            one = torch.ones(n, 1, dtype=k.dtype)
            middle = (one.T @ k @ one) * (one.T @ m @ one) / ((n - 1) * (n - 2))
            last = 2 / (n - 2) * (one.T @ k @ m @ one)
            total = (k @ m).trace() + middle - last
            return total.item() / (n * (n - 3))

        k = x @ x.T
        m = y @ y.T
        both = torch.stack([gram.clone().fill_diagonal_(0) for gram in (k, m)])
        expected = [[slow(k, k), slow(k, m)], [slow(m, k), slow(m, m)]]
        torch.testing.assert_close(hsic(both, both), torch.tensor(expected, dtype=torch.float64))
        cross = torch.cat([x, y], 1)
        model = Two(torch.eye(12).double()[:5], torch.eye(12).double()[5:])
        found = iso.cka(model, model, cross, "?").matrix
        lengths = math.sqrt(slow(k, k) * slow(m, m))
        assert found[0, 1].item() == pytest.approx(slow(k, m) / lengths)
        torch.testing.assert_close(found.diagonal(), torch.ones(2).double())

    def test_unrelated_features_are_near_0_where_the_biased_form_is_not(self):
        cross = torch.randn(400, 60, dtype=torch.float64)
        model = Two(torch.eye(60).double()[:30], torch.eye(60).double()[30:])
        found = iso.cka(model, model, cross.split(20), "?").matrix
        assert abs(found[0, 1]) < 0.05
        assert iso.analysis.linear_cka(cross[:20, :30], cross[:20, 30:]) > 0.4

    @pytest.mark.parametrize("sizes", [(4,), (8,), (15,), (4, 4), (9, 9, 9), (10, 2)])
    def test_too_few_images_are_said_with_the_noise_that_they_leave(self, sizes):
        """The number in the message is the standard deviation of 300 pairs of unrelated layers."""
        cross = [torch.randn(size, 300 * 40, dtype=torch.float64) for size in sizes]
        count = sum(size for size in sizes if size >= 4)
        scores = [hsic(grams(x), grams(x)) for x in cross if len(x) >= 4]
        own = sum(score.diagonal() for score in scores)
        values = sum(scores) / (own[:, None] * own).sqrt()
        pairs = values[torch.triu(torch.ones_like(values), 1) > 0]
        model = Two(torch.eye(60).double()[:30], torch.eye(60).double()[30:])
        with pytest.warns(DataWarning, match=rf"CKA of {count} images scatters") as found:
            iso.cka(model, model, [x[:, :60] for x in cross], "?")
        said = float(re.search(r"0 \+- (\S+);", str(found[0].message))[1])
        assert said == pytest.approx(pairs[pairs.isfinite()].std().item(), rel=0.1)

    def test_a_batch_for_each_model(self):
        x = torch.randn(48, 6, dtype=torch.float64)
        shift = torch.randn(6, dtype=torch.float64)
        a = Two(rotation(6)[:3], rotation(6)[3:])
        b = Two(rotation(6), rotation(6)[:2])
        found = cka_of_pairs(a, b, [(part, 2 * part + shift) for part in x.split(8)], "?").matrix
        torch.testing.assert_close(found, iso.cka(a, b, x.split(8), "?").matrix)
        refused("not batches of 8 and 7", lambda: cka_of_pairs(a, b, [(x[:8], x[:7])], "?"))

    def test_what_cannot_be_known_is_said(self):
        """Features of a tiny batch may tell nothing of similarity, and features that are always the same never do."""
        model = Two(rotation(6)[:5], rotation(6)[1:])
        x = torch.randn(8, 6, dtype=torch.float64)
        for tiny in (x[:1].expand(4, -1), torch.zeros(5, 6).double()):
            refused(
                "the CKA of a, b is unknown .* give larger batches",
                iso.cka,
                model,
                model,
                tiny,
                "?",
            )
        half = Two(rotation(6), torch.zeros(2, 6).double())
        full = Two(rotation(6), rotation(6))
        with pytest.warns(DataWarning, match=r"CKA of b is unknown \(NaN\): in batches of 8"):
            found = iso.cka(half, full, x, "?").matrix
        assert found.isnan().tolist() == [[False, False], [True, True]]
        with pytest.warns(DataWarning, match="the same for all samples"):
            assert iso.analysis.linear_cka(x, torch.ones(8, 2)).isnan()
        refused("at least 2 samples, not 1", iso.analysis.linear_cka, x[:1], x[:1])


def test_no_more_than_a_layers_pieces_exist(monkeypatch):
    """Largest number of map entries alive at any time, counted when a piece is made; 12 blocks."""
    alive = weakref.WeakValueDictionary()
    peaks = []
    formed = AppliedAttention.map

    def counted(self):
        maps = formed(self)
        alive[id(maps)] = maps
        peaks.append(sum(one.numel() for one in alive.values()))
        return maps

    monkeypatch.setattr(AppliedAttention, "map", counted)
    model = vit(depth=12, img_size=192, patch_size=8)
    N = 24 * 24 + 1
    x = torch.randn(1, 3, 192, 192)
    for look in (iso.nonlocality, iso.analysis.attention_entropy, iso.analysis.head_similarity):
        peaks.clear()
        look(model, x)
        assert len(peaks) == 12
        assert max(peaks) <= 2 * 3 * N * N  # the piece that is read, and the one that is made
