"""Refiner as its code trains: label maps that go with their images, every patch taught, similar maps penalised."""

import copy
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import default_collate

import isomorph as iso
from containers import CLASSES, SAMPLES, as_folder, as_tar
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.label_maps import LabelMapSource, MapLabels, apply_and_track_crop
from isomorph.lab.data.loaders import train_transform
from isomorph.lab.distributed import seed_generators
from isomorph.lab.training.classification import CLASSIFICATION
from isomorph.lab.training.objectives.supervised import PenalisedLoss, neighbour_similarity
from isomorph.lab.training.objectives.token_labels import (
    MixedLabelMaps,
    TokenLabelLoss,
    crop_label_maps,
    dense_scores,
)
from isomorph.lab.training.recipe.fields import AugmentPart, MapSimilarityPart, TokenLabelPart
from isomorph.lab.training.run.loop import train_epoch
from isomorph.lab.training.run.state import Run
from isomorph.models import create
from isomorph.models.blockwise import Box

CONFIG = dict(
    input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop_pct=1.0
)
NETWORK = dict(
    img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5, dense_head=True
)
BRIEF = [
    "epochs=1",
    "optim.warmup_epochs=0",
    "data.size=[32,32]",
    "data.batch_size=6",
    "data.workers=0",
]


def drawn_map(seed, classes=3, likeliest=2, size=(6, 6), dtype=torch.float16):
    """Scores, best first, of different classes in every place. Shape: -> (2, likeliest, H, W)"""
    generator = torch.Generator().manual_seed(seed)
    scores, indices = torch.randn(classes, *size, generator=generator).mul(3).topk(likeliest, 0)
    return torch.stack([scores, indices.to(scores)]).to(dtype)


