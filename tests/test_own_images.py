"""A folder of one's own images as data: with train/ and val/ or not, split, in the order of the model's classes."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps
from torch import nn

import isomorph as iso
from isomorph.checkpoints.model import record_data
from isomorph.errors import DataWarning
from isomorph.lab.data.corruptions.corrupt import fingerprint
from isomorph.lab.data.label_maps import LabelMapSource
from isomorph.lab.data.sources import decode, hash_to_unit, image_name, read_image, upright_size
from isomorph.lab.evaluation.classes import check_same_classes
from isomorph.lab.evaluation.model_data import (
    open_split,
    open_test_images,
    record_root,
    training_root,
    write_csv,
)
from isomorph.lab.tasks.detection.data import Annotations, DetectionSource, ImageRecord
from isomorph.lab.tasks.detection.data import open_annotated as open_boxes
from isomorph.lab.tasks.segmentation.data import Files, MaskedImages, lookup_table, masks
from isomorph.lab.training.classification import CLASSIFICATION
from isomorph.models.input_sizes import evaluation_config
from refusals import refused

CLASSES = ("apple", "pear", "plum")


def images(folder, classes=CLASSES, each=5):
    """A folder of class folders with small images of one colour per class."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            colour = tuple(np.random.default_rng(i).integers(0, 60, 3) + 60 * number)
            Image.new("RGB", (20 + i, 24), colour).save(folder / name / f"{i}.png")
    return folder


def network(classes=CLASSES, **data):
    model = timm.create_model("cifar_resnet20", num_classes=len(classes)).eval()
    record_data(model, {"label_names": list(classes), **data})
    return model


def test_train_and_val_and_the_home_folder(tmp_path, monkeypatch):
    for split, each in (("train", 4), ("validation", 2)):
        images(tmp_path / "photos" / split, each=each)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [len(iso.data.open_source("~/photos", split)) for split in ("train", "test")] == [12, 6]
    shutil.rmtree(tmp_path / "photos" / "validation")
    parts = [
        len(iso.data.open_source("~/photos", split, test_fraction=0.25))
        for split in ("train", "test")
    ]
    assert sum(parts) == 12
    assert min(parts) >= 3


def test_a_split_is_by_class_and_always_the_same(tmp_path):
    photos = images(tmp_path / "photos")
    images(tmp_path / "one", ["only"], each=1)
    shutil.move(tmp_path / "one" / "only", photos / "zucchini")
    train = iso.data.open_source(photos, "train", test_fraction=0.4)
    test = iso.data.open_source(photos, "test", test_fraction=0.4)
    assert np.bincount(train.labels)[3] == 1
    assert min(np.bincount(train.labels)) == 1 <= min(np.bincount(test.labels))
    assert not set(train.ids) & set(test.ids)
    assert test.split == train.split == (0.4, 16)
    again = iso.data.open_source(photos, "test", test_fraction=0.4)
    assert again.ids.tolist() == test.ids.tolist()


def test_images_keep_their_side_of_a_split_when_others_are_added(tmp_path):
    def sides(folder, fraction=0.3):
        parts = {
            split: iso.data.open_source(folder, split, test_fraction=fraction)
            for split in ("train", "test")
        }
        return {
            image_name(part.images, i): split
            for split, part in parts.items()
            for i in range(len(part))
        }

    photos = images(tmp_path / "photos", each=40)
    before = sides(photos)
    for name in CLASSES:
        Image.new("RGB", (8, 8)).save(photos / name / "0000.png")
    after = sides(photos)
    assert len(after) == len(before) + 3
    for name, side in before.items():
        assert after[name] == side
    assert sides(photos.rename(tmp_path / "elsewhere")) == after
    held_out = {n for n, side in sides(tmp_path / "elsewhere", 0.2).items() if side == "test"}
    more = {n for n, side in sides(tmp_path / "elsewhere", 0.4).items() if side == "test"}
    assert held_out < more
    assert 15 < len(held_out) < 35 < len(more) < 65


def test_a_folder_that_has_grown_is_still_tested_on_what_training_left_out(tmp_path):
    photos = images(tmp_path / "photos")
    model = network(split=(0.4, 15))
    before = iso.data.open_source(photos, "test", test_fraction=0.4)
    assert len(open_test_images(model, str(photos), None)) == len(before)
    Image.new("RGB", (8, 8)).save(photos / "pear" / "new.png")
    with pytest.warns(
        DataWarning, match="has 16 images, that of training had 15: those that test_fraction=0.4"
    ):
        assert abs(len(open_test_images(model, str(photos), None)) - len(before)) < 2
    assert len(open_test_images(model, str(photos), None, test_fraction=1)) == 16
    check_same_classes(model, CLASSES)
    refused(
        "class 0 is apple in the model and pear in the data",
        check_same_classes,
        model,
        ("pear", "apple", "plum"),
    )
    (photos / "quince").mkdir()
    refused(
        "quince has no images; add some, or remove the folder",
        iso.data.open_source,
        photos,
        "train",
        test_fraction=0.4,
    )


