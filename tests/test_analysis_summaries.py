"""Entropy, rank, similarity of heads, logits, CKA and dials along a run, against closed forms; memory is bounded."""

import copy
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
    return timm.create_model("vit_tiny_patch16_224", **shape | kwargs)


def uniform(model):
    for block in model.blocks:
        qkv = block.attn.qkv
        qkv.weight.data[:48].zero_()
        qkv.bias.data[:48].zero_()
    return model


def attention_from(model, x):
    iso.analysis.attention_from(model, x, position=(0.5, 0.5))


def cka(model, x):
    iso.cka(model, model, [x])


def verify(model, x):
    gated = iso.recast(model, iso.AttentionToGPSA(grid_size=(4, 4)))
    iso.verify(model, gated, x)


def recalibrate(model, x):
    wide = iso.recast(model, iso.LinearToPyramid())
    iso.recalibrate(wide, [(x, x)])


def fuse(model, x):
    iso.fuse(model, x, affine=True)


def insert(model, x):
    iso.insert(model, iso.layers.MapAttention, after="blocks.0", example=x)


WATCHERS = (
    iso.attention_maps,
    iso.nonlocality,
    iso.analysis.attention_entropy,
    iso.analysis.head_similarity,
    iso.analysis.logit_stats,
    attention_from,
    cka,
    verify,
    recalibrate,
    fuse,
    insert,
)


@pytest.mark.parametrize(
    "inputs", [{"pixel_values": torch.zeros(1, 3, 32, 32)}, torch.zeros(1, 3), None]
)
def test_a_call_that_fails_leaves_no_hook(inputs):
    model = vit()
    for measure in WATCHERS:
        with suppress(Exception):  # whatever it is
            measure(model, inputs)
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks


class Fails(nn.Module):
    """A layer that fails, and keeps the networks it failed in, copies too, that had hooks at that moment."""

    def __init__(self, network, hooked):
        super().__init__()
        self.network = [network]  # a list, so that it is not a submodule
        self.hooked = hooked

    def __deepcopy__(self, memo):
        return Fails(copy.deepcopy(self.network[0], memo), self.hooked)

    def forward(self, x):
        network = self.network[0]
        if hooks_of(network):
            self.hooked.append(network)
        raise RuntimeError("no")


def hooks_of(network):
    return [m for m in network.modules() if m._forward_hooks or m._forward_pre_hooks]


@pytest.mark.parametrize("measure", [each for each in WATCHERS if each is not verify])
def test_a_network_that_fails_under_way_has_no_hook_left(measure):
    model = vit().eval()
    hooked = []
    model.blocks[1].mlp.drop1 = Fails(model, hooked)
    with pytest.raises(Exception, match="no"):
        measure(model, torch.randn(4, 3, 32, 32))
    assert hooked
    for network in (model, *hooked):
        assert not hooks_of(network)


