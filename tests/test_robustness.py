"""The robustness suite: right means, right mCE, the same cells however they are run, resumed, stored or refused."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import nn

import isomorph as iso
from isomorph.lab.data import CORRUPTION_CATEGORIES, EXTRA_CORRUPTIONS
from isomorph.lab.data.corruptions.corrupt import IMAGENET_C_CORRUPTIONS, corrupt, corruption_seed
from isomorph.lab.data.loaders import eval_loader, eval_transform
from isomorph.lab.data.sources import Source
from isomorph.lab.evaluation.robustness.scores import (
    ALEXNET,
    ALEXNET_CLEAN,
    compare_to_baseline,
    robustness_summary,
)
from isomorph.models.cifar_resnet import CIFAR10_CLASSES
from refusals import refused

FEW = dict(corruptions=["fog", "gaussian_noise", "pixelate"], severities=(1, 5))
BY_SEVERITY = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.94870, 0.98720, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.58430, 0.70048, 0.82108, 0.89750, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.91870, 0.94952),
    "frost": (0.61390, 0.79734, 0.88790, 0.89942, 0.93430),
    "fog": (0.67474, 0.76050, 0.84378, 0.87260, 0.94500),
    "brightness": (0.45140, 0.48502, 0.54048, 0.62166, 0.72440),
    "contrast": (0.64548, 0.76150, 0.88874, 0.97760, 0.99270),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.54620, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
}
"""AlexNet's errors by severity, as its authors gave them (github hendrycks/robustness, issue 10)."""


def cells_of(errors):
    cells = {}
    for name, row in errors.items():
        for severity, error in enumerate(row, 1):
            cell = {"corruption": name, "severity": severity, "images": 7}
            cells[name, severity] = cell | {"top1": 100 * (1 - error)}
    return cells


def source_of(number=12, classes=10, side=32):
    rng = np.random.default_rng(0)
    pictures = [
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)) for _ in range(number)
    ]
    return Source(
        pictures, [i % classes for i in range(number)], [f"class {i}" for i in range(classes)]
    )


@pytest.fixture
def net():
    torch.manual_seed(1)
    return timm.create_model("cifar_resnet20").train()


class Brightness(nn.Module):
    """Says class 1 for a picture brighter than the middle on average; 1000 classes at 224 px, or as told."""

    def __init__(self, classes=1000, side=224, fixed=False):
        super().__init__()
        self.num_classes = classes
        self.middle = nn.Parameter(torch.zeros(()))
        self.pretrained_cfg = dict(
            input_size=(3, side, side), mean=(0.5,) * 3, std=(0.5,) * 3, fixed_input_size=fixed
        )
        self.sizes = set()

    def forward(self, x):
        self.sizes.add(tuple(x.shape[-2:]))
        logits = torch.zeros(len(x), self.num_classes)
        logits[:, 1] = x.mean((1, 2, 3)) - self.middle
        logits[:, 0] = self.middle - x.mean((1, 2, 3))
        return logits


def test_alexnet_is_a_hundred_by_definition():
    import torchvision

    for name, errors in BY_SEVERITY.items():
        assert ALEXNET[name] == pytest.approx(100 * np.mean(errors), abs=1e-3)
    kept = torchvision.models.AlexNet_Weights.IMAGENET1K_V1.meta["_metrics"]["ImageNet-1K"]["acc@1"]
    assert pytest.approx(100 - kept) == ALEXNET_CLEAN
    found = robustness_summary(cells_of(BY_SEVERITY), {"top1": kept}, imagenet=True)
    assert found["mce"] == pytest.approx(100, abs=1e-3)
    assert found["relative_mce"] == pytest.approx(100, abs=1e-3)
    assert found["mean_error_unnormalised"] == pytest.approx(
        np.mean(list(ALEXNET.values())), abs=1e-3
    )
    whole = cells_of(BY_SEVERITY)
    del whole["fog", 3]
    assert "mce" not in robustness_summary(whole, None, imagenet=True)


