"""ImageNet-C's corruptions with the reference's draws, where imagecorruptions has them differently or slowly.

The blurs are within one level (of 255) of the reference on the same draws. Images are (H, W, 3) uint8; `draws` is the
random stream of the one image. Needs OpenCV, scipy and the textures of imagecorruptions. `corrupt` calls the functions
that have the names of corruptions.
Source: Hendrycks and Dietterich 2019 (ImageNet-C), appendix; constants and order of draws as in its code.
"""

import importlib.resources
import math
from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np
import torch
from numpy.random import RandomState
from scipy.ndimage import gaussian_filter1d, map_coordinates
from torch.nn.functional import interpolate

# One row for each severity. Sigma, largest distance, rounds.
_GLASS = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
# Radius and sigma.
_MOTION = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
# End and step of the factors from 1.
_ZOOM = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Convert [0, 1] to uint8: clipped and truncated, not rounded, as in the reference."""
    return (np.clip(image, 0, 1) * 255).astype(np.uint8)


def gaussian_smooth(image: np.ndarray, sigma: float) -> np.ndarray:
    """Blur with a Gaussian truncated at 4 sigma, repeating the border. Shape: (H, W, 3) -> (H, W, 3) float64"""
    reach = int(4 * sigma + 0.5)
    size = 2 * reach + 1
    return cv2.GaussianBlur(image, (size, size), sigma, borderType=cv2.BORDER_REPLICATE)


def glass_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Blur, replace pixels by nearby ones, and blur again.

    The reference means to swap pixels; its tuple assignment of views copies one over the other, as here.
    """
    sigma, reach, rounds = _GLASS[severity - 1]
    softened = gaussian_smooth(image / 255, sigma) * 255
    softened = softened.astype(np.uint8)
    for _ in range(rounds):
        softened = copy_nearby_pixels(softened, reach, draws)
    return to_uint8(gaussian_smooth(softened / 255, sigma))


def copy_nearby_pixels(image: np.ndarray, reach: int, draws: RandomState) -> np.ndarray:
    """Overwrite every pixel, from the last to the first, by the current value of one at most `reach` away.

    At once: each points at the pixel that it copies; pointers to pixels overwritten earlier are followed to their end.
    """
    height, width = image.shape[:2]
    rows = np.arange(height - reach, reach, -1)
    columns = np.arange(width - reach, reach, -1)
    jumps = draws.randint(-reach, reach, size=(len(rows), len(columns), 2))
    here = rows[:, None] * width + columns
    there = here + jumps[..., 1] * width + jumps[..., 0]
    pixels = height * width
    overwritten = np.zeros(pixels, bool)
    overwritten[here] = True
    is_new = (there > here) & overwritten[there]

    # first half: new values of the pixels; second half: old values
    pointers = np.arange(2 * pixels)
    pointers[:pixels] += pixels
    pointers[here] = np.where(is_new, there, there + pixels)
    while np.any(pointers[:pixels] < pixels):
        pointers = pointers[pointers]

    sources = pointers[:pixels] - pixels
    return image.reshape(pixels, 3)[sources].reshape(image.shape)


def motion_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    radius, sigma = _MOTION[severity - 1]
    angle = draws.uniform(-45, 45)
    blurred = blur_along_line(image, radius, sigma, angle)
    return np.clip(blurred, 0, 255).astype(np.uint8)


