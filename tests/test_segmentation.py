"""Segmentation: data, joint augmentation, metrics, windows, the loss, runs and predictions."""

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import tv_tensors

import isomorph as iso
from command_line import isomorph
from isomorph.errors import DataWarning, NotFinite
from isomorph.lab.distributed import ALONE
from isomorph.lab.tasks.segmentation.augment import (
    CappedCrop,
    RatioResize,
    SegmentationPart,
    TrainTransform,
    scaled_size,
)
from isomorph.lab.tasks.segmentation.data import (
    IGNORE,
    Pair,
    masks,
    open_masks,
    open_splits,
    open_test_pairs,
    read_mask,
)
from isomorph.lab.tasks.segmentation.results import Confusion, slide, window_starts
from isomorph.lab.tasks.segmentation.task import (
    SegmentationLoss,
    channel_distillation,
    pixel_cross_entropy,
)
from isomorph.lab.training.optim import build_optimizer, build_scheduler
from isomorph.lab.training.recipe.fields import OptimPart
from isomorph.lab.training.run.state import Run
from refusals import refused

VIT = dict(depth=2, embed_dim=24, num_heads=2)
NETWORK = dict(backbone="tdrl_vit_ti", backbone_kwargs=VIT, channels=8)
SMALL = [
    "model.name=upernet",
    f"model.kwargs={json.dumps(NETWORK)}",
    "task.name=segmentation",
    "task.crop=32,32",
    "task.resize=64,48",
    "data.source=masks",
    "data.batch_size=2",
    "optim.lr=1e-3",
    "device=cpu",
]