def test_labels_follow_the_names_of_the_models_classes(tmp_path):
    photos = images(tmp_path / "photos")
    model = network(("plum", "apple", "pear"))
    source = open_test_images(model, str(photos), None)
    assert source.classes == ("plum", "apple", "pear")
    assert np.bincount(source.labels).tolist() == [5, 5, 5]
    assert [source.classes[label] for label in source.labels[::5]] == list(CLASSES)
    shutil.rmtree(photos / "pear")
    part = open_test_images(model, str(photos), None)
    assert sorted(set(part.labels.tolist())) == [0, 1]
    assert iso.evaluate(model, photos)["images"] == 10
    (photos / "plum").rename(photos / "Plum")
    refused(
        r"the data has 2 \(Plum, apple\); rename the folders that differ \(Plum\)",
        iso.evaluate,
        model,
        photos,
    )


class Own(nn.Module):
    """A classifier that says nothing about itself, whose outputs have the form of another library's."""

    def __init__(self, form, classes=3):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, classes))
        self.form = form

    def forward(self, x):
        return self.form(self.net(x))


FORMS = {
    "tensor": lambda logits: logits,
    "attribute": lambda logits: SimpleNamespace(logits=logits),
    "mapping": lambda logits: {"logits": logits},
    "first of several": lambda logits: (logits, logits[:, :, None]),
}


@pytest.mark.parametrize("form", FORMS)
def test_classifiers_of_other_libraries(form, tmp_path):
    photos = iso.data.open_source(images(tmp_path / "photos"), "test")
    model = Own(FORMS[form])
    found = iso.evaluate(model, photos, size=(24, 24))
    loader = iso.data.eval_loader(photos, evaluation_config(model, (24, 24)))
    assert found == iso.evaluate(model, loader) == iso.evaluate(model.net, loader)
    assert "top5" not in found


def test_the_names_in_a_config_of_transformers_number_the_classes(tmp_path):
    photos = images(tmp_path / "photos", ("crane", "pear"))
    model = Own(FORMS["attribute"], 2)
    model.config = SimpleNamespace(id2label={0: "pear", 1: "crane"}, image_size=32)
    model.net[2].weight.data.zero_()
    model.net[2].bias.data = torch.tensor([1.0, 0.0])
    (photos / "pear/0.png").unlink()
    assert iso.evaluate(model, photos)["top1"] == pytest.approx(100 * 4 / 9)
    model.config.id2label = {0: "LABEL_0", 1: "LABEL_1"}
    assert iso.evaluate(model, photos)["top1"] == pytest.approx(100 * 5 / 9)


def test_images_of_odd_sizes_and_modes(tmp_path):
    photos = tmp_path / "photos"
    (photos / "a").mkdir(parents=True)
    ramp = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    colour = Image.fromarray(np.stack([ramp] * 3, -1))
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK"):
        colour.convert(mode).save(photos / "a" / f"{mode}.{'tif' if mode == 'CMYK' else 'png'}")
    colour.convert("P").save(photos / "a" / "transparent.png", transparency=b"\x80" * 256)
    Image.fromarray(ramp.astype(np.uint16) * 257).save(photos / "a" / "sixteen.png")
    Image.new("RGB", (1, 300)).save(photos / "a" / "thin.jpg")
    source = iso.data.open_source(photos, "test")
    pixels = {source.images[i].stem: np.asarray(source.image(i)) for i in range(len(source))}
    for array in pixels.values():
        assert array.ndim == 3
        assert array.shape[2] == 3
    assert np.array_equal(pixels["sixteen"], pixels["L"])
    assert iso.evaluate(timm.create_model("cifar_resnet20", num_classes=1), photos)[
        "images"
    ] == len(source)


@pytest.mark.parametrize("orientation", [2, 3, 5, 6, 9])
def test_images_are_upright_in_every_reader(tmp_path, orientation):
    stored = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 24, 3), np.uint8))
    exif = Image.Exif()
    exif[274] = orientation
    for suffix in ("png", "tif", "jpg", "webp"):
        (tmp_path / "photos/a").mkdir(parents=True, exist_ok=True)
        path = tmp_path / f"photos/a/1.{suffix}"
        stored.save(path, exif=exif, **({} if suffix in ("png", "tif") else {"quality": 100}))
        right = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        with Image.open(path) as opened:
            assert upright_size(opened) == right.size
        for read in (read_image, lambda path: decode(path.read_bytes())):
            assert np.array_equal(read(path), right)
    photos = iso.data.open_source(tmp_path / "photos", "test")
    assert {photos.image(i).size for i in range(4)} == {right.size}
    right = read_image(path := tmp_path / "photos/a/1.png")
    Image.new("L", right.size).save(tmp_path / "mask.png")
    pair = MaskedImages([Files(path, tmp_path / "mask.png")], ["only"], lookup_table([0]))
    pair.check()
    assert np.array_equal(pair.example(0).image.permute(1, 2, 0), right)
    record = ImageRecord(1, "1.png", *right.size[::-1])
    found = DetectionSource(
        tmp_path / "x.json", Annotations([record], {0: "only"}), path.parent, False
    )
    assert np.array_equal(found.image(0), right)
    model = network()
    config = evaluation_config(network())
    right.save(tmp_path / "right.png")
    pages = [iso.report.open_images([each], config)[0] for each in (path, tmp_path / "right.png")]
    assert torch.equal(pages[0].pixels, pages[1].pixels)
    assert CLASSIFICATION.predict(model, path) == CLASSIFICATION.predict(
        model, tmp_path / "right.png"
    )
    if orientation in (5, 6):
        Image.new("L", stored.size).save(tmp_path / "mask.png")
        refused("turned as EXIF data says", pair.check)