def test_mce_is_a_mean_of_ratios():
    half = {name: [error / 2 for error in row] for name, row in BY_SEVERITY.items()}
    found = robustness_summary(
        cells_of({**half, "fog": BY_SEVERITY["fog"]}), {"top1": 80.0}, imagenet=True
    )
    assert found["mce"] == pytest.approx((14 * 50 + 100) / 15, abs=1e-3)
    assert found["ce"]["fog"] == pytest.approx(100, abs=1e-3)
    relative = [
        (found["ce"][n] / 100 * ALEXNET[n] - 20) / (ALEXNET[n] - ALEXNET_CLEAN) for n in ALEXNET
    ]
    assert found["relative_mce"] == pytest.approx(100 * np.mean(relative), abs=1e-3)
    found = robustness_summary(cells_of({"brightness": [1 - 0.6802] * 5}), None, imagenet=False)
    resnet50 = 100 * found["mean_error_unnormalised"] / ALEXNET["brightness"]
    assert resnet50 == pytest.approx(56.64, abs=0.01)


def test_means_by_category_and_severity():
    rng = np.random.default_rng(0)
    errors = {name: rng.random(5) for name in (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)}
    found = robustness_summary(cells_of(errors), None, imagenet=False)
    for category, names in {**CORRUPTION_CATEGORIES, "extra": EXTRA_CORRUPTIONS}.items():
        expected = 100 * (1 - np.mean([errors[name] for name in names]))
        assert found["by_category"][category] == pytest.approx(expected)
    suite = 100 * (1 - np.array([errors[name] for name in IMAGENET_C_CORRUPTIONS]))
    assert list(found["by_severity"].values()) == pytest.approx(suite.mean(0).tolist())
    assert found["mean_top1"] == pytest.approx(suite.mean())
    only = robustness_summary(cells_of({"spatter": [0.1] * 5}), None, imagenet=False)
    assert only["by_severity"] == pytest.approx(dict.fromkeys(range(1, 6), 90))
    assert "mean_top1" not in only


def test_the_gain_over_a_baseline():
    base = cells_of(BY_SEVERITY)
    ours = cells_of({name: [0.8 * error for error in row] for name, row in BY_SEVERITY.items()})
    found = compare_to_baseline(ours, base, "base")
    assert found["error_ratio"] == pytest.approx(80)
    mean = np.mean(list(BY_SEVERITY.values()), 0)
    for severity, row in found["by_severity"].items():
        assert row["points"] == pytest.approx(20 * mean[severity - 1])
        assert row["relative"] == pytest.approx(20 * mean[severity - 1] / (1 - mean[severity - 1]))


def test_cells_are_what_evaluate_says(net):
    source = source_of()
    found = iso.robustness(net, source, **FEW, batch_size=5)
    assert net.training
    config = (
        net.pretrained_cfg if isinstance(net.pretrained_cfg, dict) else vars(net.pretrained_cfg)
    )
    config = {
        key: config[key] for key in ("input_size", "mean", "std", "interpolation", "crop_pct")
    }
    assert len(found["cells"]) == 6
    clean = iso.evaluate(net, eval_loader(source, config))
    transform = eval_transform(config)
    pixels = [np.asarray(source.image(index)) for index in range(len(source))]
    for cell in (found["clean"], *found["cells"]):
        expected = clean
        if cell is not found["clean"]:
            which = cell["corruption"], cell["severity"]
            seen = [
                corrupt(each, *which, corruption_seed(*which, index))
                for index, each in enumerate(pixels)
            ]
            images = torch.stack([transform(Image.fromarray(each)) for each in seen])
            expected = iso.evaluate(net, [(images, torch.tensor(source.labels))])
        assert {*expected} <= {*cell}
        for key in expected:
            assert cell[key] == pytest.approx(expected[key], rel=1e-4), key
    assert "mce" not in found


def test_a_killed_run_goes_on(net, tmp_path):
    source = source_of()
    out = tmp_path / "cells.jsonl"
    whole = iso.robustness(net, source, **FEW)

    def stop(done, total, doing):
        if doing == "gaussian_noise":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iso.robustness(net, source, **FEW, out=out, progress=stop)
    assert len(out.read_text().splitlines()) == 1 + 1 + 2  # whose, clean, fog
    with out.open("a") as file:
        file.write('{"corruption": "gaussian_noi')
    again = iso.robustness(net, source, **FEW, out=out)
    assert again == whole | {"resumed": 2}
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 8