def write_image(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def write_pair(folder, name, image, mask, split="train"):
    write_image(folder / split / "images" / f"{name}.png", image)
    write_image(folder / split / "masks" / f"{name}.png", mask)


def squares(seed, height=48, width=64):
    """An image with a bright square of class 1 on noise of class 0, and a border without a class."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 80, (height, width, 3))
    mask = np.zeros((height, width), int)
    top = rng.integers(4, height // 2)
    left = rng.integers(4, width // 2)
    image[top : top + 20, left : left + 24] += 150
    mask[top : top + 20, left : left + 24] = 1
    mask[:2] = IGNORE
    return image, mask


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares")
    for seed in range(6):
        write_pair(folder, f"{seed}", *squares(seed), "train" if seed < 4 else "val")
    (folder / "classes.txt").write_text("ground\nsquare\n")
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    fields = [*SMALL, f"data.root={folder}", "iterations=3", f"out={out}"]
    recipe = iso.load_recipe(write_recipe(out.parent), fields)
    return iso.train(recipe, show=False)


def write_recipe(folder):
    path = folder / "recipe.yaml"
    path.write_text("model: {name: cifar_resnet20}\nname: run\n")
    return str(path)


# data


def test_real_masks_are_numbered_without_gaps(data_root):
    _, test = open_splits("camvid", data_root, None)
    assert len(test) == 16
    assert len(test.classes) == 11
    raw = np.asarray(Image.open(test.samples[0].mask))
    np.testing.assert_array_equal(test.mask(0), np.where(raw == 11, IGNORE, raw))


def test_published_folders(tmp_path):
    image, mask = squares(0)
    counted_from_one = np.where(mask == IGNORE, 0, mask + 1)
    for split in ("training", "validation"):
        write_image(tmp_path / "ade/images" / split / "a.png", image)
        write_image(tmp_path / "ade/annotations" / split / "a.png", counted_from_one)
    train, _ = open_splits("ade20k", tmp_path / "ade", None)
    np.testing.assert_array_equal(train.mask(0), mask)
    assert len(train.classes) == 150


BROKEN = {
    "size": "0.png has 60 x 48 pixels",
    "class": "0.png has the value 7",
    "missing": "has no mask",
    "damaged": "cannot read",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_bad_files_are_found_before_training(tmp_path, broken):
    image, mask = squares(0)
    write_pair(tmp_path, "1", image, mask, "val")
    wrong = {"size": mask[:, :60], "class": np.where(mask == 1, 7, mask)}
    write_pair(tmp_path, "0", image, wrong.get(broken, mask))
    if broken == "missing":
        (tmp_path / "train/masks/0.png").unlink()
    if broken == "damaged":
        (tmp_path / "train/masks/0.png").write_bytes(b"no image")
    (tmp_path / "classes.txt").write_bytes(b"a\nb\n")

    def check():
        for part in open_splits("masks", tmp_path, None):
            part.check()

    refused(BROKEN[broken], check)


MASK = np.tile(np.arange(4, dtype=np.uint8), (6, 3))
"""A mask of four classes, 12 pixels wide and 6 high."""


def test_masks_of_every_depth_are_read_as_they_are(tmp_path):
    for name, kind in (("m.png", np.uint16), ("m.tif", np.int32), ("m.tif", np.float32)):
        Image.fromarray(MASK.astype(kind)).save(tmp_path / name)
        values = read_mask(tmp_path / name)
        np.testing.assert_array_equal(values, MASK)
        assert values.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "pixels", "message"),
    [
        ("m.tif", MASK.astype(np.int32) - 1, "the value -1;"),
        ("m.tif", MASK.astype(np.float32) / 2, "the value 0.5;"),
        ("m.jpg", MASK, "changes the numbers of classes; save masks as PNG"),
        ("m.png", np.stack([MASK] * 3, -1), "has 3 channels"),
    ],
)
def test_masks_with_other_values_are_refused(tmp_path, name, pixels, message):
    for kind in ("images", "masks"):
        (tmp_path / "train" / kind).mkdir(parents=True)
    Image.new("RGB", (12, 6)).save(tmp_path / "train" / "images" / "m.png")
    Image.fromarray(pixels).save(tmp_path / "train" / "masks" / name)
    said = f"{re.escape(name)} .*{message}"
    refused(said, lambda: open_masks("masks", "train", tmp_path).check())


def test_a_folder_is_tested_on_the_part_that_training_left_out(tmp_path):
    for seed in range(12):
        write_pair(tmp_path, f"{seed}", *squares(seed), ".")
    train, test = open_splits("masks", tmp_path, 0.3)
    assert len(train) + len(test) == 12
    assert len(train.classes) == 2
    again = open_test_pairs("masks", tmp_path, 0.3, None, 12)
    assert again.samples == test.samples
    said = r"has 12 images, it had 13 in training: the 2 .* are used"
    with pytest.warns(DataWarning, match=said):
        again = open_test_pairs("masks", tmp_path, 0.3, None, 13)
    assert again.samples == test.samples
    assert len(open_test_pairs("masks", tmp_path, None, 5)) == 5  # of the whole folder

    video = tmp_path / "video"
    for scene in "abcdef":
        write_pair(video, f"{scene}/frame", *squares(0), ".")
    for part in open_splits("masks", video, 0.5):
        assert len(part) > 0  # not by "frame" alone

    binary = tmp_path / "binary"
    image, mask = squares(0)
    write_pair(binary, "0", image, 255 * (mask == 1))
    (binary / "classes.txt").write_text("background\nobject\n")
    said = "have one class, and 255, which stands for no class"
    refused(said, masks("train", binary).check)


# augmentation


def test_joint_augmentation_keeps_masks_on_their_images():
    part = SegmentationPart(crop=(40, 40), resize=None, photometric=False, category_share=1.0)
    transform = TrainTransform(part, (0.0,) * 3, (1.0,) * 3)
    image, mask = squares(3, 96, 128)
    image[mask == 1] = 255
    image[mask != 1] = 0
    x = tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1).byte())
    pair = Pair(x, tv_tensors.Mask(torch.from_numpy(mask)))
    for seed in range(12):
        torch.manual_seed(seed)
        x, y = transform(pair)
        assert x.shape == (3, 40, 40)
        assert y.shape == (40, 40)
        valid = y != IGNORE
        agrees = (x[0] > 0.5) == (y == 1)
        assert agrees[valid].float().mean() > 0.9
        assert (x[:, ~valid].abs() < 1e-6).all()  # the border, which is black, and the padding


def test_what_pads_a_small_image_has_no_class():
    part = SegmentationPart(
        crop=(40, 40), resize=None, ratio=(1.0, 1.0), photometric=False, category_share=1.0
    )
    image = torch.full((3, 24, 40), 255, dtype=torch.uint8)
    mask = torch.ones(24, 40, dtype=torch.int64)
    transform = TrainTransform(part, (0.0,) * 3, (1.0,) * 3)
    x, y = transform(Pair(tv_tensors.Image(image), tv_tensors.Mask(mask)))
    rows = torch.arange(40)[:, None].expand(40, 40)
    assert torch.equal(y == IGNORE, rows >= 24)
    assert torch.equal(x[0] == 0, y == IGNORE)


def test_sizes_and_capped_crops():
    assert scaled_size((512, 683), (2048, 512)) == (512, 683)
    assert scaled_size((300, 2000), (2048, 512)) == (307, 2048)
    mask = tv_tensors.Mask(torch.zeros(64, 64, dtype=torch.int64))
    mask[:, 60:] = 1

    def mean_share_of_class_0(cap):
        crop = CappedCrop((16, 16), cap)
        shares = [(crop(mask) == 0).float().mean() for _ in range(40)]
        return np.mean(shares)

    torch.manual_seed(0)
    assert mean_share_of_class_0(0.9) < mean_share_of_class_0(1.0)
    resize = RatioResize((64, 64), (0.5, 2.0))
    heights = [len(resize(mask)) for _ in range(20)]
    assert 32 <= min(heights) < 50 < max(heights) <= 128
    # a third of the columns: the middle one of each three
    ramp = tv_tensors.Mask(torch.arange(63).expand(3, 63))
    narrow = RatioResize((21, 1), (1.0, 1.0))(ramp)
    assert narrow[0].tolist() == list(range(1, 63, 3))


# windows, metrics and losses


def test_windows_cover_the_image_and_average():
    assert window_starts(1024, 512, 341) == [0, 341, 512]
    assert window_starts(300, 512, 341) == [0]
    assert window_starts(512, 512, 341) == [0]

    class Where(torch.nn.Module):
        def forward(self, x):
            return x[:, :1] * 2 + 1

    model = Where()
    x = torch.randn(2, 3, 37, 50)
    torch.testing.assert_close(slide(model, x, (16, 16), (10, 7), batch_size=5), model(x))
    torch.testing.assert_close(slide(model, x, (64, 16), (10, 16)), model(x))


def test_metrics_equal_torchmetrics():
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index

    torch.manual_seed(0)
    truth = torch.randint(0, 5, (3, 20, 30))
    predicted = torch.randint(0, 5, (3, 20, 30))
    predicted[truth == 2] = 2
    truth[:, :3] = IGNORE
    counts = Confusion(6)  # the sixth class does not occur
    for of_image, prediction in zip(truth, predicted, strict=True):
        counts.add(of_image, prediction)
    options = dict(num_classes=6, ignore_index=IGNORE)
    metrics = counts.metrics()
    per_class = multiclass_jaccard_index(predicted, truth, average="none", **options)
    torch.testing.assert_close(counts.ious()[:5].float(), per_class[:5])
    macro = multiclass_jaccard_index(predicted, truth, average="macro", **options)
    assert metrics["miou"] == pytest.approx(100 * macro.item(), abs=1e-4)
    micro = multiclass_accuracy(predicted, truth, average="micro", **options)
    assert metrics["pixel_accuracy"] == pytest.approx(100 * micro.item(), abs=1e-4)
    mean_recall = counts.recalls()[:5].mean().item()
    assert metrics["mean_accuracy"] == pytest.approx(100 * mean_recall)
    assert [row["iou"] is None for row in counts.rows("abcdef")] == [False] * 5 + [True]


def test_losses_against_their_formulas():
    logits = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    mask = torch.randint(0, 4, (2, 16, 16))
    mask[0, :5] = IGNORE
    big = F.interpolate(logits, (16, 16), mode="bilinear", align_corners=False).float()
    expected = F.cross_entropy(big, mask, ignore_index=IGNORE)
    torch.testing.assert_close(pixel_cross_entropy(logits, mask), expected)
    assert pixel_cross_entropy(logits, torch.full_like(mask, IGNORE)) == 0
    student = torch.randn(2, 3, 4, 5)
    teacher = torch.randn(2, 3, 4, 5)
    expected = 0.0
    for b, k in np.ndindex(2, 3):
        target = teacher[b, k].flatten().softmax(0)
        own = student[b, k].flatten().log_softmax(0)
        expected -= (target * own).sum() / (3 * 2)
    torch.testing.assert_close(channel_distillation(student, teacher), expected)


# runs


def test_a_run_its_checkpoint_and_its_evaluation(run, folder):
    assert {"miou", "mean_accuracy", "pixel_accuracy", "images", "loss"} <= run.metrics.keys()
    assert run.metrics["images"] == 2
    log = (run.folder / "log.jsonl").read_text()
    # three steps are two passes, the second cut short
    assert [json.loads(line)["epoch"] for line in log.splitlines()] == [1, 2]
    model = iso.load(run.folder / "model.safetensors")
    assert model.pretrained_cfg["task"]["crop"] == [32, 32]
    assert model.pretrained_cfg["label_names"] == ["ground", "square"]
    done = isomorph("evaluate", run.folder, "--root", folder, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    first, *classes = json.loads(done.stdout)["rows"]
    assert first["miou"] == pytest.approx(run.metrics["miou"])
    assert [row["class"] for row in classes] == ["ground", "square"]


def test_distillation_starts_near_no_loss_from_itself(run, folder, tmp_path):
    teacher_file = run.folder / "model.safetensors"
    paths = [f"data.root={folder}", f"task.teacher={teacher_file}", f"out={tmp_path / 'r'}"]
    recipe = iso.load_recipe(write_recipe(tmp_path), [*SMALL, *paths, "epochs=1"])
    opened = Run(recipe, ALONE)
    images, masks, _ = opened.next_part()
    losses = opened.loss_module(images, masks)
    losses["loss"].backward()
    parts = losses["task_loss"] + 0.4 * losses["auxiliary_loss"] + 10 * losses["kd_loss"]
    torch.testing.assert_close(losses["loss"], parts)
    assert not opened.loss_module.train().teacher.training
    teacher = opened.loss_module.teacher.model
    for parameter in teacher.parameters():
        assert parameter.grad is None

    # the teacher sees images in its own normalisation
    student = opened.loss_module.trainable_module
    for net, spread in ((student, 0.5), (teacher, 0.25)):
        net.pretrained_cfg = {**net.pretrained_cfg, "mean": (0.5, 0.5, 0.5), "std": (spread,) * 3}
    seen = []
    teacher.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loss = SegmentationLoss(student, SegmentationPart(crop=32), torch.device("cpu"), teacher)
    loss(images, masks)
    torch.testing.assert_close(seen[0], 2 * images)


def test_predict_writes_an_overlay_and_a_mask(run, folder, tmp_path):
    image = folder / "val" / "images" / "4.png"
    out = tmp_path / "y.png"
    done = isomorph("predict", run.folder, "--image", image, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert sum(row["share"] for row in rows) == pytest.approx(100)
    with Image.open(out) as overlay, Image.open(tmp_path / "y-mask.png") as written:
        picture = np.asarray(overlay.convert("RGB"))
        mask = np.asarray(written)
    # below the image a legend, a row for every class
    assert picture.shape[0] == 48 + 28 * len(rows)
    assert mask.shape == (48, 64)
    assert set(np.unique(mask)) <= {0, 1}


def test_outputs_that_are_not_finite_have_no_metric(run, folder):
    model = iso.load(run.folder / "model.safetensors")
    model.head.classifier.bias.data[0] = float("nan")
    with pytest.raises(NotFinite, match="outputs are not finite"):
        iso.evaluate(model, folder)


def test_schedules_by_iteration():
    def rates(steps, iterations=None, each=5, **fields):
        optim = OptimPart(lr=1.0, name="sgd", **fields)
        optimizer = build_optimizer(torch.nn.Linear(2, 2), optim)
        scheduler = build_scheduler(optimizer, optim, 4, each, iterations)
        found = []
        for step in range(steps):
            scheduler.step_update(step)
            found.append(optimizer.param_groups[0]["lr"])
        return found

    linear = rates(
        20, 20, schedule="linear", schedule_from="start", warmup_iterations=4, warmup_start=1e-6
    )
    assert linear[0] == pytest.approx(1e-6)
    assert linear[4:] == pytest.approx([1 - t / 20 for t in range(4, 20)])

    three_steps = pytest.approx([1] * 10 + [0.1] * 5 + [0.01] * 5)
    assert rates(20, 20, schedule="step", milestones=[10, 15]) == three_steps
    assert rates(20, schedule="step", milestones=[2, 3]) == three_steps
    after_one_epoch = rates(28, each=26, schedule="step", milestones=[1])
    assert after_one_epoch[25:] == pytest.approx([1, 0.1, 0.1])


def test_every_process_needs_two_images(folder, tmp_path, monkeypatch):
    fields = [*SMALL, f"data.root={folder}", "iterations=3"]
    recipe = iso.load_recipe(write_recipe(tmp_path), fields)
    task = recipe.task.task
    train, _ = task.open_data(recipe)
    model = task.build_model(recipe, train, True)
    config = task.data_config(recipe, model)
    task.check_model(recipe, model, config)
    monkeypatch.setenv("WORLD_SIZE", str(recipe.data.batch_size))
    refused("two images at once", task.check_model, recipe, model, config)
