"""The ImageNet suites on images that carry their label in their pixels: a wrong mapping is a wrong answer."""

import csv
import io
import json
import multiprocessing
import tarfile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import isomorph as iso
from isomorph.cli import main
from isomorph.errors import DataWarning
from isomorph.lab.data.imagenet_labels import imagenet_labels
from isomorph.lab.evaluation import Sweep, evaluate_suites, open_suites
from isomorph.lab.evaluation.model_data import run_sweep, with_model_labels
from refusals import refused

LABELS = imagenet_labels()
KEPT = {name: LABELS.subsets[name] for name in ("imagenet-a", "imagenet-r")}


class Reads(nn.Module):
    """Reads red + 256 green of an image as its label and gives that one 2; class `tempted` of all gets `pull`."""

    def __init__(self, num_classes=1000, tempted=None, pull=5.0):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_classes))
        self.num_classes = num_classes
        self.passes = 0
        self.pretrained_cfg = dict(
            input_size=(3, 4, 4),
            mean=(0, 0, 0),
            std=(1, 1, 1),
            crop_pct=1.0,
            interpolation="nearest",
        )
        if tempted is not None:
            self.logits.data[tempted] = pull

    def forward(self, x):
        self.passes += 1
        red, green = (255 * x[:, :2, 1, 1]).round().long().unbind(1)
        return self.logits + 2 * torch.eye(len(self.logits))[red + 256 * green]