def blur_along_line(image: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """Blur by half a Gaussian along a line, as ImageMagick's motion blur: whole-pixel steps, repeating the border.

    Shape: (H, W) or (H, W, 3) -> the same, float32
    """
    width = 2 * radius + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    sine = np.sin(np.deg2rad(angle))
    cosine = np.cos(np.deg2rad(angle))
    step = math.hypot(sine, cosine)

    margin = width + 1
    wide = image.astype(np.float32)
    wide = cv2.copyMakeBorder(wide, margin, margin, margin, margin, cv2.BORDER_REPLICATE)
    height, length = image.shape[:2]
    blurred = np.zeros(image.shape, np.float32)
    for i, weight in enumerate(weights):
        down = -math.ceil(i * sine / step - 0.5)
        right = -math.ceil(i * cosine / step - 0.5)
        # beyond the image: the reference stops here
        if abs(down) >= height or abs(right) >= length:
            break
        top = margin - down
        left = margin - right
        shifted = wide[top : top + height, left : left + length]
        cv2.scaleAdd(shifted, float(weight), blurred, blurred)
    return blurred


def zoom_blur(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Return the mean of the image and its zooms about the centre."""
    end, step = _ZOOM[severity - 1]
    planes = (image / 255).astype(np.float32).transpose(2, 0, 1)
    sharp = np.ascontiguousarray(planes)
    factors = np.arange(1, end, step)
    total = sharp
    for factor in factors:
        total = total + zoom_centre(sharp, factor)
    average = total.transpose(1, 2, 0) / (len(factors) + 1)
    return to_uint8(average)


def zoom_centre(planes: np.ndarray, factor: float) -> np.ndarray:
    """Zoom the centre of an image to the size of the whole, as scipy.ndimage.zoom. Shape: (C, H, W) -> the same"""
    sides = planes.shape[1:]
    cropped = [math.ceil(side / factor) for side in sides]
    zoomed = [round(part * factor) for part in cropped]
    centre = torch.from_numpy(_cut_centre(planes, cropped))[None]
    larger = interpolate(centre, size=zoomed, mode="bilinear", align_corners=True)[0]
    return _cut_centre(larger.numpy(), sides)


def _cut_centre(planes: np.ndarray, sides: Sequence[int]) -> np.ndarray:
    height, width = sides
    top = (planes.shape[1] - height) // 2
    left = (planes.shape[2] - width) // 2
    return planes[:, top : top + height, left : left + width]


# Mean and deviation of the flakes, zoom, threshold, radius and sigma of their motion blur, weight of the image.
_SNOW = (
    (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
# Weights of the image and of the texture.
_FROST = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
# The reference's randint(5) draws no sixth.
FROST_TEXTURES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
_BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)


def snow(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Add motion-blurred flakes to a whitened image, and the same flakes rotated by 180 degrees."""
    mean, deviation, factor, threshold, radius, sigma, weight = _SNOW[severity - 1]
    x = image.astype(np.float32) / 255
    noise = draws.normal(mean, deviation, (1, *x.shape[:2]))
    flakes = zoom_centre(noise, factor)[0]
    flakes[flakes < threshold] = 0
    angle = draws.uniform(-135, -45)
    layer = blur_along_line(to_uint8(flakes), radius, sigma, angle)
    layer = np.floor(layer)[..., None] / 255  # ImageMagick works in whole levels, before and after
    grey = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    white = np.maximum(x, grey * 1.5 + 0.5)
    return to_uint8(weight * x + (1 - weight) * white + layer + np.rot90(layer, 2))


def frost(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Blend the image with a random crop of one of five textures, at the texture's own scale."""
    weight, ice = _FROST[severity - 1]
    height, width = image.shape[:2]
    number = draws.randint(len(FROST_TEXTURES))
    texture = _enlarge_to_fit(frost_texture(number), height, width)
    top = draws.randint(0, texture.shape[0] - height)
    left = draws.randint(0, texture.shape[1] - width)
    crop = texture[top : top + height, left : left + width]
    return np.clip(weight * image + ice * crop, 0, 255).astype(np.uint8)


@lru_cache(len(FROST_TEXTURES))
def frost_texture(number: int) -> np.ndarray:
    """Read a frost texture. Shape: -> (H, W, 3) uint8, RGB"""
    file = importlib.resources.files("imagecorruptions") / "frost" / FROST_TEXTURES[number]
    data = np.frombuffer(file.read_bytes(), np.uint8)
    blue_green_red = np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR))
    return blue_green_red[..., ::-1].copy()


def _enlarge_to_fit(texture: np.ndarray, height: int, width: int) -> np.ndarray:
    scale = max((height + 1) / texture.shape[0], (width + 1) / texture.shape[1])
    if scale <= 1:
        return texture
    new_width = math.ceil(texture.shape[1] * scale)
    new_height = math.ceil(texture.shape[0] * scale)
    return cv2.resize(texture, (new_width, new_height), interpolation=cv2.INTER_CUBIC)


def brightness(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Raise the value of HSV, not hue and saturation: every channel times (value + c) / value."""
    return _brightness_table(severity)[image.max(-1, keepdims=True), image]


@lru_cache(5)
def _brightness_table(severity: int) -> np.ndarray:
    """Return a channel's new level, by the largest channel and its own level. Shape: -> (256, 256) uint8"""
    value, level = np.mgrid[:256, :256] / 255
    raised = np.minimum(value + _BRIGHTNESS[severity - 1], 1)
    ratio = np.divide(level, value, out=np.ones_like(level), where=value > 0)
    return to_uint8(raised * ratio)


# Strength and smoothness of the field, reach of the affine map, in units of _REFERENCE_SCALE x the image's side.
_ELASTIC = (
    (2, 0.7, 0.1),
    (2, 0.08, 0.2),
    (0.05, 0.01, 0.02),
    (0.07, 0.01, 0.02),
    (0.12, 0.01, 0.02),
)
_REFERENCE_SCALE = 244 / 224  # the reference uses 244 for its images of 224 px


def elastic_transform(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Move three points at random (an affine map), then every pixel by a smooth random field."""
    height, width = image.shape[:2]
    side = _REFERENCE_SCALE * min(height, width)
    strength, sigma, reach = (constant * side for constant in _ELASTIC[severity - 1])

    # (row, column) where OpenCV has (x, y), as in the reference
    centre = np.asarray([height, width], np.float32) // 2
    third = min(height, width) // 3
    offsets = np.asarray([[third, third], [third, -third], [-third, -third]])
    corners = (centre + offsets).astype(np.float32)
    shifts = draws.uniform(-reach, reach, size=corners.shape)
    affine = cv2.getAffineTransform(corners, corners + shifts.astype(np.float32))
    x = image.astype(np.float32) / 255
    x = cv2.warpAffine(x, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)

    blur_rows = gaussian_blur_matrix(height, sigma)
    blur_columns = gaussian_blur_matrix(width, sigma).T
    # right before down: the order of the reference's draws
    right = blur_rows @ draws.uniform(-1, 1, (height, width)) @ blur_columns * strength
    down = blur_rows @ draws.uniform(-1, 1, (height, width)) @ blur_columns * strength
    rows, columns = np.mgrid[:height, :width]
    positions = rows + down.astype(np.float32), columns + right.astype(np.float32)
    moved = [map_coordinates(plane, positions, order=1, mode="reflect") for plane in cv2.split(x)]
    return to_uint8(np.stack(moved, -1))


@lru_cache(16)
def gaussian_blur_matrix(side: int, sigma: float) -> np.ndarray:
    """Return the matrix of a Gaussian blur along one side, truncated at 3 sigma, reflected. Shape: -> (side, side)"""
    return gaussian_filter1d(np.eye(side), sigma, axis=0, mode="reflect", truncate=3)
