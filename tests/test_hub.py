"""Hugging Face data sets: what can be wrong with them, and reading them in passing."""

import sys
import zlib
from collections import Counter

import pytest
import torch

from containers import CLASSES, EXPECTED, SAMPLES, as_parquet, dataset
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.lab.data.streams import open_stream, stream_loader
from refusals import refused

pytestmark = pytest.mark.usefixtures("caches")


class TestHuggingface:
    def test_labels_without_names(self, tmp_path):
        as_parquet(tmp_path, named=False)
        dataset(SAMPLES[:2], named=False).to_parquet(tmp_path / "validation.parquet")
        assert open_source("huggingface", "test", tmp_path).classes == ("0", "1", "2")
        refused(
            "give their number as classes=", open_stream, "huggingface-stream", "test", tmp_path
        )

    def test_a_test_split_without_labels_is_passed_over(self, tmp_path):
        hidden = dataset([(-1, i, data) for _, i, data in SAMPLES[:3]], named=False)
        hidden.to_parquet(tmp_path / "test-0.parquet")
        refused(r"the test split in .* has no labels", open_source, "huggingface", "test", tmp_path)
        dataset(SAMPLES[:2]).to_parquet(tmp_path / "val-0.parquet")
        assert len(open_source("huggingface", "test", tmp_path)) == 2
        assert len(open_stream("huggingface-stream", "test", tmp_path)) == 2

    @pytest.mark.parametrize("open_it", [open_source, open_stream])
    def test_what_can_be_missing(self, tmp_path, open_it, monkeypatch):
        name = "huggingface" if open_it is open_source else "huggingface-stream"
        refused(
            r"cannot reach timm/mini-imagenet: .*check the network",
            open_it,
            name,
            "train",
            "timm/mini-imagenet",
        )
        refused("has no split train; parquet files must be named", open_it, name, "train", tmp_path)
        as_parquet(tmp_path)
        dataset().rename_column("label", "target").to_parquet(tmp_path / "test.parquet")
        refused(
            "has columns image, target; it must have image and label",
            open_it,
            name,
            "test",
            tmp_path,
        )
        monkeypatch.setitem(sys.modules, "datasets", None)
        refused(r"pip install 'isomorph\[data\]'", open_it, name, "train", tmp_path)
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        refused(r"pip install 'isomorph\[demo\]'", open_source, "digits", "train", tmp_path)


@pytest.fixture
def stream(tmp_path, caches):
    as_parquet(tmp_path / "data", 4)
    stream = open_stream("huggingface-stream", "train", tmp_path / "data")
    stream.buffer = 4
    return stream


class TestStream:
    @pytest.mark.parametrize(("parts", "workers"), [(1, 2), (4, 2)])
    def test_every_image_is_trained_on(self, stream, parts, workers):
        order = BatchOrder(len(SAMPLES), 4)
        sampler = TrainSampler(order, 6, parts=BatchParts(range(parts), parts))
        seen = stream_loader(
            stream, lambda image: torch.tensor(zlib.crc32(image.tobytes())), sampler, workers
        )
        found = {
            (int(label), int(image))
            for images, labels, _ in seen
            for image, label in zip(images, labels, strict=True)
        }
        assert found == {(label, zlib.crc32(pixels)) for label, pixels in EXPECTED}

    def test_same_labels_and_pixels(self, stream):
        assert stream.classes == tuple(CLASSES)
        assert len(stream) == len(SAMPLES)
        seen = [
            (label, stream.image(raw, identity).tobytes())
            for raw, label, identity in stream.samples(0, 0)
        ]
        assert Counter(seen) == EXPECTED

    @pytest.mark.parametrize("parts", [1, 3, 4, 5, 20])
    def test_shares_are_exact_and_follow_seed_and_epoch(self, stream, parts):
        def order(epoch, seed):
            return [
                identity
                for p in range(parts)
                for *_, identity in stream.samples(epoch, seed, p, parts)
            ]

        stored = sorted(order(0, None))
        assert len(set(stored)) == len(SAMPLES)
        assert stored == sorted(order(0, 5)) == sorted(order(1, 5))
        assert order(0, 5) == order(0, 5)
        assert len({*map(tuple, (order(0, 5), order(1, 5), order(0, 6)))}) == 3

    @pytest.mark.parametrize("skip", [0, 6])
    def test_skipping_resumes(self, stream, skip, monkeypatch):
        whole = list(stream.samples(2, 1, 1, 2))
        monkeypatch.setattr("isomorph.lab.data.streams.decode", None)
        assert list(stream.samples(2, 1, 1, 2, skip)) == whole[skip:]