def pixels(label):
    return Image.new("RGB", (4, 4), (label % 256, label // 256, 7))


def png(label):
    file = io.BytesIO()
    pixels(label).save(file, "png")
    return file.getvalue()


def folders(top, named):
    """One image of its label's colour in a folder of each name."""
    for name, label in named:
        (top / name).mkdir(parents=True)
        pixels(label).save(top / name / "1.png")
    return top


def by_wnid(top, labels):
    return folders(top, [(LABELS.wnids[label], label) for label in labels])


def validation(top, numbers, label=lambda number: int(LABELS.real[number - 1, 0])):
    """ImageNet's validation images of these numbers, in folders of classes, coloured by ReaL's first label."""
    for number in numbers:
        folder = top / LABELS.wnids[number % 1000]
        folder.mkdir(parents=True, exist_ok=True)
        pixels(max(label(number), 0)).save(folder / f"ILSVRC2012_val_{number:08d}.png")
    return top


def shards(top, named, classes=None):
    """A webdataset of (key, .cls, label of the colour)."""
    top.mkdir()
    with tarfile.open(top / "val-000.tar", "w") as archive:
        for key, cls, label in named:
            for ending, data in (("png", png(label)), ("cls", str(cls).encode())):
                entry = tarfile.TarInfo(f"{key}.{ending}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    if classes:
        (top / "classnames.txt").write_text("\n".join(classes))
    return top


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def one_row(model, suite, folder, **more):
    (row,) = evaluate_suites(model, f"{suite}={folder}", partial=True, **more)
    return row


def test_the_shipped_labels_are_the_published_ones(data_root):
    folder = data_root / "imagenet_labels"
    assert list(LABELS.wnids) == (folder / "imagenet1k_wnids.txt").read_text().split()
    assert list(LABELS.wnids) == sorted(set(LABELS.wnids))
    real = json.loads((folder / "real.json").read_text())
    assert [[label for label in row if label >= 0] for row in LABELS.real.tolist()] == real
    for name, kept in KEPT.items():
        rows = list(
            csv.DictReader(
                (folder / f"{name.replace('-', '_')}_classes.csv").read_text().splitlines()
            )
        )
        assert [(int(row["imagenet_label"]), row["wnid"]) for row in rows] == [
            (label, LABELS.wnids[label]) for label in kept
        ]


def test_every_form_and_name_of_the_classes_gives_the_same_labels(tmp_path):
    some = range(0, 1000, 37)
    english = timm.data.ImageNetInfo("imagenet-1k").label_descriptions()
    places = [
        by_wnid(tmp_path / "folder", some),
        by_wnid(tmp_path / "with_val/val", some).parent,
        folders(tmp_path / "numbers", [(str(label), label) for label in some]),
        shards(tmp_path / "shards", [(i, label, label) for i, label in enumerate(reversed(some))]),
        shards(tmp_path / "english", [(i, label, label) for i, label in enumerate(some)], english),
    ]
    with tarfile.open(tmp_path / "val.tar", "w") as archive:
        archive.add(tmp_path / "folder", "val")
    (tmp_path / "tar").mkdir()
    (tmp_path / "val.tar").rename(tmp_path / "tar/val.tar")
    for place in [*places, tmp_path / "tar"]:
        row = one_row(Reads(), "imagenet", place)
        assert (row["top1"], row["images"]) == (100, len(some)), place


def test_the_three_sets_of_imagenet_v2_are_told_apart(tmp_path):
    """TDRL Table 6: each by its name, in the folder that its archive unpacks to; imagenet-v2 is the first."""
    names = ("imagenet-v2-matched-frequency", "imagenet-v2-threshold-0.7", "imagenet-v2-top-images")
    for drawn, images in (("matched-frequency", 2), ("threshold0.7", 3), ("top-images", 4)):
        folders(tmp_path / f"imagenetv2-{drawn}-format-val", [(str(n), n) for n in range(images)])
    sets = open_suites([*names, "imagenet-v2"], tmp_path, partial=True)
    found = {}
    for each in sets:
        for view in each.scorings:
            found[view.name] = len(each.source)
    assert found == dict(zip((*names, "imagenet-v2"), (2, 3, 4, 2), strict=True))
    assert len(sets) == 3  # the same images once


@pytest.mark.parametrize("suite", KEPT)
def test_two_hundred_classes_alone_take_part(tmp_path, suite):
    kept = KEPT[suite]
    outside = next(label for label in range(1000) if label not in kept)
    model = Reads(tempted=outside)
    by_wnid(tmp_path / suite, kept)
    positions = shards(tmp_path / "positions", [(i, i, label) for i, label in enumerate(kept)])
    labelled = shards(tmp_path / "labelled", [(i, label, label) for i, label in enumerate(kept)])
    for wanted in (suite, f"{suite}={positions}", f"{suite}={labelled}"):
        (row,) = evaluate_suites(model, wanted, tmp_path, partial=True)
        p = np.exp(2) / (np.exp(2) + 199)
        expected = {"top1": 100, "nll": -np.log(p), "ece": 100 * (1 - p), "images": 200}
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    by_wnid(tmp_path / "imagenet", range(1000))
    assert evaluate_suites(model, "imagenet", tmp_path, partial=True)[0]["top1"] == pytest.approx(
        0.1
    )


def test_real_goes_by_file_names_skips_and_takes_any_label(tmp_path):
    """Against the published metric, image by image, on files in an order that is not that of their numbers."""
    numbers = [*range(1, 200), 49_999, 50_000]
    validation(tmp_path / "imagenet/val", numbers)
    model = Reads()
    last = {n: [label for label in LABELS.real[n - 1].tolist() if label >= 0] for n in numbers}
    kept = [n for n in numbers if last[n]]
    assert len(kept) < len(numbers)
    assert max(map(len, last.values())) > 1
    plain, real = evaluate_suites(model, ["imagenet,real"], tmp_path, partial=True, batch_size=64)
    assert real == {"suite": "real", "top1": 100, "images": len(kept)}
    assert plain["images"] == len(numbers)
    assert model.passes == -(-len(numbers) // 64)  # one pass serves both
    right = sum(max(LABELS.real[n - 1, 0], 0) == n % 1000 for n in numbers)
    assert plain["top1"] == pytest.approx(100 * right / len(numbers))
    for pick in (lambda n: last[n][-1] if last[n] else 0, lambda n: n * 7 % 1000):
        other = validation(tmp_path / f"{pick(5)}", numbers, pick)
        expected = sum(pick(n) in last[n] for n in kept) / len(kept)
        assert one_row(model, "real", other)["top1"] == pytest.approx(100 * expected)


def test_sizes_times_ratios_and_a_table_of_classes(tmp_path):
    by_wnid(tmp_path / "sketch", [3, 500])
    sets = open_suites(["imagenet-sketch"], tmp_path, partial=True)
    model = Reads(tempted=500, pull=3)
    rows, classes = run_sweep(model, sets, Sweep([(4, 4), (8, 6)], (1.0, 0.5)))
    places = []
    for size in ([4, 4], [8, 6]):
        for ratio in (1, 0.5):
            places.append((size, ratio))
    assert [(row["size"], row["rfc"]) for row in rows] == places
    assert {row["top1"] for row in rows} == {50}
    assert len(classes) == 8


WRONG = {
    "no wnid": (
        lambda top: folders(top, [("n01440764", 0), ("cat", 1)]),
        "imagenet",
        "has class 'cat'; name classes",
    ),
    "missing classes": (
        lambda top: by_wnid(top, [0, 1]),
        "imagenet",
        "has 2 classes, imagenet has 1,000; .*partial=True",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said_in_one_line(tmp_path, case):
    make, suite, expected = WRONG[case]
    make(tmp_path / "top")
    refused(expected, evaluate_suites, Reads(), f"{suite}={tmp_path / 'top'}")


def test_several_suites_one_table(tmp_path, capsys):
    weights = tmp_path / "cnn.safetensors"
    iso.save(timm.create_model("cifar_resnet20", num_classes=1000), weights)
    validation(tmp_path / "imagenet", [1, 2, 3])
    by_wnid(tmp_path / "elsewhere", KEPT["imagenet-r"][:3])
    asked = [
        "evaluate",
        str(weights),
        "--suite",
        f"imagenet,real,imagenet-r={tmp_path / 'elsewhere'}",
        "--partial",
    ]
    asked += ["--root", str(tmp_path), "--no-cost", "--size", "8", "16x12"]
    with pytest.raises(SystemExit):
        main([*asked, "--json", "--per-class", str(tmp_path / "classes.csv")])
    found = json.loads(capsys.readouterr().out)
    assert [row["suite"] for row in found["rows"]] == ["imagenet", "real", "imagenet-r"] * 2
    assert [row["size"] for row in found["rows"]] == [[8, 8]] * 3 + [[16, 12]] * 3
    table = list(csv.DictReader((tmp_path / "classes.csv").read_text().splitlines()))
    assert {row["suite"] for row in table} == {"imagenet", "imagenet-r"}


def test_a_thousand_folders_named_by_label_numbers_have_these_labels():
    names = sorted(map(str, range(1000)))
    source = iso.data.Source([pixels(0)] * 1000, range(1000), names)
    with pytest.warns(DataWarning, match="are read as ImageNet's label numbers"):
        labels = with_model_labels(source, Reads()).labels
    assert labels.tolist() == list(map(int, names))


def test_the_workers_of_a_point_end_with_it(tmp_path):
    by_wnid(tmp_path / "sketch", [3, 500])
    sets = open_suites(["imagenet-sketch"], tmp_path, partial=True)
    running = []

    def progress(batches, title, total):
        running.append(len(multiprocessing.active_children()))
        return batches

    run_sweep(Reads(), sets, Sweep([(4, 4), (8, 6), (8, 8)]), workers=1, progress=progress)
    assert running == [0, 0, 0]