def assert_of_maps(stats, maps):
    """The largest share and the entropy of every head are those of its maps."""
    torch.testing.assert_close(stats.max_attention, maps.amax((2, 3)).mean(0))
    entropies = torch.special.entr(maps).sum(-1)
    torch.testing.assert_close(stats.entropy, entropies.mean((0, 2)))


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
        for found, value in ((entropy, math.log(N)), (logits, 0.0), (shares, 1 / N)):
            assert list(found) == ["blocks.0.attn", "blocks.1.attn"]
            expected = torch.full((3,), value)
            torch.testing.assert_close(found["blocks.1.attn"], expected, atol=1e-4, rtol=1e-4)
        similarity = iso.analysis.head_similarity(model, x)
        torch.testing.assert_close(similarity["blocks.0.attn"], torch.ones(3, 3))

    def test_the_share_of_tokens_before_the_patches(self):
        name = "blocks.1.attn"
        x = torch.randn(3, 3, 32, 32)
        five = uniform(vit(reg_tokens=4))
        share = iso.analysis.prefix_attention(five, [(x, None)])[name]
        torch.testing.assert_close(share, torch.full((3,), 5 / 21))

        among_patches = iso.nonlocality(five, x)[name] / (1 - share)
        alone = uniform(vit(class_token=False, global_pool="avg"))
        torch.testing.assert_close(among_patches, iso.nonlocality(alone, x)[name])
        refused("no class token or registers", iso.analysis.prefix_attention, alone, x)

    def test_the_grid_of_a_vit_of_ones_own_is_that_of_its_first_convolution(self):
        class OwnViT(nn.Module):
            def __init__(self):
                super().__init__()
                self.patches = nn.Conv2d(3, 24, 8, 8)
                self.token = nn.Parameter(torch.zeros(1, 1, 24))
                self.block = nn.MultiheadAttention(24, 3, batch_first=True)

            def forward(self, x):
                patches = self.patches(x).flatten(2).transpose(1, 2)
                token = self.token.expand(len(x), -1, -1)
                tokens = torch.cat([token, patches], 1)
                return self.block(tokens, tokens, tokens)[0]

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
        assert_of_maps(found, layer.attention(x))
        q, k, _ = layer.content_scores(x)
        assert k.shape[2] == 7 * 9
        logits = q @ k.mT
        torch.testing.assert_close(found.max_logit, logits.amax((2, 3)).mean(0))

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
        assert_of_maps(stats, layer.attention(x))

    def test_a_loader_is_the_mean_over_its_images(self):
        model = vit().double()
        x = torch.randn(10, 3, 32, 32)
        loader = [(batch, torch.zeros(len(batch))) for batch in x.split(4)]
        for look in (iso.analysis.attention_entropy, iso.analysis.head_similarity, iso.nonlocality):
            whole = look(model, x)["blocks.1.attn"]
            streamed = look(model, loader)["blocks.1.attn"]
            torch.testing.assert_close(streamed, whole, atol=1e-5, rtol=1e-5)

        whole = iso.analysis.logit_stats(model, x)["blocks.0.attn"]
        streamed = iso.analysis.logit_stats(model, loader)["blocks.0.attn"]
        torch.testing.assert_close(streamed.entropy, whole.entropy)

        whole = iso.analysis.map_similarity(model, x)
        streamed = iso.analysis.map_similarity(model, loader)
        torch.testing.assert_close(streamed, whole)

        assert entropy(torch.eye(9)).abs().max() == 0
        assert entropy(torch.tensor([1.5, -0.5])).isnan()
        refused("there is no batch", iso.analysis.attention_entropy, model, [])

    @pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
    def test_queries_that_attend_to_nothing(self, masked):
        from isomorph.analysis.attention_logits import summarise_scores

        bias = torch.zeros(1, 1, 5, 5)
        bias[..., 3:] = masked
        bias[:, :, 3:] = masked
        zeros = torch.zeros(1, 2, 5, 3)
        applied = AppliedAttention(zeros, zeros, bias)
        top, peak, found = summarise_scores(applied)
        entropies = torch.special.entr(applied.map().nan_to_num()).sum(-1).mean((0, 2))
        torch.testing.assert_close(found, entropies)
        torch.testing.assert_close(peak, torch.full((2,), 1 / 3))
        assert top.tolist() == [0, 0]

    def test_masked_logits_have_an_entropy(self):
        from isomorph.analysis.attention_logits import summarise_scores

        later = torch.ones(4, 4).triu(1).bool()
        bias = torch.zeros(1, 1, 4, 4).masked_fill(later, -torch.inf)
        zeros = torch.zeros(1, 2, 4, 3)
        _, _, found = summarise_scores(AppliedAttention(zeros, zeros, bias))
        expected = sum(math.log(n) for n in (1, 2, 3, 4)) / 4
        torch.testing.assert_close(found, torch.full((2,), expected))


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
    centred = x - x.mean(0)
    parts = centred.unflatten(1, (300, -1)).transpose(0, 1)
    return (parts @ parts.mT) * (1 - torch.eye(len(x), dtype=x.dtype))


def doubles(*shape):
    return torch.randn(shape, dtype=torch.float64)


def identity(width):
    return torch.eye(width, dtype=torch.float64)


def rotation(width):
    q, _ = torch.linalg.qr(doubles(width, width))
    return q


def reads_two_parts(first, second):
    """Two layers, of which each gives some of the features of its input."""
    return Two(*identity(first + second).split([first, second]))


