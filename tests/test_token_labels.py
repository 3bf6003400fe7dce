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

CPU = torch.device("cpu")
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
    drawn = 3 * torch.randn(classes, *size, generator=generator)
    scores, indices = drawn.topk(likeliest, 0)
    return torch.stack([scores, indices.to(scores)]).to(dtype)


def write_maps(folder):
    for label, i, _ in SAMPLES:
        folder_of_class = folder / CLASSES[label]
        folder_of_class.mkdir(parents=True, exist_ok=True)
        torch.save(drawn_map(10 * label + i), folder_of_class / f"{i}.pt")


@pytest.fixture
def data(tmp_path):
    as_folder(tmp_path, "train")
    as_folder(tmp_path, "val")
    write_maps(tmp_path / "maps")
    return tmp_path


@pytest.fixture
def draw_box(monkeypatch):
    """Fix the box that MixToken draws."""

    def fix(*sides):
        box = Box(*sides)
        module = "isomorph.lab.training.objectives.token_labels"
        monkeypatch.setattr(f"{module}.draw_box", lambda *_: box)
        return box

    return fix


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
    scores, indices = label_map
    for k, y, x in np.ndindex(likeliest, height, width):
        dense[int(indices[k, y, x]), y, x] = scores[k, y, x].double()
    top, left, bottom, right = box.tolist()
    rows, columns = grid_size
    down = points_of_cells(top * height, bottom * height, rows)
    across = points_of_cells(left * width, right * width, columns)
    found = torch.zeros(rows, columns, num_classes, dtype=torch.float64)
    for row, column, c in np.ndindex(rows, columns, num_classes):
        values = []
        for y in down[row]:
            for x in across[column]:
                values.append(bilinear(dense[c], y, x))
        place = columns - 1 - column if flipped else column
        found[row, place, c] = sum(values) / len(values)
    return found.softmax(-1)


def points_of_cells(start, end, cells):
    """Where each of equal cells is read: at least one point for every cell of the map, in its centres."""
    side = (end - start) / cells
    points = int(np.ceil(side))
    shares = [(i + 0.5) / points for i in range(points)]
    return [[start + (cell + share) * side - 0.5 for share in shares] for cell in range(cells)]


def targets():
    boxes = [[0.1, 0.3, 0.7, 0.9], [0, 0, 1, 1], [0.5, 0.2, 0.8, 0.8], [0, 0.4, 0.93, 1]]
    maps = [drawn_map(seed, 5, 3, (5, 7)) for seed in range(4)]
    return MapLabels(
        torch.tensor([0, 1, 2, 4]),
        torch.stack(maps).double(),
        torch.tensor(boxes, dtype=torch.float64),
        torch.tensor([False, True, True, False]),
    )


def slow_cuts(target, grid_size):
    """The probabilities of every image. Shape: -> each (H, W, 5)"""
    images = zip(target.maps, target.box, target.flipped, strict=True)
    return [slow_cut(*image, grid_size, 5) for image in images]


