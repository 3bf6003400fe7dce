"""ImageNet-C's corruptions with the reference's draws, where imagecorruptions has them differently or slowly.

The blurs are within one level (of 255) of the reference on the same draws. Images are (H, W, 3) uint8; `draws` is the
random stream of the one image. Needs OpenCV, scipy and the textures of imagecorruptions. `corrupt` calls the functions
that have the names of corruptions.
Source: Hendrycks and Dietterich 2019 (ImageNet-C), appendix; constants and order of draws as in its code.
"""

import importlib.resources
import math
from functools import lru_cache

import cv2
import numpy as np
from numpy.random import RandomState
from scipy.ndimage import gaussian_filter1d, zoom

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