def test_another_models_file_is_refused(net, tmp_path):
    source = source_of()
    out = tmp_path / "cells.jsonl"
    one = dict(corruptions=["fog"], severities=[2], out=out)
    iso.robustness(net, source, **one)
    refused(
        "cells of other images: seed 0, here 1; use another",
        iso.robustness,
        net,
        source,
        **one,
        seed=1,
    )
    refused("cells of other images: source ", iso.robustness, net, source_of(13), **one)
    net.conv1.stride = (2, 2)  # no tensor has it
    refused("with other weights; use another", iso.robustness, net, source, **one)
    net.conv1.stride = (1, 1)
    config = net.pretrained_cfg
    net.pretrained_cfg = net.pretrained_cfg | dict(std=(1.0, 1.0, 1.0))
    refused("with other weights; use another", iso.robustness, net, source, **one)
    net.pretrained_cfg = config | dict(crop_pct=0.5)
    refused("cells of other images: pictures ", iso.robustness, net, source, **one)
    net.pretrained_cfg = config
    nn.init.zeros_(net.conv1.weight)
    before = out.read_text()
    refused(r"has cells of .* with other weights; use another", iso.robustness, net, source, **one)
    assert out.read_text() == before


ONE = dict(corruptions=["brightness"], severities=[3])


def test_imagenet_is_shown_as_imagenet_c_was_made():
    source = source_of(2, 1000, 300)
    source.classes = tuple(ImageNetInfo().label_names())
    model = Brightness(side=288)
    found = iso.robustness(model, source, **ONE)
    assert model.sizes == {(224, 224)}
    assert found["size"] == [224, 224]
    assert "256/224" in found["pictures"]
    model = Brightness(side=96, fixed=True)
    iso.robustness(model, source, **ONE)
    assert model.sizes == {(96, 96)}
    model = Brightness(classes=10, side=48)
    assert "own test crop" in iso.robustness(model, source_of(), **ONE)["pictures"]
    assert model.sizes == {(48, 48)}


@pytest.fixture
def published(tmp_path):
    """Two corruptions, one of them below its category, two of ImageNet's classes: 0 is black, 1 white."""
    names = ImageNetInfo().label_names()
    for place in ("fog", "noise/gaussian_noise"):
        for severity in (1, 2):
            for label, level in ((0, 0), (1, 255 if severity == 1 else 0)):
                folder = tmp_path / place / str(severity) / names[label]
                folder.mkdir(parents=True)
                for i in range(3):
                    Image.new("RGB", (224, 224), (level,) * 3).save(
                        folder / f"ILSVRC2012_val_{i:08}.JPEG"
                    )
    return tmp_path


def test_the_published_folder(published):
    model = Brightness()
    found = iso.robustness(
        model, folder=published, corruptions=["fog", "gaussian_noise"], severities=[1, 2]
    )
    # at severity 2 white is black
    assert [cell["top1"] for cell in found["cells"]] == [100, 50, 100, 50]
    assert found["images"] == 6
    assert found["clean"] is None
    other = iso.robustness(
        Brightness(classes=2, side=64), folder=published, corruptions=["fog"], severities=[1]
    )
    assert other["cells"][0]["top1"] == 100


@pytest.mark.parametrize(
    ("classes", "side"), [(1000, 224), (2, 64)], ids=["ImageNet-C", "Tiny-ImageNet-C"]
)
def test_published_pixels_are_neither_resized_nor_cropped_and_classes_are_the_model_s(
    classes, side, tmp_path
):
    names = ImageNetInfo().label_names()[:2]
    seen = []
    pixels = np.random.default_rng(0).integers(64, 255, (side, side, 3), np.uint8)
    for name in names:
        (tmp_path / "fog/1" / name).mkdir(parents=True)
        Image.fromarray(pixels if name == names[0] else 0 * pixels).save(
            tmp_path / "fog/1" / name / "a.png"
        )
    model = Brightness(classes=classes, side=side)
    model.pretrained_cfg |= dict(label_names=names[::-1]) if classes == 2 else {}
    model.register_forward_pre_hook(lambda model, inputs: seen.extend(inputs[0]))
    found = iso.robustness(
        model, folder=tmp_path, corruptions=["fog"], severities=[1], partial=True
    )
    assert (127.5 + 127.5 * seen[-2].permute(1, 2, 0) - torch.from_numpy(pixels)).abs().max() < 1e-3
    if classes == 2:  # the noise is brighter: class 1 of the model, the first folder
        assert found["size"] == [64, 64]
        assert found["cells"][0]["top1"] == 100


