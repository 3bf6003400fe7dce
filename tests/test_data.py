"""Sources, subsets, corruptions: right images, right labels, one clear line when not."""

import io
import multiprocessing

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from timm.data import resolve_data_config

import isomorph as iso
from isomorph.lab.data.formats.naming import image_files
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.formats.tar import _shards_by_split
from isomorph.lab.data.loaders import eval_loader, train_loader, train_transform, transformed
from isomorph.lab.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.lab.data.sources import Source, class_fraction, read_image
from refusals import refused
from small_images import write_crops

CONFIG = dict(
    input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear", crop_pct=1.0
)


def deals(source, batch, seed=0):
    """One epoch of full batches."""
    return TrainSampler(BatchOrder(len(source), batch, seed), 1)


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val"):
        for name, level in (("black", 0), ("white", 255)):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (20 + i, 30), (level,) * 3).save(
                    tmp_path / split / name / f"{i}.png"
                )
    return tmp_path


def test_imagefolder(folder):
    source = open_source("imagefolder", "test", folder)
    assert source.classes == ("black", "white")
    images, labels = next(iter(eval_loader(source, CONFIG, 6)))
    assert images.shape == (6, 3, 16, 16)
    assert images.mean((1, 2, 3)).tolist() == [-1.0] * 3 + [1.0] * 3
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(folder, workers):
    """Also one that Pillow refuses in its own way: a text chunk too long for it is a ValueError from deep inside."""
    path = folder / "val/black/1.png"
    about = PngInfo()
    about.add_text("note", "x" * 2_000_000, zip=True)
    Image.new("RGB", (8, 8)).save(path, pnginfo=about)
    for said in (r"cannot read .*1\.png: Decompressed data too large", r"cannot read .*1\.png"):
        with pytest.raises(iso.UserError, match=said):  # of a worker, with its traceback
            list(eval_loader(open_source("imagefolder", "test", folder), CONFIG, 2, workers))
        path.write_bytes(b"not an image")


def test_a_killed_worker_is_an_error_of_the_next_batch_only():
    """Raised at any line, by torch's handler of SIGCHLD, it would end a write, or leave other processes waiting."""
    others = multiprocessing.active_children()
    loader = eval_loader(open_source("digits", "test"), CONFIG, 1, workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    worker.kill()
    worker.join()
    for again in (batches, loader):
        with pytest.raises(iso.UserError, match="a data-loading process was killed"):
            list(again)


def test_a_fraction_of_each_class():
    source = open_source("digits", "train")
    a = class_fraction(source, 0.1, 0)
    b = class_fraction(source, 0.1, 0)
    other = class_fraction(source, 0.1, 1)
    first = class_fraction(source, 0.1, None)
    assert a.ids.tolist() == b.ids.tolist() != other.ids.tolist()
    assert np.bincount(a.labels).tolist() == [
        int(0.1 * count) for count in np.bincount(source.labels)
    ]
    for label in range(10):
        members = np.flatnonzero(source.labels == label)
        assert (
            first.ids[first.labels == label].tolist() == members[: int(0.1 * len(members))].tolist()
        )
    refused(r"fraction 0 is not in", class_fraction, source, 0)
    for images, expected in ((732, 36), (1300, 65), (19, 1)):  # rounded down as in ConViT's code
        for seed in (None, 0):
            assert (
                len(class_fraction(Source([None] * images, [0] * images, ["only"]), 0.05, seed))
                == expected
            )


def test_classes_are_numbered_as_in_train(folder):
    (folder / "train/grey").mkdir()
    Image.new("RGB", (20, 30)).save(folder / "train/grey/0.png")
    (folder / "val/.cache").mkdir()
    test = open_source("imagefolder", "test", folder)
    assert test.classes == ("black", "grey", "white")
    # a folder of its own is for testing
    assert len(open_source("imagefolder", "test", folder / "val")) == 6
    assert sorted(set(test.labels)) == [0, 2]
    (folder / "val/pink").mkdir()
    refused(r"has classes that .*train lacks: pink", open_source, "imagefolder", "test", folder)


@pytest.mark.parametrize(("parts", "workers"), [(1, 2), (2, 0), (4, 2)])
def test_a_step_sees_the_same_images_whoever_shares_it_out(parts, workers):
    """Processes, parts, workers and interruptions: the batch of a step is a function of seed and step."""
    source = open_source("digits", "train").subset(range(50))
    order = BatchOrder(len(source), 16, seed=3)
    transform = train_transform(
        CONFIG, 2, hflip=0.5, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.5
    )
    whole = [
        images
        for images, _, _ in train_loader(transformed(source, transform), TrainSampler(order, 2))
    ]
    shares = [BatchParts(range(part, part + 1), parts) for part in range(parts)]
    loaders = [
        train_loader(transformed(source, transform), TrainSampler(order, 2, 2, share), workers)
        for share in shares
    ]
    for step, dealt in enumerate(zip(*loaders, strict=True), start=2):
        together = torch.stack([images for images, _, _ in dealt], 1).flatten(0, 1)
        assert torch.equal(together, whole[step])
    assert step == len(whole) - 1 == 5


def test_an_epoch_sees_every_image_once_and_epochs_and_seeds_differ():
    orders = [
        BatchOrder(48, 16, seed).epoch(epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 0))
    ]
    for images, _ in orders:
        assert images.sort().values.tolist() == list(range(48))
    assert len({tuple(images.tolist()) for images, _ in orders}) == 3
    assert len(orders[0][1].unique()) == 48


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_replaced_counted_and_limited(folder, workers):
    source = open_source("imagefolder", "train", folder)
    broken = source.images[1]
    broken.write_bytes(b"not an image")
    transform = train_transform({**CONFIG, "input_size": (3, 8, 8)})
    loader = train_loader(
        transformed(source, transform), deals(source, len(source)), workers, unreadable=1
    )
    images, labels, problems = next(iter(loader))
    assert len(images) == len(labels) == len(source)
    assert len(problems) == 1
    assert str(broken) in problems[0]
    with pytest.raises(iso.UserError, match=broken.name):  # of a worker, with its traceback
        list(train_loader(transformed(source, transform), deals(source, len(source)), workers))


