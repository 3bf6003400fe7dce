"""The same images through every container: same labels, same pixels; one clear line where a container is wrong."""

import io
import json
import os
import pickle
import tarfile
from collections import Counter

import numpy as np
import pytest
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

import isomorph as iso
from isomorph.data import Corrupted, Noisy, Source, class_fraction, open_source, open_stream, shards
from isomorph.data.names import Names, says

CLASSES = ["ant", "bee", "cat"]
EACH = 5
PNG = ".png"


def picture(label: int, i: int) -> bytes:
    pixels = np.random.default_rng([label, i]).integers(0, 255, (20 + i, 24, 3)).astype(np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


SAMPLES = [(label, i, picture(label, i)) for label in range(len(CLASSES)) for i in range(EACH)]


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """No test reads or leaves anything in the user's caches, or asks the network."""
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache/huggingface")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def add(archive, name, data):
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            add(archive, name, data)


def as_folder(root, split="train"):
    for label, i, data in SAMPLES:
        (root / split / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        (root / split / CLASSES[label] / f"{i}.png").write_bytes(data)


def as_tar(root, prefix=""):
    mixed = [SAMPLES[i] for i in np.random.default_rng(0).permutation(len(SAMPLES))]
    members = [(f"{prefix}{CLASSES[label]}/{i}.png", data) for label, i, data in mixed]
    write_tar(root / "train.tar", [*members, ("README", b"x"), ("./._hidden.png", b"x"), ("loose.txt", b"")])


def as_class_tars(root):
    for label, name in enumerate(CLASSES):
        write_tar(root / f"train/{name}.tar", [(f"{i}.png", data) for other, i, data in SAMPLES if other == label])


def as_tar_of_tars(root):
    as_class_tars(root / "parts")
    tars = sorted((root / "parts/train").iterdir())
    write_tar(root / "train.tar", [(path.name, path.read_bytes()) for path in tars])


def as_shards(root, each=4, pattern="train-%04d.tar", kind="cls"):
    """Shards written by the webdataset library."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    with webdataset.ShardWriter(str(root / pattern), maxcount=each, verbose=0) as writer:
        for label, i, data in SAMPLES:
            beside = {"cls": label} if kind == "cls" else {"json": {"label": label, "other": "x"}}
            writer.write({"__key__": f"deep/{label}_{i}", "png": data, **beside})


def as_plain_shards(root):
    for n in range(3):
        few = [s for s in SAMPLES if s[1] % 3 == n]
        members = [
            m for label, i, data in few for m in ((f"{label}{i}.cls", b"%d\n" % label), (f"{label}{i}.PNG", data))
        ]
        write_tar(root / f"train/{n:03d}.tar", members)
    (root / "_info.json").write_text(json.dumps({"splits": {}, "classes": CLASSES}))


def dataset(samples=SAMPLES, named=True):
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as Picture

    columns = {"image": [{"bytes": d, "path": None} for *_, d in samples], "label": [label for label, *_ in samples]}
    features = Features({"image": Picture(), "label": ClassLabel(names=CLASSES) if named else Value("int64")})
    return Dataset.from_dict(columns, features=features)


def as_parquet(root, files=1, named=True):
    root.mkdir(parents=True, exist_ok=True)
    for n in range(files):
        dataset(SAMPLES[n::files], named).to_parquet(root / f"train-{n:05d}-of-{files:05d}.parquet")


def as_saved(root):
    from datasets import DatasetDict

    DatasetDict(train=dataset()).save_to_disk(root)


CONTAINERS = {
    "folder": ("imagefolder", as_folder),
    "tar": ("tar", as_tar),
    "wrapped tar": ("tar", lambda root: as_tar(root, "./train/")),
    "class tars": ("tar", as_class_tars),
    "tar of tars": ("tar", as_tar_of_tars),
    "shards": ("webdataset", as_shards),
    "json shards": ("webdataset", lambda root: as_shards(root, kind="json")),
    "plain shards": ("webdataset", as_plain_shards),
    "parquet": ("huggingface", lambda root: as_parquet(root, 2)),
    "saved": ("huggingface", as_saved),
}


@pytest.fixture(params=CONTAINERS)
def source(request, tmp_path) -> Source:
    name, write = CONTAINERS[request.param]
    write(tmp_path / "data")
    return open_source(name, "train", tmp_path / "data")


def pixels(source):
    """What the source holds, whatever the order."""
    return Counter((label, source.image(i).tobytes()) for i, label in enumerate(source.labels.tolist()))


EXPECTED = Counter((label, Image.open(io.BytesIO(data)).convert("RGB").tobytes()) for label, _, data in SAMPLES)


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

    def test_alterations_keep_their_draws(self, source):
        noisy = Noisy(source, 0.2)
        for part in (noisy.subset([9, 4]), Noisy(source.subset([9, 4]), 0.2)):
            assert part.image(1).tobytes() == noisy.image(4).tobytes()

    def test_shards_cover_each_image_once(self, source):
        if source.shards is None:
            return
        assert [i for run in source.shards for i in run] == list(range(len(source)))
        part = source.subset(range(1, len(source), 2))
        assert [i for run in part.shards for i in run] == list(range(len(part)))
        assert len(part.shards) == len(source.shards)

    def test_two_workers_read_it(self, source):
        source.transform = lambda image: np.asarray(image).mean()
        means, labels = next(iter(DataLoader(source, batch_size=len(source), num_workers=0)))
        assert labels.tolist() == source.labels.tolist()
        loaded = DataLoader(source, batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert [m for batch, _ in loaded for m in batch.tolist()] == means.tolist()


def test_the_order_of_tars_is_that_of_the_folder(tmp_path):
    as_folder(tmp_path)
    as_tar(tmp_path)
    as_class_tars(tmp_path / "class")
    folder = open_source("imagefolder", "train", tmp_path)
    for root in (tmp_path, tmp_path / "class"):
        source = open_source("tar", "train", root)
        assert source.labels.tolist() == folder.labels.tolist()
        assert [source.image(i).tobytes() for i in range(15)] == [folder.image(i).tobytes() for i in range(15)]
        assert source.shards == [range(5), range(5, 10), range(10, 15)]


def test_a_spawned_worker_opens_its_own_files(tmp_path):
    as_shards(tmp_path)
    source = open_source("webdataset", "train", tmp_path)
    source.transform = np.asarray
    source = source.subset([0, 5, 10])
    loader = DataLoader(source, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [label for _, label in loader] == [0, 1, 2]


def test_the_shared_imagenet_samples(data_root):
    """Shards in the wild: no split in their names, so they are to test; the whole of them is read."""
    source = open_source("webdataset", "test", data_root / "imagenet_samples")
    assert len(source) == 500
    assert len(set(source.labels.tolist())) == 500
    assert source.shards == [range(250), range(250, 500)]
    assert min(source.image(77).size) > 100
    assert np.asarray(Corrupted(source.subset([7, 3]), "fog", 1).image(1)).shape[2] == 3
    with pytest.raises(iso.UserError, match="no shard for the train split"):
        open_source("webdataset", "train", data_root / "imagenet_samples")


class TestShardRuns:
    source = Source([b""] * 6, [0] * 6, ["a"], [range(2), range(2, 6)])

    def test_of_subsets(self):
        assert self.source.subset([3, 5, 0]).shards == [range(2), range(2, 3)]
        assert self.source.subset([4]).shards == [range(1)]
        assert self.source.subset([]).shards == []
        assert self.source.subset([0, 3, 1]).shards is None
        assert self.source.subset([0, 3, 1]).subset([0, 2]).shards is None
        assert Noisy(self.source, 0.1).subset([1, 2]).shards == [range(1), range(1, 2)]


class TestIndexCache:
    @pytest.fixture
    def walked(self, monkeypatch):
        """Names of the shards that were really indexed."""
        names = []
        real = shards.walk
        monkeypatch.setattr(shards, "walk", lambda file, *rest: names.append(file.name) or real(file, *rest))
        return names

    def test_is_used_and_follows_a_replaced_shard(self, tmp_path, walked):
        as_shards(tmp_path)
        first = open_source("webdataset", "train", tmp_path)
        assert len(walked) == 4
        again = open_source("webdataset", "train", tmp_path)
        assert len(walked) == 4
        assert pixels(again) == EXPECTED
        write_tar(tmp_path / "train-0001.tar", [("x.png", picture(9, 9)), ("x.cls", b"2")])
        replaced = open_source("webdataset", "train", tmp_path)
        assert len(walked) == 5
        assert len(replaced) == len(first) - 4 + 1
        assert replaced.labels[4] == 2
        assert replaced.image(4).tobytes() == Image.open(io.BytesIO(picture(9, 9))).tobytes()

    def test_a_damaged_cache_is_made_anew(self, tmp_path, walked):
        as_shards(tmp_path)
        open_source("webdataset", "train", tmp_path)
        kept = sorted((tmp_path / "cache/isomorph/shards").iterdir())
        assert [path.suffix for path in kept] == [".npz"] * 4
        kept[0].write_bytes(b"nothing")
        kept[1].write_bytes(kept[1].read_bytes()[:300])
        assert len(open_source("webdataset", "train", tmp_path)) == len(SAMPLES)
        assert len(walked) == 6

    def test_no_writable_cache_is_no_error(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        as_shards(tmp_path / "data")
        assert len(open_source("webdataset", "train", tmp_path / "data")) == len(SAMPLES)

    def test_a_shard_replaced_while_open_is_refused(self, tmp_path):
        as_shards(tmp_path)
        source = open_source("webdataset", "train", tmp_path)
        write_tar(tmp_path / "train-0000.tar", [("x.png", picture(9, 9)), ("x.cls", b"2")])
        with pytest.raises(iso.UserError, match=r"train-0000\.tar has changed since"):
            source.image(0)


class TestWrongTars:
    @pytest.mark.parametrize("kept", [0, 100, 700, 5000, -300, -11000])
    def test_a_truncated_shard(self, tmp_path, kept):
        as_shards(tmp_path)
        whole = (tmp_path / "train-0000.tar").read_bytes()
        (tmp_path / "train-0000.tar").write_bytes(whole[:kept])
        if kept == -300:  # only padding after the end is lost
            assert len(open_source("webdataset", "train", tmp_path)) == len(SAMPLES)
            return
        with pytest.raises(iso.UserError, match=r"cannot read .*train-0000\.tar: .*; copy or write it again"):
            open_source("webdataset", "train", tmp_path)

    def test_a_cut_at_a_members_edge_is_seen(self, tmp_path):
        write_tar(tmp_path / "train.tar", [("a/1.png", b"x" * 512), ("b/1.png", b"y" * 512)])
        whole = (tmp_path / "train.tar").read_bytes()
        for kept in (1024, 1024 + 100):
            (tmp_path / "train.tar").write_bytes(whole[:kept])
            with pytest.raises(iso.UserError, match="no end of the archive"):
                open_source("tar", "train", tmp_path)
        (tmp_path / "train.tar").write_bytes(whole[:1024] + b"z" * 512 + whole[1536:])
        with pytest.raises(iso.UserError, match="cut or damaged"):
            open_source("tar", "train", tmp_path)

    @pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
    def test_a_compressed_shard(self, tmp_path, mode):
        for name in ("train-0.tar", f"train-0.tar.{mode}"):
            folder = tmp_path / name
            folder.mkdir()
            with tarfile.open(folder / name, f"w:{mode}") as archive:
                add(archive, "1.png", picture(0, 0))
            with pytest.raises(iso.UserError, match=rf"{name} is compressed.*unpack it"):
                open_source("webdataset", "train", folder)

    @pytest.mark.parametrize(
        "beside",
        [
            [],
            [("1.cls", b"cat")],
            [("1.json", b"{}")],
            [("1.json", b"[")],
            [("1.json", b'{"label": "cat"}')],
            [("1.cls", b"-1")],
        ],
    )
    def test_a_sample_without_a_label_is_named(self, tmp_path, beside):
        write_tar(tmp_path / "train-0.tar", [("1.png", picture(0, 0)), *beside])
        with pytest.raises(iso.UserError, match=r"train-0\.tar:1\.png has no label"):
            open_source("webdataset", "train", tmp_path)

    def test_an_unreadable_member_is_named(self, tmp_path):
        write_tar(tmp_path / "train.tar", [("cat/1.png", b"not an image"), ("cat/2.png", picture(0, 0))])
        source = open_source("tar", "train", tmp_path)
        for broken in (source, source.subset([1, 0]).subset([1]), Noisy(source, 0.1)):
            with pytest.raises(iso.UserError, match=r"cannot read .*train\.tar:cat/1\.png: .*; remove or replace it"):
                broken.image(0)

    def test_missing_tars_and_classes(self, tmp_path):
        with pytest.raises(iso.UserError, match=r"no folder .*nowhere"):
            open_source("tar", "train", tmp_path / "nowhere")
        with pytest.raises(iso.UserError, match=r"no folder .*nowhere"):
            open_source("webdataset", "train", tmp_path / "nowhere")
        with pytest.raises(iso.UserError, match=r"has no train\.tar, nor"):
            open_source("tar", "train", tmp_path)
        with pytest.raises(iso.UserError, match="no shard for the test split"):
            open_source("webdataset", "test", tmp_path)
        write_tar(tmp_path / "train.tar", [("1.png", b""), ("2.png", b"")])
        with pytest.raises(iso.UserError, match=r"train\.tar has no class folders"):
            open_source("tar", "train", tmp_path)
        write_tar(tmp_path / "shards/train-0.tar", [("1.txt", b""), ("2.txt", b"")])
        with pytest.raises(iso.UserError, match="no images in"):
            open_source("webdataset", "train", tmp_path / "shards")

    def test_classes_are_numbered_as_in_train(self, tmp_path):
        as_tar(tmp_path)
        write_tar(tmp_path / "val/cat.tar", [("1.png", picture(2, 1))])
        test = open_source("tar", "test", tmp_path)
        assert test.classes == tuple(CLASSES)
        assert test.labels.tolist() == [2]
        write_tar(tmp_path / "val/dog.tar", [("1.png", picture(2, 1))])
        with pytest.raises(iso.UserError, match=r"val has classes that .*train\.tar lacks: dog"):
            open_source("tar", "test", tmp_path)

    def test_labels_beyond_the_listed_classes(self, tmp_path):
        as_shards(tmp_path)
        (tmp_path / "classnames.txt").write_text("ant\nbee\n")
        with pytest.raises(iso.UserError, match="names 2 classes, but its shards have label 2"):
            open_source("webdataset", "train", tmp_path)
        (tmp_path / "classnames.txt").unlink()
        write_tar(tmp_path / "validation/0.tar", [("1.png", picture(0, 0)), ("1.cls", b"1")])
        assert open_source("webdataset", "test", tmp_path).classes == ("0", "1", "2")


class TestHuggingface:
    def test_labels_without_names(self, tmp_path):
        as_parquet(tmp_path, named=False)
        dataset(SAMPLES[:2], named=False).to_parquet(tmp_path / "validation.parquet")
        assert open_source("huggingface", "test", tmp_path).classes == ("0", "1", "2")
        assert open_stream("huggingface-stream", "test", tmp_path).classes == ("0", "1", "2")

    def test_a_test_split_without_labels_is_passed_over(self, tmp_path):
        hidden = dataset([(-1, i, data) for _, i, data in SAMPLES[:3]], named=False)
        hidden.to_parquet(tmp_path / "test-0.parquet")
        with pytest.raises(iso.UserError, match=r"the test split in .* has no labels"):
            open_source("huggingface", "test", tmp_path)
        dataset(SAMPLES[:2]).to_parquet(tmp_path / "val-0.parquet")
        assert len(open_source("huggingface", "test", tmp_path)) == 2
        assert len(open_stream("huggingface-stream", "test", tmp_path)) == 2

    @pytest.mark.parametrize("open_it", [open_source, open_stream])
    def test_what_can_be_missing(self, tmp_path, open_it, monkeypatch):
        name = "huggingface" if open_it is open_source else "huggingface-stream"
        with pytest.raises(iso.UserError, match=r"cannot reach timm/mini-imagenet: .*check the network"):
            open_it(name, "train", "timm/mini-imagenet")
        with pytest.raises(iso.UserError, match="no folder /no/such/place, and it is no name on the hub"):
            open_it(name, "train", "/no/such/place")
        with pytest.raises(iso.UserError, match="has no split train; parquet files must be named"):
            open_it(name, "train", tmp_path)
        as_parquet(tmp_path)
        with pytest.raises(iso.UserError, match="has no split test or val or validation"):
            open_it(name, "test", tmp_path)
        dataset().rename_column("label", "target").to_parquet(tmp_path / "test.parquet")
        with pytest.raises(iso.UserError, match="has columns image, target; it needs image and label"):
            open_it(name, "test", tmp_path)
        (tmp_path / "test.parquet").write_bytes(b"PAR1 and nothing")
        with pytest.raises(iso.UserError, match="cannot read the test split in") as caught:
            open_it(name, "test", tmp_path)
        assert "\n" not in str(caught.value)
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
        with pytest.raises(iso.UserError, match=r"pip install 'isomorph\[data\]'"):
            open_it(name, "train", tmp_path)

    def test_unknown_names_and_gated_data(self, monkeypatch):
        import datasets

        def refuse(*_, **__):
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub")

        monkeypatch.setattr(datasets, "load_dataset", refuse)
        with pytest.raises(iso.UserError, match="doesn't exist on the Hub; check the name, or log in"):
            open_source("huggingface", "train", "a/b")

    def test_text_labels_and_empty_cells(self, tmp_path):
        from datasets import Dataset

        Dataset.from_dict({"image": [b"x"], "label": ["cat"]}).to_parquet(tmp_path / "train.parquet")
        with pytest.raises(iso.UserError, match="must hold whole numbers"):
            open_source("huggingface", "train", tmp_path)
        (tmp_path / "cells").mkdir()
        Dataset.from_dict({"image": [None, b"x"], "label": [0, 1]}).to_parquet(tmp_path / "cells/test.parquet")
        source = open_source("huggingface", "test", tmp_path / "cells")
        with pytest.raises(iso.UserError, match=r"cannot read image 0 of the test split in .*: the cell is empty"):
            source.image(0)
        with pytest.raises(iso.UserError, match="cannot read image 1 of the test split"):
            source.image(1)


@pytest.fixture
def stream(tmp_path):
    as_parquet(tmp_path / "data", 4)
    stream = open_stream("huggingface-stream", "train", tmp_path / "data")
    stream.buffer = 4
    return stream


class TestStream:
    def test_same_labels_and_pixels(self, stream):
        assert (stream.classes, len(stream)) == (tuple(CLASSES), len(SAMPLES))
        seen = [(label, stream.image(raw, identity).tobytes()) for raw, label, identity in stream.samples(0, 0)]
        assert Counter(seen) == EXPECTED

    @pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 7, 12, 20])
    def test_shares_are_exact(self, stream, parts):
        for epoch in (0, 1):
            shares = [[identity for *_, identity in stream.samples(epoch, 3, p, parts)] for p in range(parts)]
            assert sorted(i for share in shares for i in share) == sorted(i for *_, i in stream.samples(0, None))
            assert len({i for share in shares for i in share}) == len(SAMPLES)

    def test_the_order_follows_seed_and_epoch(self, stream):
        def order(*given):
            return [identity for *_, identity in stream.samples(*given)]

        assert order(0, 5) == order(0, 5) != order(1, 5)
        assert order(0, 5) != order(0, 6)
        assert order(3, None) == sorted(order(0, 5))

    @pytest.mark.parametrize("skip", [0, 1, 6, 99])
    def test_skipping_resumes(self, stream, skip, monkeypatch):
        whole = list(stream.samples(2, 1, 1, 2))
        monkeypatch.setattr("isomorph.data.stream.decode", None)
        assert list(stream.samples(2, 1, 1, 2, skip)) == whole[skip:]

    def test_pickles_and_shares_once_in_workers(self, stream):
        import torch

        class Whole(torch.utils.data.IterableDataset):
            def __iter__(self):
                info = torch.utils.data.get_worker_info()
                return ((label, identity) for _, label, identity in stream.samples(0, 0, info.id, info.num_workers))

        expected = sorted((label, identity) for _, label, identity in stream.samples(0, 0))
        loader = DataLoader(Whole(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert sorted(map(tuple, loader)) == expected
        again = pickle.loads(pickle.dumps(stream))
        assert sorted((label, identity) for _, label, identity in again.samples(0, 0)) == expected

    def test_a_saved_data_set(self, tmp_path):
        as_saved(tmp_path / "saved")
        stream = open_stream("huggingface-stream", "train", tmp_path / "saved")
        assert len(stream) == len(SAMPLES)
        shares = [i for p in range(4) for *_, i in stream.samples(0, 0, p, 4)]
        assert len(set(shares)) == len(shares) == len(SAMPLES)

    def test_wrong_requests(self, stream, tmp_path):
        with pytest.raises(iso.UserError, match="part 2 is not in 0 to 1"):
            stream.samples(0, 0, 2, 2)
        with pytest.raises(iso.UserError, match="'webdataset' is unknown"):
            open_stream("webdataset", "train")
        with pytest.raises(iso.UserError, match="split 'val' is unknown"):
            open_stream("huggingface-stream", "val")
        with pytest.raises(iso.UserError, match="images=0"):
            open_stream("huggingface-stream", "train", tmp_path, images=0)
        with pytest.raises(iso.UserError, match=r"cannot read row 2 of file 1 of the train split"):
            stream.image(b"not an image", (1 << 32) + 2)
        stream.classes = ("ant",)
        with pytest.raises(
            iso.UserError, match=r"row \d of file \d of the train split .* has label 1, which is no class"
        ):
            list(stream.samples(0, None))

    def test_the_hub_tells_or_the_user_does(self, tmp_path, monkeypatch):
        """What a hub data set looks like: no local files, perhaps without a number of images or names."""
        import datasets

        as_parquet(tmp_path, named=False)
        files = {"train": [str(file) for file in tmp_path.glob("*.parquet")]}
        hub = datasets.load_dataset("parquet", data_files=files, streaming=True)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: hub)
        with pytest.raises(iso.UserError, match="does not name its classes; give their number as classes="):
            open_stream("huggingface-stream", "train", "owner/name")
        with pytest.raises(iso.UserError, match="does not say how many images it has; give the number as images="):
            open_stream("huggingface-stream", "train", "owner/name:config", classes=3)
        stream = open_stream("huggingface-stream", "train", "owner/name", images=15, classes=3)
        assert len(list(stream.samples(0, 0, 1, 2))) in (7, 8)
        about = datasets.SplitDict.from_split_dict([{"name": "train", "num_examples": 15}])
        hub["train"].info.splits = about
        assert len(open_stream("huggingface-stream", "train", "owner/name", classes=3)) == 15


def test_long_lists_of_names_are_small():
    given = ["a/b.png", "", "ünï.jpg", os.fsdecode(b"\xff.png")]
    names = Names.of(given)
    assert list(names) == given
    assert names[-1] == given[-1]
    with pytest.raises(IndexError):
        names[4]
    large = Names.of(f"n01440764/n01440764_{i}.JPEG" for i in range(10_000))
    assert len(pickle.dumps(large)) < 40 * 10_000


@pytest.mark.parametrize(
    ("name", "word", "answer"),
    [("imagenet1k-train-0001.tar", "train", True), ("val_00.tar", "val", True), ("validation.tar", "val", False),
     ("interval-0.tar", "val", False), ("TRAIN0.tar", "train", True), ("latest-1.tar", "test", False)],
)  # fmt: skip
def test_words_in_names(name, word, answer):
    assert says(name, word) is answer
