"""ImageNet-C's snow, frost and spatter with the reference's draws; brightness by a table.

Images are (H, W, 3) uint8; `draws` is the random stream of the one image. Needs OpenCV, scipy and
imagecorruptions' textures.
Source: Hendrycks and Dietterich 2019 (ImageNet-C), appendix; constants and order of draws as in its code.
"""

import importlib.resources
import math
from functools import lru_cache

import cv2
import numpy as np
from numpy.random import RandomState
from scipy.ndimage import zoom

from isomorph.data.corruptions.blur import blur_along_line, gaussian_smooth, to_uint8

_SNOW = (
    (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
"""Mean and deviation of the flakes, zoom, threshold, radius and sigma of their motion blur, weight of the image."""
_FROST = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
"""Weights of the image and of the texture."""
FROST_TEXTURES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""The reference has a sixth, which its randint(5) never draws."""
_BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)
_SPATTER = (
    (0.65, 0.3, 4, 0.69, 0.6),
    (0.65, 0.3, 3, 0.68, 0.6),
    (0.65, 0.3, 2, 0.68, 0.5),
    (0.65, 0.3, 1, 0.65, 1.5),
    (0.67, 0.4, 1, 0.65, 1.5),
)
"""Mean, deviation and smoothness of the liquid, threshold, and strength of the water or smoothness of the mud."""
_WATER, _MUD = np.array([175, 238, 238]) / 255, np.array([63, 42, 20]) / 255


def snow(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Add motion-blurred flakes to a whitened image, and the same flakes rotated by 180 degrees."""
    mean, deviation, factor, threshold, radius, sigma, weight = _SNOW[severity - 1]
    x = image.astype(np.float32) / 255
    flakes = _zoom_centre(draws.normal(mean, deviation, x.shape[:2]), factor)
    flakes[flakes < threshold] = 0
    layer = blur_along_line(to_uint8(flakes), radius, sigma, draws.uniform(-135, -45))
    layer = np.floor(layer)[..., None] / 255  # ImageMagick works in whole levels, before and after
    white = np.maximum(x, cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None] * 1.5 + 0.5)
    return to_uint8(weight * x + (1 - weight) * white + layer + np.rot90(layer, 2))


def _zoom_centre(plane: np.ndarray, factor: float) -> np.ndarray:
    """Zoom the centre to the size of the whole. Shape: (H, W) -> (H, W)"""
    cropped = [math.ceil(side / factor) for side in plane.shape]
    top, left = ((side - part) // 2 for side, part in zip(plane.shape, cropped, strict=True))
    zoomed = zoom(plane[top : top + cropped[0], left : left + cropped[1]], factor, order=1)
    top, left = ((length - side) // 2 for length, side in zip(zoomed.shape, plane.shape, strict=True))
    return zoomed[top : top + plane.shape[0], left : left + plane.shape[1]].copy()


def frost(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Blend the image with a random crop of one of five textures, at the texture's own scale."""
    weight, ice = _FROST[severity - 1]
    height, width = image.shape[:2]
    texture = _enlarge_to_fit(frost_texture(draws.randint(len(FROST_TEXTURES))), height, width)
    top, left = draws.randint(0, texture.shape[0] - height), draws.randint(0, texture.shape[1] - width)
    return np.clip(weight * image + ice * texture[top : top + height, left : left + width], 0, 255).astype(np.uint8)


@lru_cache(len(FROST_TEXTURES))
def frost_texture(number: int) -> np.ndarray:
    """Read a frost texture. Shape: -> (H, W, 3) uint8, RGB"""
    file = importlib.resources.files("imagecorruptions") / "frost" / FROST_TEXTURES[number]
    return np.asarray(cv2.imdecode(np.frombuffer(file.read_bytes(), np.uint8), cv2.IMREAD_COLOR))[..., ::-1].copy()


def _enlarge_to_fit(texture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the texture, enlarged where the image would not fit into it (never at 224 px)."""
    scale = max((height + 1) / texture.shape[0], (width + 1) / texture.shape[1])
    if scale <= 1:
        return texture
    size = math.ceil(texture.shape[1] * scale), math.ceil(texture.shape[0] * scale)
    return cv2.resize(texture, size, interpolation=cv2.INTER_CUBIC)


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


def spatter(image: np.ndarray, severity: int, draws: RandomState) -> np.ndarray:
    """Add drops of water, lit at their edges, up to severity 3, and splashes of mud above."""
    mean, deviation, sigma, threshold, last = _SPATTER[severity - 1]
    liquid = gaussian_smooth(draws.normal(mean, deviation, image.shape[:2]), sigma)
    liquid[liquid < threshold] = 0
    if severity > 3:
        cover = gaussian_smooth((liquid > threshold).astype(np.float32), last)[..., None]
        cover[cover < 0.8] = 0
        return to_uint8(image / 255 * (1 - cover) + cover * _MUD)
    drops = (liquid * 255).astype(np.uint8)
    light = drops * _edge_light(drops)
    brightest = light.max()  # 0 if a small image has no drop; imagecorruptions divides by it
    return to_uint8(image / 255 + last * light[..., None] / (brightest or 1) * _WATER)


def _edge_light(drops: np.ndarray) -> np.ndarray:
    """Return the light on drops: an embossing filter of the distance to edges. Shape: (H, W) -> (H, W)"""
    distance = cv2.distanceTransform(255 - cv2.Canny(drops, 50, 150), cv2.DIST_L2, 5)
    near = cv2.equalizeHist(cv2.blur(np.minimum(distance, 20), (3, 3)).astype(np.uint8))
    embossed = cv2.filter2D(near, cv2.CV_8U, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]))
    return cv2.blur(embossed, (3, 3)).astype(np.float32)