def test_evaluation_follows_the_models_own_config(tmp_path):
    """The public weights were trained with ImageNet's mean and std; CIFAR's would lose accuracy without a word."""
    config = resolve_data_config(model=timm.create_model("cifar_resnet20"))
    write_crops(tmp_path, "abc", each=1, side=32)
    source = open_source("imagefolder", "test", tmp_path)
    images, _ = next(iter(eval_loader(source, config, 2)))
    pixels = torch.from_numpy(np.array(source.image(1))).permute(2, 0, 1) / 255
    mean = torch.tensor((0.485, 0.456, 0.406))[:, None, None]
    std = torch.tensor((0.229, 0.224, 0.225))[:, None, None]
    torch.testing.assert_close(images[1], (pixels - mean) / std)


def test_repeated_augmentation_shows_every_drawn_image_so_often():
    source = open_source("digits", "train").subset(range(64))
    marked = Source(source.images, list(range(64)), [str(i) for i in range(64)])
    config = dict(input_size=(3, 8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
    cropped = transformed(marked, train_transform(config, scale=(0.2, 1.0)))
    loader = train_loader(cropped, TrainSampler(BatchOrder(64, 32, repeats=3), 2))
    batches = list(loader)
    labels = torch.cat([labels for _, labels, _ in batches[:2]])
    images = torch.cat([images for images, _, _ in batches])
    assert len(loader) == len(batches) == 4
    assert labels.unique(return_counts=True)[1].tolist().count(3) == 21  # 64 = 21 * 3 + 1
    assert labels[0] == labels[1] == labels[2]
    assert not torch.equal(images[0], images[1])
    assert not torch.equal(labels, torch.cat([labels for _, labels, _ in batches[2:]]))


def test_pixels_of_32_bits_are_not_clipped(tmp_path):
    wide = {
        "float": np.linspace(0, 1, 64, dtype=np.float32),
        "int": np.arange(64, dtype=np.int32) * 1000,
    }
    for name, values in wide.items():
        path = tmp_path / f"{name}.tif"
        Image.fromarray(values.reshape(8, 8)).save(path)
        refused(rf"{name}.tif: its pixels are from 0 to .*convert it", read_image, path)
    Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)).save(path)
    assert read_image(path).getextrema() == ((0, 63),) * 3
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 60).save(path)  # 12 bits in 16
    refused("its 16-bit pixels are at most 3780, without a known white", read_image, path)


def test_a_model_of_grey_images_reads_grey_images():
    source = iso.data.open_source("digits", "train").subset(range(6))
    grey = {**CONFIG, "input_size": (1, 16, 16), "mean": (0.5,), "std": (0.5,)}
    images, _ = next(iter(eval_loader(source, grey)))
    assert images.shape == (6, 1, 16, 16)
    source.transform = train_transform(grey, crop_padding=2, auto_augment="rand-m9-mstd0.5-inc1")
    assert source[0][0].shape == (1, 16, 16)


