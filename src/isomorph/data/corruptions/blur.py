"""ImageNet-C's blurs, implemented faster; each is within one level (of 255) of the reference on the same draws.

Images are (H, W, 3) uint8; `draws` is the random stream of the one image. Needs OpenCV and scipy.
Source: Hendrycks and Dietterich 2019 (ImageNet-C), appendix; constants and order of draws as in its code.
"""

import math
from functools import lru_cache

import cv2
import numpy as np
from numpy.random import RandomState
from scipy.ndimage import gaussian_filter1d

_DEFOCUS = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))
"""Radius, and sigma of the softened edge."""
_GLASS = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
"""Sigma, largest distance, rounds."""
_MOTION = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
"""Radius and sigma."""
_ZOOM = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
"""End and step of the zoom factors, which start at 1."""
_GAUSSIAN = (1, 2, 3, 4, 6)


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Convert [0, 1] to uint8: clipped and truncated, not rounded, as in the reference."""
    return (np.clip(image, 0, 1) * 255).astype(np.uint8)


def gaussian_smooth(image: np.ndarray, sigma: float) -> np.ndarray:
    """Blur with a Gaussian truncated at 4 sigma, repeating the border. Shape: (H, W, 3) -> (H, W, 3) float64"""
    taps = _gaussian_taps(sigma)
    return cv2.sepFilter2D(image, cv2.CV_64F, taps, taps, borderType=cv2.BORDER_REPLICATE)


@lru_cache(16)
def _gaussian_taps(sigma: float) -> np.ndarray:
    radius = int(4 * sigma + 0.5)
    impulse = np.zeros(2 * radius + 1)
    impulse[radius] = 1
    return gaussian_filter1d(impulse, sigma, mode="constant")


def gaussian_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    return to_uint8(gaussian_smooth(image / 255, _GAUSSIAN[severity - 1]))


def defocus_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Convolve with a soft-edged disk."""
    return to_uint8(cv2.filter2D(image / 255, -1, _disk_kernel(*_DEFOCUS[severity - 1])))


@lru_cache(8)
def _disk_kernel(radius: int, sigma: float) -> np.ndarray:
    extent, kernel = (8, 3) if radius <= 8 else (radius, 5)
    rows, columns = np.mgrid[-extent : extent + 1, -extent : extent + 1]
    inside = (rows**2 + columns**2 <= radius**2).astype(np.float32)
    return cv2.GaussianBlur(inside / inside.sum(), (kernel, kernel), sigmaX=sigma)


def glass_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Blur, replace pixels by nearby ones, and blur again.

    The reference is meant to swap pixels, but its tuple assignment of NumPy views copies one over the other; so does
    this function.
    """
    sigma, reach, rounds = _GLASS[severity - 1]
    softened = (gaussian_smooth(image / 255, sigma) * 255).astype(np.uint8)
    for _ in range(rounds):
        softened = copy_nearby_pixels(softened, reach, draws)
    return to_uint8(gaussian_smooth(softened / 255, sigma))


def copy_nearby_pixels(image: np.ndarray, reach: int, draws: RandomState) -> np.ndarray:
    """Overwrite every pixel, from the last to the first, by the current value of one at most `reach` away.

    Computed for all pixels together: each points at the pixel that it copies, and pointers to pixels that were
    overwritten earlier are followed to their end.
    """
    height, width = image.shape[:2]
    rows, columns = np.arange(height - reach, reach, -1), np.arange(width - reach, reach, -1)
    jumps = draws.randint(-reach, reach, size=(len(rows), len(columns), 2))
    here = rows[:, None] * width + columns
    there = here + jumps[..., 1] * width + jumps[..., 0]
    pixels = height * width
    overwritten = np.zeros(pixels, bool)
    overwritten[here] = True
    pointers = np.arange(2 * pixels)  # first half: new values of the pixels; second half: old values
    pointers[:pixels] += pixels
    pointers[here] = np.where((there > here) & overwritten[there], there, there + pixels)
    while np.any(pointers[:pixels] < pixels):
        pointers = pointers[pointers]
    return image.reshape(pixels, 3)[pointers[:pixels] - pixels].reshape(image.shape)


def motion_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    radius, sigma = _MOTION[severity - 1]
    blurred = blur_along_line(image, radius, sigma, draws.uniform(-45, 45))
    return np.clip(blurred, 0, 255).astype(np.uint8)


def blur_along_line(image: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """Blur by half a Gaussian along a line, as ImageMagick's motion blur: whole-pixel steps, repeating the border.

    Shape: (H, W) or (H, W, 3) -> the same, float32
    """
    width = 2 * radius + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    step = np.sin(np.deg2rad(angle)), np.cos(np.deg2rad(angle))
    margin = width + 1
    wide = cv2.copyMakeBorder(image.astype(np.float32), *(margin,) * 4, cv2.BORDER_REPLICATE)
    height, length = image.shape[:2]
    blurred = np.zeros(image.shape, np.float32)
    for i, weight in enumerate(weights):
        down, right = (-math.ceil(i * part / math.hypot(*step) - 0.5) for part in step)
        if abs(down) >= height or abs(right) >= length:  # beyond the image: the reference stops here
            break
        top, left = margin - down, margin - right
        cv2.scaleAdd(wide[top : top + height, left : left + length], float(weight), blurred, blurred)
    return blurred


def zoom_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Return the mean of the image and its zooms about the centre."""
    end, step = _ZOOM[severity - 1]
    sharp = (image / 255).astype(np.float32)
    factors = np.arange(1, end, step)
    total = cv2.transpose(sharp)  # (W, H, 3): then both resamplings move whole rows
    for factor in factors:
        tall = _resample_rows(sharp, _zoom_positions(sharp.shape[0], factor))  # (H, W, 3)
        total += _resample_rows(cv2.transpose(tall), _zoom_positions(sharp.shape[1], factor))
    return to_uint8(cv2.transpose(total) / (len(factors) + 1))


_RowPositions = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Index of the row before, index of the row after, weight of the row after."""


def _resample_rows(image: np.ndarray, positions: _RowPositions) -> np.ndarray:
    """Interpolate rows linearly: zooms the image along its first side and crops it to its length."""
    before, after, weight = positions
    first = image.take(before, 0)
    difference = image.take(after, 0)
    difference -= first
    difference *= weight[:, None, None]
    first += difference
    return first


@lru_cache(256)
def _zoom_positions(side: int, factor: float) -> _RowPositions:
    """Return the sources of a zoomed side's pixels: the pixel before, the pixel after, and the weight of the latter."""
    cropped = math.ceil(side / factor)
    length = round(cropped * factor)
    first = (length - side) // 2
    positions = np.arange(length)[first : first + side] * ((cropped - 1) / max(1, length - 1))
    before = np.minimum(positions.astype(int), cropped - 1)
    start = (side - cropped) // 2
    return start + before, start + np.minimum(before + 1, cropped - 1), (positions - before).astype(np.float32)