@pytest.fixture
def arrays(tmp_path):
    """CIFAR-C in small: 4 images at 5 severities, black ones of class 0 and white ones of class 1 that darken."""
    labels = np.tile([0, 1, 0, 1], 5)
    for name, dark in (("fog", 4), ("saturate", 2)):
        pictures = np.zeros((20, 32, 32, 3), np.uint8)
        pictures[(labels == 1) & (np.arange(20) < 4 * dark)] = 255  # black above that severity
        np.save(tmp_path / f"{name}.npy", pictures)
    np.save(tmp_path / "labels.npy", labels)
    return tmp_path


def test_the_published_arrays(arrays):
    wanted = dict(suite="cifar-c", folder=arrays, corruptions=["fog", "saturate"])
    # which does not say how many classes it has
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))
    assert iso.robustness(flat, **wanted, size=32)["size"] == [32, 32]
    found = iso.robustness(Brightness(2, 32), **wanted, workers=1)
    top1 = {(cell["corruption"], cell["severity"]): cell["top1"] for cell in found["cells"]}
    assert [top1["fog", s] for s in range(1, 6)] == [100, 100, 100, 100, 50]
    assert [top1["saturate", s] for s in range(1, 6)] == [100, 100, 50, 50, 50]
    assert found["suite"] == "cifar-c"
    assert found["size"] == [32, 32]
    assert found["images"] == 4
    assert found["mean_error_unnormalised"] == 10


def test_clean_images_of_another_folder_are_measured_again(published, tmp_path):
    wanted = dict(folder=published, corruptions=["fog"], severities=[1], out=tmp_path / "r.jsonl")
    white = Image.new("RGB", (224, 224), (255,) * 3)
    black = Image.new("RGB", (224, 224))
    names = ImageNetInfo().label_names()[:2]
    right = Source([black, white], np.array([0, 1]), names)
    wrong = Source([white, black], np.array([0, 1]), names)
    found = [
        iso.robustness(Brightness(), source, **wanted, partial=True)
        for source in (right, wrong, right, None)
    ]
    assert [each["clean"] and each["clean"]["top1"] for each in found] == [100, 0, 100, 100]
    assert [each["resumed"] for each in found] == [0, 1, 1, 1]


def test_a_file_that_ends_in_its_first_line_starts_anew(net, tmp_path):
    out = tmp_path / "cells.jsonl"
    whole = iso.robustness(net, source_of(), **ONE, out=out)
    out.write_text(out.read_text()[:40])
    assert iso.robustness(net, source_of(), **ONE, out=out) == whole
    out.write_text("something else")
    refused("is not a result file", iso.robustness, net, source_of(), **ONE, out=out)


@pytest.mark.parametrize("order", [1, -1])
def test_cifar_c_is_scored_by_the_names_of_classes(order, tmp_path):
    labels = np.tile(np.arange(10), 5)
    pictures = np.zeros((50, 32, 32, 3), np.uint8)
    pictures[labels == 1] = 255
    np.save(tmp_path / "fog.npy", pictures)
    np.save(tmp_path / "labels.npy", labels)
    model = Brightness(10, 32)
    model.pretrained_cfg |= dict(label_names=CIFAR10_CLASSES[::order])
    wanted = dict(suite="cifar-c", folder=tmp_path, corruptions=["fog"], severities=[1])
    found = iso.robustness(model, **wanted)
    # black is the model's first class, white its second: airplane and automobile, or truck and ship
    assert found["cells"][0]["top1"] == (20 if order == 1 else 10)
    model.pretrained_cfg |= dict(label_names=["car", *CIFAR10_CLASSES[1:]])
    refused("are not CIFAR-10's", iso.robustness, model, **wanted)
    model.pretrained_cfg |= dict(label_names=[f"Klasse {number}" for number in range(10)])
    refused("are not CIFAR-10's", iso.robustness, model, **wanted)
