"""ImageNet-C's elastic transform with the reference's draws; contrast and saturate, implemented faster.

Images are (H, W, 3) uint8; `draws` is the random stream of the one image. Needs OpenCV and scipy.
Source: Hendrycks and Dietterich 2019 (ImageNet-C), appendix; constants and order of draws as in its code.
"""

from functools import lru_cache

import cv2
import numpy as np
from numpy.random import RandomState
from scipy.ndimage import gaussian_filter1d

from isomorph.data.corruptions.blur import to_uint8

_ELASTIC = ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
"""Strength and smoothness of the field, reach of the affine map, in units of _REFERENCE_SCALE x the image's side."""
_REFERENCE_SCALE = 244 / 224
"""The reference uses 244 for its images of 224 px."""
_CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)
_SATURATE = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))
"""Factor and shift of the saturation; the first two severities reduce it."""


def elastic_transform(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Move three points at random (an affine map), then every pixel by a smooth random field."""
    height, width = image.shape[:2]
    side = _REFERENCE_SCALE * min(height, width)
    strength, sigma, reach = (constant * side for constant in _ELASTIC[severity - 1])
    centre, third = np.asarray([height, width], np.float32) // 2, min(height, width) // 3
    corners = np.stack([centre + third, centre + np.asarray([third, -third]), centre - third]).astype(np.float32)
    dragged = corners + draws.uniform(-reach, reach, size=corners.shape).astype(np.float32)
    affine = cv2.getAffineTransform(corners, dragged)
    x = image.astype(np.float32) / 255
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
    """Return the matrix of a Gaussian blur along one side, truncated at 3 sigma, mirrored. Shape: -> (side, side)"""
    return gaussian_filter1d(np.eye(side), sigma, axis=0, mode="reflect", truncate=3)


def sample_bilinear(image: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Sample the image between its pixels, bilinearly; beyond the border it is mirrored and edge pixels repeat.

    Shape: (H, W, 3), (h, w), (h, w) -> (h, w, 3)
    """
    (top, bottom, down), (left, right, across) = (
        _neighbour_pixels(positions, side) for positions, side in zip((rows, columns), image.shape, strict=False)
    )
    flat, width = image.reshape(-1, image.shape[2]), image.shape[1]
    corner = flat.take(top * width + left, 0) * (1 - across) + flat.take(top * width + right, 0) * across
    other = flat.take(bottom * width + left, 0) * (1 - across) + flat.take(bottom * width + right, 0) * across
    return corner * (1 - down) + other * down


def _neighbour_pixels(positions: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pixels before and after each position, mirrored into the image, and the weight of the latter."""
    before = np.floor(positions)
    weight = (positions - before).astype(np.float32)[..., None]
    return mirror_indices(before.astype(int), side), mirror_indices(before.astype(int) + 1, side), weight


def mirror_indices(indices: np.ndarray, side: int) -> np.ndarray:
    """Mirror indices into 0 to side - 1: d c b a | a b c d | d c b a."""
    indices = indices % (2 * side)
    return np.minimum(indices, 2 * side - 1 - indices)


def contrast(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Move every channel towards its mean over the image."""
    levels, factor = np.arange(256)[:, None] / 255, _CONTRAST[severity - 1]
    means = np.mean(image / 255, axis=(0, 1))
    table = to_uint8((levels - means) * factor + means)  # (256, 3)
    return table[image, np.arange(3)]


def saturate(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Scale and shift the saturation of HSV, not hue and value; grey has hue 0, so a shift turns it red."""
    value, least = image.max(-1, keepdims=True), image.min(-1, keepdims=True)
    saturated = value - (value - image.astype(np.float32)) * _saturation_gain(severity)[value, least]
    shift = _SATURATE[severity - 1][1]
    grey = value * np.asarray([1, 1 - shift, 1 - shift], np.float32)
    return to_uint8(np.where(value == least, grey, saturated) / 255)


@lru_cache(5)
def _saturation_gain(severity: int) -> np.ndarray:
    """Return new saturation / old, by largest and smallest channel. Shape: -> (256, 256) float32"""
    factor, shift = _SATURATE[severity - 1]
    value, least = np.mgrid[:256, :256].astype(np.float64)
    old = np.divide(value - least, value, out=np.ones_like(value), where=value > least)
    return (np.clip(old * factor + shift, 0, 1) / old).astype(np.float32)