def test_cifar100_takes_its_fine_labels_and_their_names(tmp_path):
    import json

    import pyarrow
    from pyarrow.parquet import write_table

    names = [f"class {i}" for i in range(100)]
    features = {"info": {"features": {"fine_label": {"names": names}}}}
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "png")
    columns = {
        "img": [{"bytes": buffer.getvalue(), "path": ""}] * 2,
        "fine_label": [7, 42],
        "coarse_label": [1, 2],
    }
    table = pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(features)})
    (tmp_path / "cifar100").mkdir()
    write_table(table, tmp_path / "cifar100/train-0.parquet")
    source = open_source("cifar100", "train", tmp_path)
    assert source.labels.tolist() == [7, 42]
    assert source.classes == tuple(names)


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m10-w1"])
def test_policies_survive_their_strongest_posterize(policy):
    """timm posterizes to 0 bits at the top of its range; Pillow 13 raises there."""
    source = open_source("digits", "train").subset(range(4))
    config = dict(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
    loader = train_loader(
        transformed(source, train_transform(config, auto_augment=policy)), deals(source, 4)
    )
    parts = loader.dataset.source.transform.transforms
    found = [
        op
        for p in parts
        for group in [getattr(p, "ops", []), *getattr(p, "policy", [])]
        for op in group
    ]
    posterizing = [op for op in found if op.name.startswith("Posterize")]
    assert posterizing
    for op in posterizing:
        for level in (0, 5, 10):
            op.magnitude = level
            op.magnitude_std = 0
            op.prob = 1.0
            assert op(source.image(0)).size == (8, 8)


class TestReceptiveFieldCalibration:
    """Refiner section 4.4: the image smaller than the input, and padded."""

    config = dict(
        input_size=(3, 24, 24), mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), interpolation="bilinear"
    )

    def batch(self, size, **calibration):
        source = Source([Image.new("RGB", size, (200, 100, 50))], [0], ["a"])
        return next(iter(eval_loader(source, self.config, 1, **calibration)))[0][0]

    def test_zero_and_black(self):
        zero = self.batch((40, 40), rfc=1.5, rfc_fill="zero")
        black = self.batch((40, 40), rfc=1.5, rfc_fill="black")
        inner = slice(4, 20)  # 24 / 1.5 = 16 pixels in the middle
        torch.testing.assert_close(zero[:, inner, inner], black[:, inner, inner])
        rim = torch.ones(24, 24, dtype=torch.bool)
        rim[inner, inner] = False
        assert not zero[:, rim].any()
        mean = torch.tensor(self.config["mean"])
        std = torch.tensor(self.config["std"])
        torch.testing.assert_close(black[:, rim], (-mean / std)[:, None].expand(-1, int(rim.sum())))

    def test_one_and_below_is_a_plain_crop(self):
        source = Source([Image.linear_gradient("L").resize((40, 50)).convert("RGB")], [0], ["a"])
        for rfc in (1.0, 0.8):
            cropped = next(
                iter(eval_loader(source, dict(self.config, crop_pct=rfc, crop_mode="center")))
            )[0]
            torch.testing.assert_close(
                next(iter(eval_loader(source, self.config, rfc=rfc)))[0], cropped
            )


def test_hidden_folders_hold_no_images_and_no_shards(tmp_path):
    names = ("1.png", "a/2.png", ".checkpoints/1.png", "train-0.tar", ".trash/train-1.tar")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert image_files(tmp_path) == [tmp_path / "1.png", tmp_path / "a" / "2.png"]
    assert _shards_by_split(tmp_path)["train"] == [tmp_path / "train-0.tar"]


def test_a_subset_is_of_indices_or_a_mask():
    images = [Image.new("RGB", (4, 4), (i,) * 3) for i in range(4)]
    source = Source(images, np.array([3, 1, 3, 0]), list("abcd"))
    for chosen in (source.labels == 3, [0, 2], np.array([0, 2], np.uint8)):
        part = source.subset(chosen)
        assert part.labels.tolist() == [3, 3]
        assert [np.asarray(part.image(i)).flat[0] for i in range(2)] == [0, 2]
    assert len(source.subset([])) == 0
    for wrong in ([1.7], np.array([True, False]), np.zeros((2, 2), int)):
        refused("cannot choose examples", source.subset, wrong)


def test_an_opened_photograph_is_turned_too(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "photo.jpg", exif=exif)
    for image in (tmp_path / "photo.jpg", Image.open(tmp_path / "photo.jpg")):
        assert Source([image], np.array([0]), ["a"]).image(0).size == (30, 40)
