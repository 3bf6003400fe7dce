"""Splits, classes, labels and suffixes in every format of labelled images: read right, or rejected in one line."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

import isomorph as iso
from containers import SAMPLES, as_folder, picture, write_tar
from isomorph.checkpoints.model import record_data
from isomorph.errors import DataWarning
from isomorph.lab.data.formats.naming import IMAGE_SUFFIXES, names_only_a_split, split_words
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.streams import open_stream
from isomorph.lab.tasks.segmentation.data import read_mask
from refusals import refused

pytestmark = pytest.mark.usefixtures("caches")

ORDER = ["ant", "bee", "cat"]
OTHER_ORDER = ["cat", "ant", "bee"]


def decoded(data):
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


# Every image of SAMPLES, by the name of its class.
NAMED_IMAGES = Counter((ORDER[label], decoded(data)) for label, _, data in SAMPLES)


def table(names, columns=None):
    """A data set of all images whose classes are numbered in the order of `names`."""
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as Picture

    features = {"image": Picture(), "label": ClassLabel(names=names)}
    cells = {
        "image": [{"bytes": data, "path": None} for *_, data in SAMPLES],
        "label": [names.index(ORDER[label]) for label, *_ in SAMPLES],
    }
    for column, (labels, other_names) in (columns or {}).items():
        features[column] = ClassLabel(names=other_names) if other_names else Value("int64")
        cells[column] = labels
    return Dataset.from_dict(cells, features=Features(features))


def parquet(path, names, columns=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    table(names, columns).to_parquet(path)


def named_images(source):
    found = Counter()
    for index, label in enumerate(source.labels.tolist()):
        found[source.classes[label], source.image(index).tobytes()] += 1
    return found


def named_images_of_stream(stream):
    found = Counter()
    for stored, label, identity in stream.samples(0, None):
        found[stream.classes[label], stream.image(stored, identity).tobytes()] += 1
    return found


def from_hub(open_it, name):
    """Open a data set as if it came from the hub: `load_dataset` returns all of its splits."""

    def opened(split, root, monkeypatch, train, test):
        splits = {"train": table(train), "test": table(test)}
        if name == "huggingface-stream":
            splits = {word: dataset.to_iterable_dataset() for word, dataset in splits.items()}
        monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: splits)
        return open_it(name, split, "owner/insects")

    return opened


def from_folder(open_it, name, pattern):
    def opened(split, root, monkeypatch, train, test):
        parquet(root / pattern.format("train"), train)
        parquet(root / pattern.format("test"), test)
        return open_it(name, split, root)

    return opened


READERS = {
    "parquet": from_folder(open_source, "huggingface", "{}-00000.parquet"),
    "parquet in data": from_folder(open_source, "huggingface", "data/{}-00000.parquet"),
    "parquet in folders": from_folder(open_source, "huggingface", "{}/0.parquet"),
    "cifar10": from_folder(open_source, "cifar10", "cifar10/{}-0.parquet"),
    "hub": from_hub(open_source, "huggingface"),
    "stream": from_folder(open_stream, "huggingface-stream", "{}-00000.parquet"),
    "stream of the hub": from_hub(open_stream, "huggingface-stream"),
}


@pytest.mark.parametrize("reader", READERS)
class TestClassNamesInAnotherOrder:
    """As the folders of a class, which are numbered by their names."""

    @pytest.mark.parametrize("train", [ORDER, [*OTHER_ORDER, "dog"]])
    @pytest.mark.parametrize("split", ["train", "test"])
    def test_labels_follow_the_names(self, tmp_path, monkeypatch, reader, split, train):
        opened = READERS[reader](split, tmp_path, monkeypatch, train, ["bee", "cat", "ant"])
        read = named_images_of_stream if "stream" in reader else named_images
        assert opened.classes == tuple(train)
        assert read(opened) == NAMED_IMAGES

    def test_a_class_that_train_lacks_is_rejected(self, tmp_path, monkeypatch, reader):
        lines = "has classes that .*train.* lacks: dog"
        refused(lines, READERS[reader], "test", tmp_path, monkeypatch, ORDER, [*ORDER, "dog"])


@pytest.mark.parametrize("reader", ["huggingface", "huggingface-stream", "cifar10"])
def test_the_files_of_a_split_number_classes_alike(tmp_path, reader):
    folder = tmp_path / ("cifar10" if reader == "cifar10" else "")
    parquet(folder / "train-0.parquet", ORDER)
    parquet(folder / "train-1.parquet", OTHER_ORDER)
    open_it = open_stream if reader == "huggingface-stream" else open_source
    line = r"class 0 is ant in .*train-0.parquet and cat in train-1.parquet; write the files with the same names"
    refused(line, open_it, reader, "train", tmp_path)


@pytest.mark.parametrize("named", ["train", "test"])
def test_a_split_without_names_has_those_of_the_other(tmp_path, named):
    """Labels are numbers in both; a test split says nothing about how training numbers its classes."""
    from datasets import Value

    unnamed = "test" if named == "train" else "train"
    parquet(tmp_path / f"{named}-0.parquet", ORDER)
    table(ORDER).cast_column("label", Value("int64")).to_parquet(tmp_path / f"{unnamed}-0.parquet")
    classes = [open_source("huggingface", split, tmp_path).classes for split in ("train", "test")]
    assert classes == ([tuple(ORDER)] * 2 if named == "train" else [("0", "1", "2"), tuple(ORDER)])


def class_folders(root, names, below=""):
    for label, name in enumerate(names):
        folder = root / name / below
        folder.mkdir(parents=True)
        for i in range(3):
            (folder / f"{i}.png").write_bytes(picture(label, i))


ODD_NAMES = ("test_tube", "training shoe", "Evaluation-board", "ValSensor")


@pytest.mark.parametrize("odd", [*ODD_NAMES, "train", "Test"])
@pytest.mark.parametrize("below", ["", "kinds"])
def test_a_class_whose_name_has_the_word_of_a_split(tmp_path, odd, below):
    """Folders of classes with images, or with folders of images: one of them is not taken for a split."""
    classes = sorted(["apple", "pear", odd])
    class_folders(tmp_path, classes, below)
    if below and odd not in ODD_NAMES:
        line = (
            f"has {odd}/, named for a split, and images in apple/, which is not; move all classes"
        )
        for split in ("train", "test"):
            refused(line, open_source, tmp_path, split)
            refused(line, open_source, tmp_path, split, test_fraction=0.4)
        return
    whole = open_source(tmp_path, "test")
    assert whole.classes == tuple(classes)
    assert np.bincount(whole.labels).tolist() == [3, 3, 3]
    parts = [open_source(tmp_path, split, test_fraction=0.4) for split in ("train", "test")]
    assert [part.classes for part in parts] == [whole.classes] * 2
    assert sum(map(len, parts)) == 9


@pytest.mark.parametrize("below", ["", "kinds"])
def test_a_class_of_such_a_name_in_both_splits(tmp_path, below):
    for split in ("train", "val"):
        class_folders(tmp_path / split, ["apple", "test_tube", "train"], below)
    for split in ("train", "test"):
        assert len(open_source(tmp_path, split)) == 9


def shard(root, name, label):
    members = []
    for i in range(3):
        members.append((f"{label}{i}.png", picture(label, i)))
        members.append((f"{label}{i}.cls", b"%d" % label))
    write_tar(root / name, members)


def tar_with_folders(root, name, label):
    members = []
    for i in range(3):
        for folder in ("red", "green"):
            members.append((f"{folder}/{i}.png", picture(label, i)))
    write_tar(root / f"{name}.tar", members)


CLASS_FILES = {
    "tar": lambda root, name, label: tar_with_folders(root, name, label),
    "tar in folders": lambda root, name, label: tar_with_folders(root / name, "x", label),
    "webdataset": lambda root, name, label: shard(root, f"{name}-0.tar", label),
    "webdataset in folders": lambda root, name, label: shard(root, f"{name}/0.tar", label),
    "huggingface": lambda root, name, label: parquet(root / f"{name}-0.parquet", ORDER),
    "huggingface in folders": lambda root, name, label: parquet(root / name / "0.parquet", ORDER),
    "huggingface-stream": lambda root, name, label: parquet(root / f"{name}-0.parquet", ORDER),
}


@pytest.mark.parametrize("kind", CLASS_FILES)
@pytest.mark.parametrize("odd", ["test_tube", "train"])
def test_a_file_of_a_class_is_not_taken_for_a_split(tmp_path, kind, odd):
    for label, name in enumerate(["apple", "pear", odd]):
        CLASS_FILES[kind](tmp_path, name, label)
    reader = kind.partition(" ")[0]
    open_it = open_stream if "stream" in reader else open_source
    for split in ("train", "test"):
        refused(f"has {odd}.*, named for a split, and .* not; ", open_it, reader, split, tmp_path)


@pytest.mark.parametrize("kind", ["tar", "huggingface", "webdataset"])
def test_a_file_without_a_split_is_counted(tmp_path, kind):
    for name in ("train", "val", "more"):
        CLASS_FILES[kind](tmp_path, name, 0)
    for split in ("train", "test"):
        with pytest.warns(DataWarning, match=r"^1 file in .* left out \(1 .*\)$"):
            assert len(open_source(kind, split, tmp_path))


def test_images_next_to_the_splits_are_counted(tmp_path):
    for split in ("training_set", "test_set"):
        as_folder(tmp_path, split)
    as_folder(tmp_path, "more")
    for split in ("train", "test"):
        with pytest.warns(
            DataWarning, match=r"^15 files in .* left out \(15 in folders that are not named for"
        ):
            assert named_images(open_source(tmp_path, split)) == NAMED_IMAGES


def test_a_tar_of_one_class_whose_name_has_the_word_of_a_split(tmp_path):
    write_tar(
        tmp_path / "train.tar",
        [("test_tube/0.png", picture(0, 0)), ("test_tube/1.png", picture(0, 1))],
    )
    assert open_source(tmp_path, "train").classes == ("test_tube",)


def test_a_parquet_file_is_for_training_or_for_testing(tmp_path):
    parquet(tmp_path / "train-0.parquet", ORDER)
    parquet(tmp_path / "test-of-train.parquet", ORDER)
    refused(
        "test-of-train.parquet is named for training and for testing",
        open_source,
        tmp_path,
        "train",
    )


@pytest.mark.parametrize(
    ("name", "words", "only"),
    [
        ("train", ["train"], True),
        ("TrainSet", ["train"], True),
        ("test_set", ["test"], True),
        ("val2017", ["val"], True),
        ("seg_train", ["train"], False),
        ("test_tube", ["test"], False),
        ("train_val", ["train", "val"], False),
        ("contest", [], False),
    ],
)
def test_words_of_splits_in_names(name, words, only):
    assert split_words(name) == words
    assert names_only_a_split(name) is only


# --- two labels of one sample


def two_files(root, labels):
    cls, other = labels
    members = [
        ("0.png", picture(0, 0)),
        ("0.cls", b"%d" % cls),
        ("0.json", json.dumps({"label": other}).encode()),
    ]
    write_tar(root / "train-0.tar", members)


def stored_again(root, labels):
    members = []
    for number, label in enumerate(labels):
        members += [("0.png", picture(0, number)), ("0.cls", b"%d" % label)]
        members += [(f"between{number}.png", picture(1, number)), (f"between{number}.cls", b"0")]
    write_tar(root / "train-0.tar", members)


def two_columns(column):
    def write(root, labels):
        first, other = labels
        same = [label for label, *_ in SAMPLES]
        changed = [other if label == first else label for label in same]
        parquet(root / "train-0.parquet", ORDER, {column: (changed, None)})

    return write


def two_named_columns(root, labels):
    """The second column numbers the same names in another order."""
    first, other = labels
    numbers = [
        OTHER_ORDER.index(ORDER[other if label == first else label]) for label, *_ in SAMPLES
    ]
    parquet(root / "train-0.parquet", ORDER, {"labels": (numbers, OTHER_ORDER)})


TWO_LABELS = {
    "cls and json": ("webdataset", two_files),
    "stored twice": ("webdataset", stored_again),
    "label and fine_label": ("huggingface", two_columns("fine_label")),
    "label and labels": ("huggingface", two_columns("labels")),
    "named columns": ("huggingface", two_named_columns),
    "columns of a stream": ("huggingface-stream", two_columns("cls")),
    "named columns of a stream": ("huggingface-stream", two_named_columns),
}


@pytest.mark.parametrize("case", TWO_LABELS)
def test_two_labels_of_one_sample(tmp_path, case):
    reader, write = TWO_LABELS[case]

    def read(folder):
        if "stream" in reader:
            return list(open_stream(reader, "train", folder).samples(0, None))
        return open_source(reader, "train", folder)

    write(tmp_path / "same", (1, 1))
    assert len(read(tmp_path / "same"))
    write(tmp_path / "differ", (1, 2))
    refused(
        r"(has labels that differ|has two labels|has label 2, and 1).*; (keep|remove) one of",
        read,
        tmp_path / "differ",
    )


def test_a_column_without_labels_says_nothing(tmp_path):
    parquet(tmp_path / "train-0.parquet", ORDER, {"fine_label": ([-1] * len(SAMPLES), None)})
    assert named_images(open_source("huggingface", "train", tmp_path)) == NAMED_IMAGES


# --- suffixes


def file_of(suffix):
    """The bytes of an image file, and its pixels."""
    image = Image.open(io.BytesIO(picture(0, 0))).convert("L" if suffix == ".pgm" else "RGB")
    written = io.BytesIO()
    image.save(written, Image.registered_extensions()[suffix])
    return written.getvalue(), decoded(written.getvalue())


def in_folder(root, suffix, data):
    folder = root / "train/ant"
    folder.mkdir(parents=True)
    (folder / f"0{suffix}").write_bytes(data)


def in_parquet(root, suffix, data):
    """In a column with the name of the suffix, as the `datasets` library names what shards hold."""
    from datasets import Dataset, Features, Value
    from datasets import Image as Picture

    column = suffix.removeprefix(".")
    cells = {column: [{"bytes": data, "path": None}], "cls": [0]}
    dataset = Dataset.from_dict(
        cells, features=Features({column: Picture(), "cls": Value("int64")})
    )
    dataset.to_parquet(root / "train-0.parquet")


SUFFIX_READERS = {
    "imagefolder": in_folder,
    "tar": lambda root, suffix, data: write_tar(root / "train.tar", [(f"ant/0{suffix}", data)]),
    "webdataset": lambda root, suffix, data: write_tar(
        root / "train-0.tar", [(f"0{suffix}", data), ("0.cls", b"0")]
    ),
    "huggingface": in_parquet,
}


@pytest.mark.parametrize("reader", SUFFIX_READERS)
def test_every_suffix_that_torchvision_reads(tmp_path, reader):
    assert set(IMG_EXTENSIONS) <= IMAGE_SUFFIXES
    for number, suffix in enumerate(sorted(IMAGE_SUFFIXES)):
        Image.init()
        data, pixels = file_of(suffix)
        root = tmp_path / str(number)
        root.mkdir()
        SUFFIX_READERS[reader](root, suffix.upper() if reader != "huggingface" else suffix, data)
        source = open_source(reader, "train", root)
        assert [source.image(i).tobytes() for i in range(len(source))] == [pixels]


@pytest.mark.parametrize("white", [2, 255, 65535])
def test_a_pgm_mask_whose_values_pillow_scales_is_rejected(tmp_path, white):
    numbers = np.array([[0, 1, 2]], np.uint8 if white < 256 else ">u2")
    path = tmp_path / "mask.pgm"
    path.write_bytes(b"P5 3 1 %d\n" % white + numbers.tobytes())
    if white == 2:
        refused("mask.pgm is stored as PPM, which changes the numbers of classes", read_mask, path)
    else:
        assert read_mask(path).tolist() == [[0, 1, 2]]


def test_grey_values_of_a_pgm_file_of_16_bits(tmp_path):
    """Its white is written in the file, and Pillow scales it to 65535."""
    grey = np.arange(48, dtype=np.uint16).reshape(6, 8) * 20
    for white, expected in ((65535, grey // 257), (1000, grey.astype(int) * 65535 // 1000 // 257)):
        path = Path(tmp_path / f"{white}.pgm")
        path.write_bytes(b"P5 8 6 %d\n" % white + grey.astype(">u2").tobytes())
        folder = tmp_path / str(white) / "only"
        folder.mkdir(parents=True)
        path.rename(folder / "0.pgm")
        image = np.asarray(open_source(folder.parent, "test").image(0))
        assert np.abs(image[..., 0].astype(int) - expected).max() <= 1


def test_a_run_on_the_first_classes_is_told_how_to_be_tested():
    model = timm.create_model("cifar_resnet20", num_classes=3)
    record_data(model, dict(input_size=(3, 8, 8), label_names=["0", "1", "2"], source="digits"))
    refused("give classes=3 to test on these alone", iso.evaluate, model, "digits")