def test_files_of_names_in_another_unicode_form_are_found(tmp_path):
    one = "Caf\u00e9"
    other = "Cafe\u0301"
    assert hash_to_unit(one) == hash_to_unit(other)
    for path in ("images/train", "masks/train"):
        (tmp_path / path).mkdir(parents=True)
    Image.new("RGB", (8, 6)).save(tmp_path / f"images/train/{other}.png")
    Image.new("L", (8, 6), 1).save(tmp_path / f"masks/train/{one}.png")
    assert masks("train", tmp_path).example(0).mask.unique().tolist() == [1]
    record = dict(id=1, file_name=f"{one}.png", height=6, width=8)
    objects = [dict(id=1, image_id=1, category_id=1, bbox=[0, 0, 2, 2])]
    content = dict(images=[record], annotations=objects, categories=[dict(id=1, name="x")])
    (tmp_path / "train.json").write_text(json.dumps(content))
    assert open_boxes(tmp_path, "train", masks=False, images="images/train").image(0).size == (8, 6)
    folder = images(tmp_path / "photos", [other], each=1)
    (tmp_path / "maps" / other).mkdir(parents=True)
    torch.save(torch.zeros(2, 1, 2, 2), tmp_path / "maps" / other / "0.pt")
    assert LabelMapSource(iso.data.open_source(folder, "test"), tmp_path / "maps", 1).label_map(
        0
    ).shape == (2, 1, 2, 2)


@pytest.mark.parametrize("fraction", [20, 1.25, -0.2, 0])
def test_a_fraction_for_testing_is_above_0_and_up_to_1(fraction, tmp_path):
    photos = images(tmp_path / "photos")
    message = "must be above 0 and below 1"
    refused(message, iso.evaluate, network(), str(photos), test_fraction=fraction)


def test_a_folder_that_lost_a_class_is_tested_on_what_training_left_out(tmp_path):
    photos = images(tmp_path / "photos")
    shutil.rmtree(photos / "pear")
    with pytest.warns(DataWarning, match="has 10 images, that of training had 15"):
        assert len(open_test_images(network(split=(0.4, 15)), str(photos), None)) < 10


def test_a_grown_folder_of_which_training_took_the_first_classes(tmp_path):
    photos = images(tmp_path / "photos")
    Image.new("RGB", (8, 8)).save(photos / "pear" / "new.png")
    model = network(CLASSES[:2], split=(0.4, 15))
    with pytest.warns(DataWarning, match="that of training had 15"):
        assert len(open_test_images(model, str(photos), None, classes=2)) < 11


def test_a_grown_folder_of_a_network_without_classes(tmp_path):
    photos = images(tmp_path / "photos")
    Image.new("RGB", (8, 8)).save(photos / "pear" / "new.png")
    model = timm.create_model("cifar_resnet20", num_classes=0)
    record_data(model, {"source": "imagefolder", "split": (0.4, 15)})
    with pytest.warns(DataWarning, match="that of training had 15"):
        assert len(open_split(model, "test", None, photos)) < 16


def test_the_data_of_a_run_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    images(tmp_path / "photos")
    model = network()
    record_root(model, {"data": {"root": "~/photos"}})
    assert training_root(model, None, None) == tmp_path / "photos"


def test_images_without_a_label_do_not_count():
    pictures = [Image.new("RGB", (8, 8))] * 3
    source = iso.data.Source(pictures, [0, 1, -1], ["apple", "pear"])
    assert iso.evaluate(network(("pear", "apple")), source)["images"] == 2


def test_names_that_are_not_utf_8(tmp_path):
    write_csv(tmp_path / "c.csv", [{"class": "caf\udce9", "images": 1}])
    assert "caf\\udce9" in (tmp_path / "c.csv").read_text("utf-8")
    source = iso.data.Source([Image.new("RGB", (8, 8))], [0], ["caf\udce9"])
    assert len(fingerprint(source)) == 16


def test_what_macos_adds_to_an_archive_is_no_class(tmp_path):
    photos = images(tmp_path / "photos")
    (photos / "__MACOSX").mkdir()
    Image.new("RGB", (8, 8)).save(photos / "__MACOSX" / "1.png")
    assert len(iso.data.open_source(photos, "test")) == 15
