"""The same images through every container: same labels, same pixels; one clear line where a container is wrong."""

import io
import itertools
import pickle
import shutil
import tarfile

import pytest
from PIL import Image

from containers import (
    CLASSES,
    CONTAINERS,
    EXPECTED,
    SAMPLES,
    as_folder,
    as_shards,
    as_tar,
    picture,
    pixels,
    write_tar,
)
from isomorph.errors import DataWarning
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.sources import Source, class_fraction
from refusals import refused

pytestmark = pytest.mark.usefixtures("caches")


def whole(label, i):
    """The bytes of a picture's pixels."""
    return Image.open(io.BytesIO(picture(label, i))).convert("RGB").tobytes()


@pytest.fixture(params=CONTAINERS)
def source(request, tmp_path, caches) -> Source:
    name, write = CONTAINERS[request.param]
    write(tmp_path / "data")
    return open_source(name, "train", tmp_path / "data")


class TestEveryContainer:
    def test_same_labels_and_pixels(self, source):
        assert source.classes == tuple(CLASSES)
        assert len(source) == len(SAMPLES)
        assert pixels(source) == EXPECTED
        assert type(source[0][1]) is int

    def test_pickles(self, source):
        source.image(0)
        again = pickle.loads(pickle.dumps(source.subset([4, 2])))
        assert again.image(1).tobytes() == source.image(2).tobytes()

    def test_a_subset_is_lazy_and_remembers(self, source):
        part = source.subset([7, 3, 3]).subset([1, 0])
        assert list(part.ids) == [3, 7]
        assert part.labels.tolist() == [source.labels[3], source.labels[7]]
        assert part.image(1).tobytes() == source.image(7).tobytes()
        assert part.image(-1).tobytes() == source.image(7).tobytes()
        half = class_fraction(source, 0.4)
        assert len(half) == 6
        assert half.image(5).tobytes() == source.image(int(half.ids[5])).tobytes()


@pytest.mark.parametrize(
    "spelling", [("Train", "VAL"), ("training_set", "test_set"), ("seg_train", "valid")]
)
@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "tar of tars"])
def test_splits_are_found_however_they_are_spelt(tmp_path, container, spelling):
    name, write = CONTAINERS[container]
    write(tmp_path / "made")
    (root := tmp_path / "data").mkdir()
    for entry, word in itertools.product((tmp_path / "made").iterdir(), spelling):
        copy = shutil.copytree if entry.is_dir() else shutil.copy
        if not (target := root / entry.name.replace("train", word)).exists():
            copy(entry, target)
    for split in ("train", "test"):
        for source in (open_source(root, split), open_source(name, split, root)):
            assert source.classes == tuple(CLASSES)
            assert pixels(source) == EXPECTED


def test_no_shard_is_for_training_and_for_testing(tmp_path):
    for name in ("train-0000.tar", "val-0000.tar"):
        write_tar(tmp_path / "train" / name, [("0.cls", b"0"), ("0.png", b"")])
    refused(
        "val-0000.tar is named for training and for testing",
        open_source,
        "webdataset",
        "train",
        tmp_path,
    )
    as_shards(tmp_path / "named")
    (tmp_path / "named/train-0000.tar").rename(tmp_path / "named/more.tar")
    with pytest.warns(
        DataWarning,
        match=r"^1 file in .*named left out \(1 without train, val or test in the name\)",
    ):
        open_source(tmp_path / "named", "train")


def test_what_is_left_out_is_said(tmp_path):
    as_folder(tmp_path)
    top = tmp_path / "train"
    elsewhere = tmp_path / "elsewhere"
    shutil.move(top / "bee", elsewhere)
    (top / "bee").mkdir()
    (top / "bee/linked").symlink_to(elsewhere)
    assert pixels(open_source(tmp_path, "train")) == EXPECTED
    for name in ("ant/1.heic", "ant/2.HEIC", "bee/README", "cat/notes.txt", "loose.png"):
        (top / name).write_bytes(b"x")
    with pytest.warns(
        DataWarning, match=r"^4 files in .*train left out \(2 .heic, 1 no ending, 1 next to .*\)"
    ):
        open_source(tmp_path, "train")
    for name in ("ant/1.heic", "ant/2.HEIC", "bee/README", "loose.png"):
        (top / name).unlink()
    (top / "ant/round").symlink_to(top / "ant")
    with pytest.warns(DataWarning, match="1 in a folder that links to itself"):
        assert pixels(open_source(tmp_path, "train")) == EXPECTED


