"""The penalty on similar maps, and label maps of mixed images: both as Refiner's released code trains."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

import isomorph as iso
from isomorph.data.label_maps import MapLabels
from isomorph.models import create
from isomorph.models.blockwise import Box
from isomorph.training.classification import CLASSIFICATION
from isomorph.training.objectives.supervised import PenalisedTask, neighbour_similarity
from isomorph.training.objectives.token_labels import MapLabelTask, MapOnlyTask, MixedLabelMaps, TokenLabelTask
from isomorph.training.recipe.fields import AugmentPart
from isomorph.training.recipe.objective_fields import MapSimilarityPart, TokenLabelPart
from isomorph.training.run.loop import train_epoch
from isomorph.training.run.open import open_run

SMALL = dict(img_size=32, patch_size=16, embed_dim=12, depth=6, num_heads=3, num_classes=5, dense_head=True)
CPU = torch.device("cpu")


def slow_similarity(maps, pairs):
    """The formula, entry by entry."""
    total, neighbours = 0, list(pairwise(maps))[:pairs]
    for first, second in neighbours:
        images, heads, queries, keys = first.shape
        for b in range(images):
            for q in range(queries):
                for k in range(keys):
                    dot = sum(first[b, h, q, k] * second[b, h, q, k] for h in range(heads))
                    lengths = [sum(maps[b, h, q, k] ** 2 for h in range(heads)) ** 0.5 for maps in (first, second)]
                    total = total + dot / (lengths[0] * lengths[1]) / (images * queries * keys * len(neighbours))
    return total


def drawn(model):
    """A network in which every tensor counts, with statistics of its own."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


class TestSimilarity:
    @pytest.mark.parametrize("pairs", [None, 1, 2, 9])
    def test_is_the_formula_and_so_are_its_gradients(self, pairs):
        torch.manual_seed(0)
        drawn_maps = [torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        maps = [drawn_maps[0], drawn_maps[0], drawn_maps[1], drawn_maps[2]]  # the second block hands on the first's
        found, wanted = neighbour_similarity(maps, pairs), slow_similarity(maps, pairs)
        torch.testing.assert_close(found, torch.as_tensor(wanted), rtol=0, atol=1e-12)
        if pairs == 1:
            assert found == 1
            assert not found.requires_grad
            return
        ours, theirs = (torch.autograd.grad(value, drawn_maps, allow_unused=True) for value in (found, wanted))
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

    def test_nothing_is_kept_but_the_maps(self):
        maps, kept = [torch.rand(2, 3, 9, 9, requires_grad=True) for _ in range(3)], []
        known = {each.data_ptr() for each in maps}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            neighbour_similarity(maps)
        assert all(t.data_ptr() in known or t.numel() <= 2 * 9 * 9 for t in kept)

    def test_empty_entries_and_half_precision(self):
        maps = [torch.rand(2, 8, 6, 6) for _ in range(3)]
        maps[1][0, :, 2, 3] = 0  # no heads at all there
        wanted = torch.stack([F.cosine_similarity(a, b, dim=1).mean() for a, b in pairwise(maps)])
        torch.testing.assert_close(neighbour_similarity(maps), wanted.mean())
        found = neighbour_similarity([each.bfloat16() for each in maps])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted.mean(), rtol=1e-2, atol=0)


class TestTask:
    @pytest.mark.parametrize("name", ["refined_vit_s_released", "refined_vit_s"])
    @pytest.mark.parametrize("tokens", [False, True])
    def test_loss_and_gradients_are_the_formula_s(self, name, tokens, monkeypatch):
        """Every parameter's gradient, against maps taken block by block and compared entry by entry."""
        monkeypatch.setattr("isomorph.training.objectives.token_labels.draw_box", lambda *_: Box(0, 1, 0, 2))
        model = drawn(create(name, **SMALL)).double().train()
        reference = copy.deepcopy(model)
        x, labels = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([1, 3])
        part = MapSimilarityPart(weight=0.3, pairs=4)
        if tokens:
            task = TokenLabelTask(model, TokenLabelPart(weight=0.7), 0.1, CPU, part)
            plain = TokenLabelTask(reference, TokenLabelPart(weight=0.7), 0.1, CPU)
        else:
            task = PenalisedTask(model, torch.nn.CrossEntropyLoss(), CPU, part)
            plain = PenalisedTask(reference, torch.nn.CrossEntropyLoss(), CPU)
        found = task(x, labels)["loss"]

        maps = []
        for block in reference.blocks:
            block.register_forward_hook(lambda _, __, result: maps.append(result[1]))
        wanted = plain(x, labels)["loss"]
        assert len(maps) == 6
        wanted = wanted + 0.3 * slow_similarity([each.clone() for each in maps], 4)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
        found.backward(), wanted.backward()
        pairs = list(zip(model.named_parameters(), reference.parameters(), strict=True))
        assert sum(p.grad is not None for (_, p), _ in pairs) > 50
        for (_, p), q in pairs:
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10)

    def test_networks_without_maps_to_hand_on_are_rejected(self):
        part = MapSimilarityPart()
        for model in (timm.create_model("refined_vit_b", depth=1), torch.nn.Linear(2, 2)):
            with pytest.raises(iso.UserError, match="map_similarity needs blocks that pass their maps on"):
                PenalisedTask(model, torch.nn.CrossEntropyLoss(), CPU, part)
        with pytest.raises(iso.UserError, match="at least two blocks"):
            PenalisedTask(create("refined_vit_s", **SMALL | dict(depth=1)), torch.nn.CrossEntropyLoss(), CPU, part)

    @pytest.mark.parametrize(
        "changes", [["scale.activation_checkpointing=true", "ema=null"], ["amp=none", "token_labels=null"]]
    )
    def test_runs_train(self, changes, tmp_path):
        small = [f"model.kwargs.{key}={value}" for key, value in SMALL.items() if key != "num_classes"]
        data = ["data.source=digits", "data.size=[32,32]", "data.batch_size=20", "data.workers=0", "data.fraction=0.03"]
        brief = ["epochs=1", "optim.warmup_epochs=0", f"out={tmp_path}", *changes]
        run = open_run(iso.load_recipe("refined_vit_s_released", [*small, *data, *brief]))
        assert run.task.similarity == MapSimilarityPart(weight=0.1, pairs=12)
        assert train_epoch(run) > 0