class TestGeometry:
    @pytest.mark.parametrize("grid_size", [(4, 4), (3, 5), (1, 1)])
    def test_cut_is_what_loops_say(self, grid_size):
        target = targets()
        found = crop_label_maps(dense_scores(target.maps, 5), target, grid_size)
        wanted = torch.stack(slow_cuts(target, grid_size))
        torch.testing.assert_close(found.view(4, *grid_size, 5), wanted, rtol=1e-9, atol=1e-12)

    def test_a_map_goes_where_its_image_goes(self):
        """A picture and a map that both say where they are say the same of every patch, after crop and flip."""
        rows, columns = torch.meshgrid(torch.arange(48), torch.arange(64), indexing="ij")
        pixels = torch.stack([rows * 4, columns * 3, rows * 0], -1)
        picture = Image.fromarray(pixels.byte().numpy())
        places = torch.stack([rows / 48, columns / 64])
        scores = places.view(2, 12, 4, 16, 4).mean((2, 4))
        classes = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 12, 16)
        maps = torch.stack([scores, classes])
        transform = train_transform(CONFIG, scale=(0.3, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5)
        flips = set()
        for seed in range(20):
            seed_generators(seed)
            image, box, flipped = apply_and_track_crop(transform, picture)
            flips.add(flipped)
            target = MapLabels(0, maps, box, flipped)
            batch = default_collate([target])
            probabilities = crop_label_maps(dense_scores(batch.maps, 4), batch, (4, 4))
            found = probabilities.log().view(4, 4, 4)
            patches = (image * 0.5 + 0.5).view(3, 4, 8, 4, 8)
            seen = patches.mean((2, 4)) * 255
            for channel, scale in ((0, 48 * 4), (1, 64 * 3)):
                # a class that no map names has a score of 0
                score = found[..., channel + 1] - found[..., 0]
                torch.testing.assert_close(score, seen[channel] / scale, atol=0.025, rtol=0)
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
            assert box.min() >= 0
            assert box.max() <= 1
            if hflip in (0, 1):
                assert flipped == (hflip == 1)
            else:
                assert flipped in (True, False)


@pytest.mark.parametrize("kind", ["label", "map"])
def test_the_loss_is_the_formula(kind, draw_box):
    target = targets()
    x = torch.randn(4, 3, 32, 32).double()
    box = draw_box(0, 2, 1, 4)
    model = create("refined_vit_s", **NETWORK).double().eval()
    part = TokenLabelPart(weight=0.7, maps="maps", class_token=kind)
    found = TokenLabelLoss(model, part, 0.1, CPU)(x, target)

    logits, tokens = model(x, tokens=True, box=box)
    patches = slow_cuts(target, (4, 4))
    images = [cut[0, 0] for cut in slow_cuts(target, (1, 1))]
    if kind == "label":
        images = list(torch.eye(5, dtype=torch.float64)[target.label])

    def loss(logits, wanted):
        smoothed = 0.9 * wanted + 0.1 / 5
        return -(smoothed * logits.log_softmax(-1)).sum()

    image = dense = 0
    for b in range(4):
        other = 3 - b
        outside = (16 - 6) * loss(logits[b], images[b])
        within = 6 * loss(logits[b], images[other])
        image += (outside + within) / 16 / 4
        mixed = 10 * images[b] + 6 * images[other]
        assert found["target"][b].argmax() == mixed.argmax()
        for n in range(16):
            row, column = divmod(n, 4)
            inside = box.top <= row < box.bottom and box.left <= column < box.right
            source = other if inside else b
            dense += loss(tokens[b, n], patches[source][row, column]) / 16 / 4
    torch.testing.assert_close(found["token_loss"], dense, rtol=1e-9, atol=1e-12)
    # plain labels are in single precision
    torch.testing.assert_close(found["task_loss"], image, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["loss"], image + 0.7 * dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("written", [as_folder, as_tar])
def test_every_image_has_its_own_map(written, tmp_path, caches):
    written(tmp_path)
    write_maps(tmp_path / "maps")
    layout = "imagefolder" if written is as_folder else "tar"
    source = open_source(layout, "train", tmp_path)
    source.split = (0.2, 60)
    mapped = LabelMapSource(source, tmp_path / "maps", 3)
    assert mapped.split == (0.2, 60)
    for index, label in enumerate(mapped.labels):
        seed = 10 * int(label) + index % 5
        assert torch.equal(mapped.label_map(index), drawn_map(seed))
    subset = mapped.subset([7])
    assert isinstance(subset, LabelMapSource)
    assert torch.equal(subset.label_map(0), drawn_map(12))


@pytest.mark.parametrize(
    ("kind", "more"),
    [("label", ["amp=bf16"]), ("map", ["amp=none", "augment.mixup=0.8", "augment.cutmix=1.0"])],
)
def test_two_steps_of_a_training(kind, more, data):
    network = []
    for key, value in NETWORK.items():
        if key != "num_classes":
            network.append(f"model.kwargs.{key}={value}")
    paths = [f"data.root={data}", f"token_labels.maps={data / 'maps'}", f"out={data / 'run'}"]
    settings = ["data.source=imagefolder", "augment.mixup=0", f"token_labels.class_token={kind}"]
    changes = [*BRIEF, *network, *paths, *settings, *more]
    run = Run(iso.load_recipe("refined_vit_s_standard", changes))
    assert run.order.steps == 2
    weight = run.trained.aux_head.weight
    before = weight.clone()
    assert train_epoch(run) > 0
    assert not torch.equal(before, weight)


SMALL = dict(
    img_size=32, patch_size=16, embed_dim=12, depth=6, num_heads=3, num_classes=5, dense_head=True
)


def slow_similarity(maps, pairs):
    """The formula, entry by entry."""
    total = 0
    neighbours = list(pairwise(maps))[:pairs]
    for first, second in neighbours:
        images, heads, queries, keys = first.shape
        entries = images * queries * keys * len(neighbours)
        for b, q, k in np.ndindex(images, queries, keys):
            dot = first_square = second_square = 0
            for h in range(heads):
                a = first[b, h, q, k]
                c = second[b, h, q, k]
                dot = dot + a * c
                first_square = first_square + a * a
                second_square = second_square + c * c
            lengths = first_square**0.5 * second_square**0.5
            total = total + dot / lengths / entries
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
    drawn_maps = torch.randn(3, 2, 3, 4, 4, dtype=torch.float64).unbind()
    first, second, third = (each.requires_grad_() for each in drawn_maps)
    maps = [first, first, second, third]  # the second block hands on the first's
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
def test_loss_and_gradients_are_the_formula_s(name, tokens, draw_box):
    """Every parameter's gradient, against maps taken block by block and compared entry by entry."""
    draw_box(0, 1, 0, 2)
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
    wanted = wanted + 0.3 * slow_similarity(maps, 4)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)

    found.backward()
    wanted.backward()
    trained = 0
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10)
            trained += 1
    assert trained > 50