class TestCKA:
    def test_rotated_features_are_the_same(self):
        turn = rotation(6)
        x = doubles(40, 6)
        a = Two(identity(6), 2 * turn)
        b = Two(turn.T, 3 * identity(6))
        for batches in (x, x.split(8)):
            found = iso.cka(a, b, batches, "?")
            assert found.rows == ["a", "b"]
            assert found.columns == ["a", "b"]
            torch.testing.assert_close(found.matrix, torch.ones(2, 2).double())

    def test_the_layers_of_a_model_that_names_none_are_its_blocks(self):
        def linear():
            return nn.Linear(6, 6)

        def block():
            return nn.Sequential(linear(), nn.ReLU())

        x = torch.randn(16, 6)
        of_blocks = nn.Sequential(linear(), block(), block(), linear())
        assert iso.cka(of_blocks, of_blocks, x).rows == ["1", "2"]
        flat = nn.Sequential(linear(), nn.ReLU(), linear())
        assert iso.cka(flat, flat, x).rows == ["0", "2"]

    def test_one_batch_is_the_formula(self):
        x = doubles(16, 5)
        y = doubles(16, 7)

        def slow(k, m):
            n = len(k)
            k = k - torch.diag(k.diag())
            m = m - torch.diag(m.diag())
            one = torch.ones(n, 1, dtype=k.dtype)
            sum_of_k = one.T @ k @ one
            sum_of_m = one.T @ m @ one
            middle = sum_of_k * sum_of_m / ((n - 1) * (n - 2))
            last = 2 / (n - 2) * (one.T @ k @ m @ one)
            total = (k @ m).trace() + middle - last
            return total.item() / (n * (n - 3))

        k = x @ x.T
        m = y @ y.T
        both = torch.stack([k, m])
        both.diagonal(dim1=1, dim2=2).zero_()
        expected = [[slow(k, k), slow(k, m)], [slow(m, k), slow(m, m)]]
        torch.testing.assert_close(hsic(both, both), torch.tensor(expected, dtype=torch.float64))

        cross = torch.cat([x, y], 1)
        model = reads_two_parts(5, 7)
        found = iso.cka(model, model, cross, "?").matrix
        lengths = math.sqrt(slow(k, k) * slow(m, m))
        assert found[0, 1].item() == pytest.approx(slow(k, m) / lengths)
        torch.testing.assert_close(found.diagonal(), torch.ones(2).double())

    def test_unrelated_features_are_near_0_where_the_biased_form_is_not(self):
        cross = doubles(400, 60)
        model = reads_two_parts(30, 30)
        found = iso.cka(model, model, cross.split(20), "?").matrix
        assert abs(found[0, 1]) < 0.05
        first, second = cross[:20].split(30, 1)
        assert iso.analysis.linear_cka(first, second) > 0.4

    @pytest.mark.parametrize("sizes", [(4,), (8,), (15,), (4, 4), (9, 9, 9), (10, 2)])
    def test_too_few_images_are_said_with_the_noise_that_they_leave(self, sizes):
        """The number in the message is the standard deviation of 300 pairs of unrelated layers."""
        cross = [doubles(size, 300 * 40) for size in sizes]
        large_enough = [x for x in cross if len(x) >= 4]
        scores = sum(hsic(grams(x), grams(x)) for x in large_enough)
        own = scores.diagonal()
        values = scores / (own[:, None] * own).sqrt()
        pairs = values[torch.triu(torch.ones_like(values), 1) > 0]
        scatter = pairs[pairs.isfinite()].std().item()

        count = sum(len(x) for x in large_enough)
        model = reads_two_parts(30, 30)
        batches = [x[:, :60] for x in cross]
        with pytest.warns(DataWarning, match=rf"CKA of {count} images scatters") as found:
            iso.cka(model, model, batches, "?")
        said = re.search(r"0 \+- (\S+);", str(found[0].message))
        assert float(said[1]) == pytest.approx(scatter, rel=0.1)

    def test_a_batch_for_each_model(self):
        x = doubles(48, 6)
        shift = doubles(6)
        a = Two(rotation(6)[:3], rotation(6)[3:])
        b = Two(rotation(6), rotation(6)[:2])
        batches = x.split(8)
        pairs = [(batch, 2 * batch + shift) for batch in batches]
        found = cka_of_pairs(a, b, pairs, "?")
        torch.testing.assert_close(found.matrix, iso.cka(a, b, batches, "?").matrix)
        refused("not batches of 8 and 7", lambda: cka_of_pairs(a, b, [(x[:8], x[:7])], "?"))

    def test_what_cannot_be_known_is_said(self):
        """Features of a tiny batch may tell nothing of similarity, and features that are always the same never do."""
        model = Two(rotation(6)[:5], rotation(6)[1:])
        x = doubles(8, 6)
        said = "the CKA of a, b is unknown .* give larger batches"
        for tiny in (x[:1].expand(4, -1), torch.zeros(5, 6).double()):
            refused(said, iso.cka, model, model, tiny, "?")
        half = Two(rotation(6), torch.zeros(2, 6).double())
        full = Two(rotation(6), rotation(6))
        with pytest.warns(DataWarning, match=r"CKA of b is unknown \(NaN\): in batches of 8"):
            found = iso.cka(half, full, x, "?")
        assert found.matrix.isnan().tolist() == [[False, False], [True, True]]
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
        entries = sum(one.numel() for one in alive.values())
        peaks.append(entries)
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