def write_maps(folder, **more):
    for label, i, _ in SAMPLES:
        (folder / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        torch.save(drawn_map(10 * label + i, **more), folder / CLASSES[label] / f"{i}.pt")


@pytest.fixture
def data(tmp_path):
    as_folder(tmp_path, "train"), as_folder(tmp_path, "val")
    write_maps(tmp_path / "maps")
    return tmp_path


def bilinear(plane, y, x):
    """The value of a plane at a place counted in its cells' centres; at the rim that of the last cell."""
    top = plane.shape[0] - 1
    left = plane.shape[1] - 1
    y = min(max(y, 0), top)
    x = min(max(x, 0), left)
    y0 = min(int(y), top - 1)
    x0 = min(int(x), left - 1)
    dy = y - y0
    dx = x - x0
    upper = plane[y0, x0] * (1 - dx) + plane[y0, x0 + 1] * dx
    lower = plane[y0 + 1, x0] * (1 - dx) + plane[y0 + 1, x0 + 1] * dx
    return upper * (1 - dy) + lower * dy


def slow_cut(label_map, box, flipped, grid_size, num_classes):
    """One image's probabilities, place by place and class by class. Shape: -> (H, W, num_classes)"""
    _, likeliest, height, width = label_map.shape
    dense = torch.zeros(num_classes, height, width, dtype=torch.float64)
    for k, y, x in np.ndindex(likeliest, height, width):
        dense[int(label_map[1, k, y, x]), y, x] = label_map[0, k, y, x].double()
    top, left, bottom, right = (float(b) * s for b, s in zip(box, (height, width) * 2, strict=True))
    (rows, columns), found = grid_size, torch.zeros(*grid_size, num_classes, dtype=torch.float64)
    cell = (bottom - top) / rows, (right - left) / columns
    points = [int(np.ceil(side)) for side in cell]
    for row, column, c in np.ndindex(rows, columns, num_classes):
        down = [top + (row + (i + 0.5) / points[0]) * cell[0] - 0.5 for i in range(points[0])]
        across = [left + (column + (j + 0.5) / points[1]) * cell[1] - 0.5 for j in range(points[1])]
        values = []
        for y in down:
            for x in across:
                values.append(bilinear(dense[c], y, x))
        found[row, columns - 1 - column if flipped else column, c] = sum(values) / len(values)
    return found.softmax(-1)


def targets(dtype=torch.float64, size=(5, 7)):
    boxes = torch.tensor(
        [[0.1, 0.3, 0.7, 0.9], [0, 0, 1, 1], [0.5, 0.2, 0.8, 0.8], [0, 0.4, 0.93, 1]], dtype=dtype
    )
    maps = torch.stack([drawn_map(i, 5, 3, size) for i in range(4)]).to(dtype)
    return MapLabels(
        torch.tensor([0, 1, 2, 4]), maps, boxes, torch.tensor([False, True, True, False])
    )


class TestGeometry:
    @pytest.mark.parametrize("grid_size", [(4, 4), (3, 5), (1, 1)])
    def test_cut_is_what_loops_say(self, grid_size):
        target = targets()
        found = crop_label_maps(dense_scores(target.maps, 5), target, grid_size)
        for b in range(4):
            wanted = slow_cut(target.maps[b], target.box[b], target.flipped[b], grid_size, 5)
            torch.testing.assert_close(found[b].view(*grid_size, 5), wanted, rtol=1e-9, atol=1e-12)

    def test_a_map_goes_where_its_image_goes(self):
        """A picture and a map that both say where they are say the same of every patch, after crop and flip."""
        rows, columns = torch.meshgrid(torch.arange(48), torch.arange(64), indexing="ij")
        picture = Image.fromarray(torch.stack([rows * 4, columns * 3, rows * 0], -1).byte().numpy())
        small = [
            (values.view(12, 4, 16, 4).float().mean((1, 3))) for values in (rows / 48, columns / 64)
        ]
        maps = torch.stack(
            [torch.stack(small), torch.tensor([1.0, 2.0])[:, None, None].expand(2, 12, 16)]
        )
        transform = train_transform(CONFIG, scale=(0.3, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5)
        flips = set()
        for seed in range(20):
            seed_generators(seed)
            image, box, flipped = apply_and_track_crop(transform, picture)
            flips.add(flipped)
            target = MapLabels(0, maps, box, flipped)
            batch = default_collate([target])
            found = crop_label_maps(dense_scores(batch.maps, 4), batch, (4, 4)).log().view(4, 4, 4)
            seen = (image * 0.5 + 0.5).view(3, 4, 8, 4, 8).mean((2, 4)) * 255
            for c, scale in ((0, 48 * 4), (1, 64 * 3)):
                # a class that no map names has a score of 0
                score = found[..., c + 1] - found[..., 0]
                torch.testing.assert_close(score, seen[c] / scale, atol=0.025, rtol=0)
        assert flips == {True, False}

    @pytest.mark.parametrize(
        ("interpolation", "hflip"), [("bilinear", 0.0), ("bicubic", 0.5), ("random", 1.0)]
    )
    def test_the_image_is_that_of_the_plain_transform_to_the_bit(self, interpolation, hflip):
        policy = dict(
            auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.4, re_prob=0.5, re_mode="pixel"
        )
        config = CONFIG | dict(interpolation=interpolation)
        transform = train_transform(
            config, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=hflip, **policy
        )
        pixels = np.random.default_rng(0).integers(0, 255, (40, 56, 3)).astype(np.uint8)
        for seed in range(8):
            seed_generators(seed)
            plain = transform(Image.fromarray(pixels))
            after = (random.random(), torch.rand(1), np.random.rand())
            seed_generators(seed)
            image, box, flipped = apply_and_track_crop(transform, Image.fromarray(pixels))
            assert after == (random.random(), torch.rand(1), np.random.rand())
            assert torch.equal(image, plain)
            assert ((box >= 0) & (box <= 1)).all()
            assert flipped in ((hflip == 1,) if hflip in (0, 1) else (True, False))


@pytest.mark.parametrize("kind", ["label", "map"])
def test_the_loss_is_the_formula(kind, monkeypatch):
    target = targets()
    x = torch.randn(4, 3, 32, 32).double()
    box = Box(0, 2, 1, 4)
    monkeypatch.setattr("isomorph.lab.training.objectives.token_labels.draw_box", lambda *_: box)
    model = create("refined_vit_s", **NETWORK).double().eval()
    part = TokenLabelPart(weight=0.7, maps="maps", class_token=kind)
    found = TokenLabelLoss(model, part, 0.1, torch.device("cpu"))(x, target)
    logits, tokens = model(x, tokens=True, box=box)
    patches = [
        slow_cut(target.maps[b], target.box[b], target.flipped[b], (4, 4), 5) for b in range(4)
    ]
    images = []
    for b in range(4):
        cut = slow_cut(target.maps[b], target.box[b], target.flipped[b], (1, 1), 5)
        images.append(cut[0, 0])
    if kind == "label":
        images = list(torch.eye(5, dtype=torch.float64)[target.label])
    loss = lambda logits, wanted: -((0.9 * wanted + 0.1 / 5) * logits.log_softmax(-1)).sum()  # noqa: E731
    image = dense = 0
    for b in range(4):
        outside = (16 - 6) * loss(logits[b], images[b])
        within = 6 * loss(logits[b], images[3 - b])
        image += (outside + within) / 16 / 4
        for n in range(16):
            row, column = divmod(n, 4)
            inside = box.top <= row < box.bottom and box.left <= column < box.right
            dense += loss(tokens[b, n], patches[3 - b if inside else b][row, column]) / 16 / 4
    for b in range(4):
        mixed = 10 * images[b] + 6 * images[3 - b]
        assert found["target"][b].argmax() == mixed.argmax()
    torch.testing.assert_close(found["token_loss"], dense, rtol=1e-9, atol=1e-12)
    # plain labels are in single precision
    torch.testing.assert_close(found["task_loss"], image, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["loss"], image + 0.7 * dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("written", [as_folder, as_tar])
def test_every_image_has_its_own_map(written, tmp_path, caches):
    written(tmp_path)
    write_maps(tmp_path / "maps")
    source = open_source("imagefolder" if written is as_folder else "tar", "train", tmp_path)
    source.split = (0.2, 60)
    mapped = LabelMapSource(source, tmp_path / "maps", 3)
    assert mapped.split == (0.2, 60)
    assert isinstance(mapped.subset([7]), LabelMapSource)
    for index, label in enumerate(mapped.labels):
        assert torch.equal(mapped.label_map(index), drawn_map(10 * int(label) + index % 5))
    assert torch.equal(mapped.subset([7]).label_map(0), drawn_map(12))


class TestRuns:
    def recipe(self, data, *more):
        small = [
            f"model.kwargs.{key}={value}"
            for key, value in NETWORK.items()
            if key not in ("num_classes",)
        ]
        place = [
            "data.source=imagefolder",
            f"data.root={data}",
            f"token_labels.maps={data / 'maps'}",
        ]
        return iso.load_recipe(
            "refined_vit_s_standard", [*BRIEF, *small, *place, "augment.mixup=0", *more]
        )

    @pytest.mark.parametrize(
        ("said", "more"),
        [("label", ["amp=bf16"]), ("map", ["amp=none", "augment.mixup=0.8", "augment.cutmix=1.0"])],
    )
    def test_two_steps_of_a_training(self, said, more, data):
        run = Run(
            self.recipe(data, f"token_labels.class_token={said}", f"out={data / 'run'}", *more)
        )
        assert run.order.steps == 2
        before = [parameter.clone() for parameter in run.trained.aux_head.parameters()]
        assert train_epoch(run) > 0
        assert not torch.equal(before[0], run.trained.aux_head.weight)


SMALL = dict(
    img_size=32, patch_size=16, embed_dim=12, depth=6, num_heads=3, num_classes=5, dense_head=True
)
CPU = torch.device("cpu")


def slow_similarity(maps, pairs):
    """The formula, entry by entry."""
    total = 0
    neighbours = list(pairwise(maps))[:pairs]
    for first, second in neighbours:
        images, heads, queries, keys = first.shape
        for b, q, k in np.ndindex(images, queries, keys):
            dot = sum(first[b, h, q, k] * second[b, h, q, k] for h in range(heads))
            lengths = [
                sum(maps[b, h, q, k] ** 2 for h in range(heads)) ** 0.5 for maps in (first, second)
            ]
            total = total + dot / (lengths[0] * lengths[1]) / (
                images * queries * keys * len(neighbours)
            )
    return total


def drawn(model):
    """A network in which every tensor counts, with statistics of its own."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("pairs", [None, 1, 2])
def test_similarity_is_the_formula_and_so_are_its_gradients(pairs):
    torch.manual_seed(0)
    drawn_maps = [
        torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    # the second block hands on the first's
    maps = [drawn_maps[0], drawn_maps[0], drawn_maps[1], drawn_maps[2]]
    found = neighbour_similarity(maps, pairs)
    wanted = slow_similarity(maps, pairs)
    torch.testing.assert_close(found, torch.as_tensor(wanted), rtol=0, atol=1e-12)
    if pairs == 1:
        assert found == 1
        assert not found.requires_grad
        return
    ours = torch.autograd.grad(found, drawn_maps, allow_unused=True)
    theirs = torch.autograd.grad(wanted, drawn_maps, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["refined_vit_s_released", "refined_vit_s"])
@pytest.mark.parametrize("tokens", [False, True])
def test_loss_and_gradients_are_the_formula_s(name, tokens, monkeypatch):
    """Every parameter's gradient, against maps taken block by block and compared entry by entry."""
    monkeypatch.setattr(
        "isomorph.lab.training.objectives.token_labels.draw_box", lambda *_: Box(0, 1, 0, 2)
    )
    model = drawn(create(name, **SMALL)).double().train()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    labels = torch.tensor([1, 3])
    part = MapSimilarityPart(weight=0.3, pairs=4)
    if tokens:
        task = TokenLabelLoss(model, TokenLabelPart(weight=0.7), 0.1, CPU, part)
        plain = TokenLabelLoss(reference, TokenLabelPart(weight=0.7), 0.1, CPU)
    else:
        task = PenalisedLoss(model, torch.nn.CrossEntropyLoss(), CPU, part)
        plain = PenalisedLoss(reference, torch.nn.CrossEntropyLoss(), CPU)
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


def mixup(augment, maps=False):
    """What mixes the batches of a recipe with this augmentation, for five classes."""
    recipe = SimpleNamespace(augment=augment, token_labels=SimpleNamespace(maps=maps))
    return CLASSIFICATION.mix(recipe, SimpleNamespace(num_classes=5))


class TestMixedLabels:
    def target(self, images=4):
        maps = torch.stack(
            [torch.rand(images, 2, 6, 6), torch.randint(0, 5, (images, 2, 6, 6)).float()], 1
        )
        boxes = torch.tensor([[0.1, 0.2, 0.9, 0.8]]).repeat(images, 1)
        return MapLabels(
            torch.arange(images), maps, boxes, torch.tensor([True, False] * (images // 2))
        )

    @pytest.mark.parametrize("alphas", [dict(mixup=0.8), dict(mixup=0.8, cutmix=1.0)])
    def test_images_are_mixed_as_those_with_plain_labels(self, alphas):
        augment = AugmentPart(smoothing=0.1, **alphas)
        images = torch.randn(4, 3, 16, 16)
        for seed in range(4):
            np.random.seed(seed)
            plain, labels = mixup(augment)(images.clone(), torch.arange(4))
            np.random.seed(seed)
            mixed, target = mixup(augment, maps=True)(images.clone(), self.target())
            assert torch.equal(plain, mixed)
            hot = F.one_hot(torch.arange(4), 5) * 0.9 + 0.02
            torch.testing.assert_close(target.mix(hot), labels)

    @pytest.mark.parametrize("kind", ["label", "map"])
    def test_patches_have_the_labels_of_both_images(self, kind, monkeypatch):
        """In the images' shares, whatever the place (as the released code has it), and MixToken comes after."""
        box = Box(0, 1, 0, 2)
        monkeypatch.setattr(
            "isomorph.lab.training.objectives.token_labels.draw_box", lambda *_: box
        )
        model = drawn(create("refined_vit_s", **SMALL)).double().eval()
        x = torch.randn(4, 3, 32, 32).double()
        target = self.target()
        own = torch.tensor([0.7, 0.6, 0.6, 0.7])
        task = TokenLabelLoss(
            model, TokenLabelPart(weight=0.7, maps="maps", class_token=kind), 0.1, CPU
        )
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