def mixup(augment, maps=False):
    """What mixes the batches of a recipe with this augmentation, for five classes."""
    recipe = SimpleNamespace(augment=augment, token_labels=SimpleNamespace(maps=maps))
    return CLASSIFICATION.mix(recipe, SimpleNamespace(num_classes=5))


class TestMixedLabels:
    def target(self, images=4):
        scores = torch.rand(images, 2, 6, 6)
        classes = torch.randint(0, 5, (images, 2, 6, 6))
        maps = torch.stack([scores, classes.float()], 1)
        boxes = torch.tensor([[0.1, 0.2, 0.9, 0.8]]).repeat(images, 1)
        flipped = torch.tensor([True, False] * (images // 2))
        return MapLabels(torch.arange(images), maps, boxes, flipped)

    @pytest.mark.parametrize("alphas", [dict(mixup=0.8), dict(mixup=0.8, cutmix=1.0)])
    def test_images_are_mixed_as_those_with_plain_labels(self, alphas):
        augment = AugmentPart(smoothing=0.1, **alphas)
        images = torch.randn(4, 3, 16, 16)
        mix = mixup(augment)
        mix_with_maps = mixup(augment, maps=True)
        smoothed = F.one_hot(torch.arange(4), 5) * 0.9 + 0.02
        for seed in range(4):
            np.random.seed(seed)
            plain, labels = mix(images.clone(), torch.arange(4))
            np.random.seed(seed)
            mixed, target = mix_with_maps(images.clone(), self.target())
            assert torch.equal(plain, mixed)
            torch.testing.assert_close(target.mix(smoothed), labels)

    @pytest.mark.parametrize("kind", ["label", "map"])
    def test_patches_have_the_labels_of_both_images(self, kind, draw_box):
        """In the images' shares, whatever the place (as the released code has it), and MixToken comes after."""
        box = draw_box(0, 1, 0, 2)
        model = drawn(create("refined_vit_s", **SMALL)).double().eval()
        x = torch.randn(4, 3, 32, 32).double()
        target = self.target()
        own = torch.tensor([0.7, 0.6, 0.6, 0.7])
        part = TokenLabelPart(weight=0.7, maps="maps", class_token=kind)
        task = TokenLabelLoss(model, part, 0.1, CPU)
        found = task(x, MixedLabelMaps(target, own))

        logits, tokens = model(x, tokens=True, box=box)
        labels, dense = task.labels(target, (2, 2))
        image = patches = 0
        for b in range(4):
            for n in range(4):
                source = 3 - b if n < 2 else b  # the box is the upper row
                share = own[source]
                other = 3 - source
                wanted = share * dense[source, n] + (1 - share) * dense[other, n]
                patches -= (wanted * tokens[b, n].log_softmax(-1)).sum() / 16
                wanted = share * labels[source] + (1 - share) * labels[other]
                image -= (wanted * logits[b].log_softmax(-1)).sum() / 16
        torch.testing.assert_close(found["task_loss"], image, rtol=1e-6, atol=0)
        torch.testing.assert_close(found["token_loss"], patches, rtol=1e-6, atol=0)
