"""ImageNet-C's corruptions against its own code's output; who draws what."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from isomorph.lab.data.corruptions import corrupt
from isomorph.lab.data.loaders import batch_ranges, ordered_loader
from isomorph.lab.data.sources import Source

ALL = (*corrupt.IMAGENET_C_CORRUPTIONS, *corrupt.EXTRA_CORRUPTIONS)
DETERMINISTIC = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
)
DETERMINISTIC += ("gaussian_blur", "saturate")
SAME_STREAM = (
    "gaussian_noise",
    "shot_noise",
    "speckle_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
    "fog",
)
SAME_STREAM += ("elastic_transform", "spatter")
"""Random ones whose draws follow the reference's, draw for draw; impulse_noise draws from a stream of its own."""
MEASURES = ("mean", "std", "mad", "rmse", "frac_changed")


@pytest.fixture
def reference(data_root):
    folder = data_root / "corruption_reference/imagenet224"
    return folder, pixels_of(folder / "input.png"), json.loads((folder / "stats.json").read_text())


def pixels_of(path):
    return np.asarray(Image.open(path).convert("RGB"))


def drawing(side=32, seed=0):
    """A smooth picture with all levels, so that blurs and colours have something to do."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC))


def measured(corrupted, original):
    difference = corrupted.astype(float) - original
    changed = (difference != 0).mean()
    spread = np.sqrt((difference**2).mean())
    return corrupted.mean(), corrupted.std(), np.abs(difference).mean(), spread, changed


def test_deterministic_ones_equal_the_reference(reference):
    folder, original, stats = reference
    for name, severity in product(DETERMINISTIC, corrupt.SEVERITIES):
        assert stats[name]["deterministic"]
        expected = pixels_of(folder / f"{name}_{severity}.png").astype(int)
        difference = np.abs(corrupt.corrupt(original, name, severity, seed=0) - expected)
        assert difference.max() <= 1, (name, severity)


def test_random_ones_draw_what_the_reference_draws(reference):
    """The same seed gives the reference's picture; OpenCV's affine map (elastic) rounds otherwise now."""
    folder, original, _ = reference
    for name in SAME_STREAM:
        expected = pixels_of(folder / f"{name}_3_seed0.png").astype(int)
        difference = np.abs(corrupt.corrupt(original, name, 3, seed=0) - expected)
        assert difference.max() <= (4 if name == "elastic_transform" else 1), name
        assert (difference > 1).mean() < 1e-3, name


@pytest.mark.parametrize(
    "names", [SAME_STREAM[:5], (*SAME_STREAM[5:], "impulse_noise")], ids=["noise", "weather"]
)
def test_statistics_are_the_references(reference, names):
    """Over the reference's own seeds its numbers; impulse_noise, from another stream, within 4 standard errors."""
    _, original, stats = reference
    for name, severity in product(names, corrupt.SEVERITIES):
        known = stats[name][str(severity)]
        draws = np.array(
            [
                measured(corrupt.corrupt(original, name, severity, s), original)
                for s in range(known["n"])
            ]
        )
        mean, spread = np.array([known[key] for key in MEASURES]).T
        if name == "impulse_noise":
            error = np.sqrt((spread**2 + draws.std(0) ** 2) / known["n"]) + 1e-3
            assert np.all(np.abs(draws.mean(0) - mean) < 4 * error)
        else:
            np.testing.assert_allclose(draws.mean(0), mean, atol=0.005, err_msg=name)
            np.testing.assert_allclose(draws.std(0), spread, atol=0.005, err_msg=name)


@pytest.mark.parametrize("name", ALL)
def test_a_corruption_is_a_function_of_picture_and_seed(name):
    original = np.ascontiguousarray(drawing(57)[:32])
    copy = original.copy()
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    first = corrupt.corrupt(original, name, 3, seed=5)
    assert np.array_equal(np.random.get_state()[1], state)  # others' draws are not touched
    assert np.array_equal(first, corrupt.corrupt(original, name, 3, seed=5))
    assert np.array_equal(original, copy)
    assert first.shape == original.shape
    assert first.dtype == np.uint8
    assert np.array_equal(first, corrupt.corrupt(original, name, 3, seed=6)) == (
        name in DETERMINISTIC
    )


def test_a_picture_without_a_drop_stays_a_picture():
    """imagecorruptions divides by the brightest drop; where none has formed the whole picture is lost."""
    original = drawing()
    for seed in range(60):
        assert corrupt.corrupt(original, "spatter", 1, seed).mean() > 0.5 * original.mean()


def source_of(number=6, side=40):
    pictures = [Image.fromarray(drawing(side, seed)) for seed in range(number)]
    return Source(pictures, [i % 3 for i in range(number)], ["a", "b", "c"])


CONFIG = dict(
    input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear", crop_pct=1.0
)


@pytest.mark.parametrize("workers", [0, 2])
def test_order_workers_and_subsets_change_nothing(workers):
    source = source_of()
    frame = corrupt.image_transform(CONFIG)
    whole = corrupt.CorruptedImages(source, frame, "impulse_noise", (2, 5))
    (images, labels), *rest = ordered_loader(whole, batch_ranges(len(whole), 6), workers)
    assert not rest
    assert images.shape == (6, 2, 3, 32, 32)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    part = corrupt.CorruptedImages(source.subset([4, 1]), frame, "impulse_noise", (5,))
    (some, _), *_ = ordered_loader(part, batch_ranges(len(part), 6), workers)
    assert torch.equal(some[:, 0], images[[4, 1], 1])
    other = corrupt.CorruptedImages(source, frame, "impulse_noise", (2, 5), seed=1)
    assert not torch.equal(other[0][0], images[0])
    cases = product(("fog", "snow"), (1, 2), (0, 1), (0, 1))
    # by corruption, severity, image and seed
    assert len({corrupt.corruption_seed(*case) for case in cases}) == 16


def test_pictures_are_framed_then_corrupted():
    source = source_of(1, 70)
    frame = corrupt.image_transform(
        {**CONFIG, **corrupt.IMAGENET_C_CROP, "input_size": (3, 56, 56)}
    )
    framed = frame(source.image(0))
    assert framed.size == (56, 56)
    expected = source.image(0).resize((64, 64), Image.Resampling.BILINEAR).crop((4, 4, 60, 60))
    assert np.array_equal(np.asarray(framed), np.asarray(expected))
    seen = corrupt.CorruptedImages(source, frame, "fog", (3,))[0][0][0].permute(1, 2, 0).numpy()
    assert np.array_equal(
        seen, corrupt.corrupt(np.asarray(framed), "fog", 3, corrupt.corruption_seed("fog", 3, 0))
    )
