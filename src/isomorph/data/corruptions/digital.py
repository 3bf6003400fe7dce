"""ImageNet-C's elastic transform as its code draws it; contrast and saturate, made fast.

Pictures are (H, W, 3) uint8; `draws` is the picture's own random stream. Needs OpenCV and scipy.
Source: Hendrycks and Dietterich 2019 (ImageNet-C), appendix; constants and order of draws as in its code.
"""

from functools import lru_cache

import cv2
import numpy as np
from numpy.random import RandomState
from scipy.ndimage import gaussian_filter1d

from isomorph.data.corruptions.blur import to_uint8

_ELASTIC = ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
"""Strength and smoothness of the field and reach of the affine part, in units of UNIT times the picture's side."""
_REFERENCE_SCALE = 244 / 224
"""The reference writes 244 for its pictures of 224 px."""
_CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)
_SATURATE = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))
"""Factor and shift of the saturation; the first two severities take colour away."""


def elastic_transform(picture: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Three points dragged (an affine map), then every pixel moved by a smooth random field."""
    height, width = picture.shape[:2]
    side = _REFERENCE_SCALE * min(height, width)
    strength, sigma, reach = (constant * side for constant in _ELASTIC[severity - 1])
    centre, third = np.asarray([height, width], np.float32) // 2, min(height, width) // 3
    corners = np.stack([centre + third, centre + np.asarray([third, -third]), centre - third]).astype(np.float32)
    dragged = corners + draws.uniform(-reach, reach, size=corners.shape).astype(np.float32)
    affine = cv2.getAffineTransform(corners, dragged)
    x = picture.astype(np.float32) / 255
    x = cv2.warpAffine(x, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    right, down = (
        gaussian_blur_matrix(height, sigma)
        @ draws.uniform(-1, 1, (height, width))
        @ gaussian_blur_matrix(width, sigma).T
        * strength
        for _ in range(2)
    )
    rows, columns = np.arange(height)[:, None], np.arange(width)
    return to_uint8(sample_bilinear(x, rows + down.astype(np.float32), columns + right.astype(np.float32)))


@lru_cache(16)
def gaussian_blur_matrix(side: int, sigma: float) -> np.ndarray:
    """Gaussian blur along one side as a matrix, cut off at 3 sigma, the border mirrored. Shape: (side, side)"""
    return gaussian_filter1d(np.eye(side), sigma, axis=0, mode="reflect", truncate=3)


def sample_bilinear(picture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The picture between its pixels, linearly; beyond its border it is mirrored, edge pixels twice.

    Shape: (H, W, 3), (h, w), (h, w) -> (h, w, 3)
    """
    (top, bottom, down), (left, right, across) = (
        _neighbour_pixels(places, side) for places, side in zip((rows, columns), picture.shape, strict=False)
    )
    flat, width = picture.reshape(-1, picture.shape[2]), picture.shape[1]
    corner = flat.take(top * width + left, 0) * (1 - across) + flat.take(top * width + right, 0) * across
    other = flat.take(bottom * width + left, 0) * (1 - across) + flat.take(bottom * width + right, 0) * across
    return corner * (1 - down) + other * down


def _neighbour_pixels(places: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pixels before and after a place, mirrored into the picture, and the share of the latter."""
    before = np.floor(places)
    share = (places - before).astype(np.float32)[..., None]
    return mirror_indices(before.astype(int), side), mirror_indices(before.astype(int) + 1, side), share


def mirror_indices(places: np.ndarray, side: int) -> np.ndarray:
    """d c b a | a b c d | d c b a"""
    places = places % (2 * side)
    return np.minimum(places, 2 * side - 1 - places)


def contrast(picture: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Every channel drawn towards its mean over the picture."""
    levels, share = np.arange(256)[:, None] / 255, _CONTRAST[severity - 1]
    means = np.mean(picture / 255, axis=(0, 1))
    table = to_uint8((levels - means) * share + means)  # (256, 3)
    return table[picture, np.arange(3)]


def saturate(picture: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """The saturation of HSV scaled and shifted, hue and value kept; grey has hue 0, so it turns red when shifted."""
    value, least = picture.max(-1, keepdims=True), picture.min(-1, keepdims=True)
    saturated = value - (value - picture.astype(np.float32)) * _saturation_gain(severity)[value, least]
    shift = _SATURATE[severity - 1][1]
    grey = value * np.asarray([1, 1 - shift, 1 - shift], np.float32)
    return to_uint8(np.where(value == least, grey, saturated) / 255)


@lru_cache(5)
def _saturation_gain(severity: int) -> np.ndarray:
    """New saturation over old, by largest and smallest channel. Shape: (256, 256) float32"""
    factor, shift = _SATURATE[severity - 1]
    value, least = np.mgrid[:256, :256].astype(np.float64)
    old = np.divide(value - least, value, out=np.ones_like(value), where=value > least)
    return (np.clip(old * factor + shift, 0, 1) / old).astype(np.float32)