def mixup(augment, maps=False):
    """What mixes the batches of a recipe with this augmentation, for five classes."""
    recipe = SimpleNamespace(augment=augment, token_labels=SimpleNamespace(maps=maps))
    return CLASSIFICATION.mix(recipe, SimpleNamespace(num_classes=5))


class TestMixedLabels:
    def target(self, images=4):
        maps = torch.stack([torch.rand(images, 2, 6, 6), torch.randint(0, 5, (images, 2, 6, 6)).float()], 1)
        boxes = torch.tensor([[0.1, 0.2, 0.9, 0.8]]).repeat(images, 1)
        return MapLabels(torch.arange(images), maps, boxes, torch.tensor([True, False] * (images // 2)))

    @pytest.mark.parametrize("alphas", [dict(mixup=0.8), dict(cutmix=1.0), dict(mixup=0.8, cutmix=1.0)])
    def test_images_are_mixed_as_those_with_plain_labels(self, alphas):
        augment, images = AugmentPart(smoothing=0.1, **alphas), torch.randn(4, 3, 16, 16)
        for seed in range(4):
            np.random.seed(seed)
            plain, labels = mixup(augment)(images.clone(), torch.arange(4))
            np.random.seed(seed)
            mixed, target = mixup(augment, maps=True)(images.clone(), self.target())
            assert torch.equal(plain, mixed)
            hot = F.one_hot(torch.arange(4), 5) * 0.9 + 0.02
            torch.testing.assert_close(target.mix(hot), labels)

    @pytest.mark.parametrize("kind", [MapLabelTask, MapOnlyTask])
    def test_patches_have_the_labels_of_both_images(self, kind, monkeypatch):
        """In the images' shares, whatever the place (as the released code has it), and MixToken comes after."""
        box = Box(0, 1, 0, 2)
        monkeypatch.setattr("isomorph.training.objectives.token_labels.draw_box", lambda *_: box)
        model = drawn(create("refined_vit_s", **SMALL)).double().eval()
        x, target, own = torch.randn(4, 3, 32, 32).double(), self.target(), torch.tensor([0.7, 0.6, 0.6, 0.7])
        task = kind(model, TokenLabelPart(weight=0.7), 0.1, CPU)
        found = task(x, MixedLabelMaps(target, own))
        logits, tokens = model(x, tokens=True, box=box)
        labels, dense = task.labels(target, (2, 2))
        image = patches = 0
        for b in range(4):
            shares = {b: own[b], 3 - b: 1 - own[b]}
            other = {3 - b: own[3 - b], b: 1 - own[3 - b]}
            for n in range(4):
                chosen = other if n < 2 else shares  # the box is the upper row
                wanted = sum(share * dense[source, n] for source, share in chosen.items())
                patches -= (wanted * tokens[b, n].log_softmax(-1)).sum() / 16
                wanted = sum(share * labels[source] for source, share in chosen.items())
                image -= (wanted * logits[b].log_softmax(-1)).sum() / 16
        torch.testing.assert_close(found["task_loss"], image, rtol=1e-6, atol=0)
        torch.testing.assert_close(found["token_loss"], patches, rtol=1e-6, atol=0)

    def test_without_maps_every_patch_has_the_mixed_label(self, monkeypatch):
        monkeypatch.setattr("isomorph.training.objectives.token_labels.draw_box", lambda *_: Box(0, 2, 0, 1))
        model = drawn(create("refined_vit_s", **SMALL)).eval()
        images, labels = mixup(AugmentPart(mixup=0.8))(torch.randn(4, 3, 32, 32), torch.arange(4))
        found = TokenLabelTask(model, TokenLabelPart(), 0.1, CPU)(images, labels)
        _, tokens = model(images, tokens=True, box=Box(0, 2, 0, 1))
        patches = 0
        for b in range(4):
            for n in range(4):
                patches -= (labels[3 - b if n % 2 == 0 else b] * tokens[b, n].log_softmax(-1)).sum() / 16
        torch.testing.assert_close(found["token_loss"], patches)