def entry(archive, name, data=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data))


def nested(depth, data):
    for level in range(depth):
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as archive:
            entry(archive, f"{level}.tar" if level else "1.png", data)
        data = written.getvalue()
    return data


HOSTILE_TARS = {
    "sparse": (
        dict(type=tarfile.GNUTYPE_SPARSE),
        b"",
        "1.png is stored without its zeros; pack it by tar without --sparse",
    ),
    "nested": (dict(name="cat/1.tar"), nested(9, b"x"), "is in more than 4 tars inside each other"),
    "a symbolic link": (
        dict(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        b"",
        "1.png is a link to /etc/passwd",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE_TARS)
def test_hostile_tars_are_named_in_a_line(kind, tmp_path):
    fields, data, said = HOSTILE_TARS[kind]
    with tarfile.open(tmp_path / "train.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        entry(archive, **{"name": "cat/1.png", **fields}, data=data)
    refused(said, open_source, "tar", "train", tmp_path)


def test_the_shared_imagenet_samples(data_root):
    """Shards in the wild: no split in their names, so they are to test; the whole of them is read."""
    source = open_source("webdataset", "test", data_root / "imagenet_samples")
    assert len(source) == 500
    assert len(set(source.labels.tolist())) == 500
    assert min(source.image(77).size) > 100
    refused(
        "no shard for the train split",
        open_source,
        "webdataset",
        "train",
        data_root / "imagenet_samples",
    )


def test_a_shard_replaced_while_open_is_refused(tmp_path):
    as_shards(tmp_path)
    source = open_source("webdataset", "train", tmp_path)
    write_tar(tmp_path / "train-0000.tar", [("x.png", picture(9, 9)), ("x.cls", b"2")])
    refused(r"train-0000\.tar has changed since", source.image, 0)


class TestWrongTars:
    def test_a_truncated_shard(self, tmp_path):
        as_shards(tmp_path)
        shard = tmp_path / "train-0000.tar"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-300])  # only padding after the end is lost
        assert len(open_source("webdataset", "train", tmp_path)) == len(SAMPLES)
        for kept in (0, 100, 700, 5000, -11000):
            shard.write_bytes(whole[:kept])
            refused(
                r"cannot read .*train-0000\.tar: .*; copy",
                open_source,
                "webdataset",
                "train",
                tmp_path,
            )

    def test_a_cut_at_a_members_edge_is_seen(self, tmp_path):
        write_tar(tmp_path / "train.tar", [("a/1.png", b"x" * 512), ("b/1.png", b"y" * 512)])
        whole = (tmp_path / "train.tar").read_bytes()
        for kept in (1024, 1024 + 100):
            (tmp_path / "train.tar").write_bytes(whole[:kept])
            refused("no end of the archive", open_source, "tar", "train", tmp_path)
        (tmp_path / "train.tar").write_bytes(whole[:1024] + b"z" * 512 + whole[1536:])
        refused("cut or damaged", open_source, "tar", "train", tmp_path)

    def test_an_unreadable_member_is_named(self, tmp_path):
        write_tar(
            tmp_path / "train.tar", [("cat/1.png", b"not an image"), ("cat/2.png", picture(0, 0))]
        )
        source = open_source("tar", "train", tmp_path)
        for broken in (source, source.subset([1, 0]).subset([1])):
            refused(
                r"cannot read .*train\.tar:cat/1\.png: .*; remove or replace it", broken.image, 0
            )

    def test_classes_are_numbered_as_in_train(self, tmp_path):
        as_tar(tmp_path)
        write_tar(tmp_path / "val/cat.tar", [("1.png", picture(2, 1))])
        test = open_source("tar", "test", tmp_path)
        assert test.classes == tuple(CLASSES)
        assert test.labels.tolist() == [2]
        write_tar(tmp_path / "val/dog.tar", [("1.png", picture(2, 1))])
        refused(
            r"val has classes that .*train\.tar lacks: dog", open_source, "tar", "test", tmp_path
        )
