"""Other patch and image sizes of a vision transformer, and by how much its outputs move.

Pixels of a patch as a vector x, resized by the matrix B: B x. New filters are w' = (B^+)^T w, with the pseudo-inverse
of B. Then w' . y = w . (B^+ y) for every patch y: exactly what the old filters give of the patch resized by B^+. If
patches grow, B^+ B = 1, so that w' . (B x) = w . x. Positions of another grid are interpolated, which is not exact.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.errors import UserError, first_line
from isomorph.layers.modes import eval_mode
from isomorph.operations import copy_module, tensors_in
from isomorph.spec import ImageSize
from isomorph.spec import image_size as height_and_width
from isomorph.surgery.calls import call_model, check_not_empty
from isomorph.surgery.comparison import class_agreement, relative_difference
from isomorph.surgery.plain_layers import check_attached
from isomorph.surgery.recast import check_model


def resizing_matrix(old: ImageSize, new: ImageSize) -> Tensor:
    """Return the matrix that resizes an image as a vector, bicubic with antialiasing, in float64.

    Shape: -> (new height * new width, old height * old width)
    """
    count = old[0] * old[1]
    pixels = torch.eye(count, dtype=torch.float64).reshape(count, 1, *old)
    resized = F.interpolate(pixels, size=new, mode="bicubic", antialias=True, align_corners=False)
    return resized.reshape(count, -1).T


def resize_filters(filters: Tensor, size: ImageSize) -> Tensor:
    """Return filters of patches of another size, which give the same of resized patches; see above.

    Shape: (O, C, h, w) -> (O, C, *size), in float64
    Source: FlexiViT (Beyer et al., 2023), section 3.4
    """
    inverse = torch.linalg.pinv(resizing_matrix(sides_of(filters), size))  # (h w, h' w')
    resized = filters.double().flatten(2) @ inverse.to(filters.device)  # (O, C, h' w')
    return resized.reshape(*filters.shape[:2], *size)


@dataclass(frozen=True)
class OutputShift:
    """By how much outputs moved: the root mean square relative to that of the outputs, and the share of equal classes.

    `same_class` is in percent, None where outputs are not logits of images.
    """

    relative: float
    same_class: float | None

    def __str__(self) -> str:
        agreement = "" if self.same_class is None else f", same class for {self.same_class:.0f}%"
        return f"{100 * self.relative:.2g}% (root mean square){agreement}"


@dataclass(frozen=True, repr=False)
class ResizeReport:
    """Result of `resize_patches`: the model for other sizes, and what is exact.

    Sizes are heights and widths before and after. `embedding` is the largest relative difference of the embeddings of
    the images' patches from those that the original gives of the resized patches, computed in float64: rounding of the
    new filters alone. `enlarged` is the same for patches of the original's size that are enlarged, None if patches do
    not grow. `moved` says by how much outputs
    move: the new model on the images at its size, the original on the same images at its own; `moved_by_timm` the same
    for timm's `set_input_size`.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1).eval()
    >>> report = iso.resize_patches(vit, torch.randn(2, 3, 64, 64), patch_size=32, image_size=128)
    >>> report.grid, report.embedding < 1e-6, report.enlarged < 1e-6
    (((4, 4), (4, 4)), True, True)
    """

    model: nn.Module = field(compare=False)
    patch: tuple[ImageSize, ImageSize]
    grid: tuple[ImageSize, ImageSize]
    image: tuple[ImageSize, ImageSize]
    embedding: float
    enlarged: float | None
    moved: OutputShift
    moved_by_timm: OutputShift

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, without the model."""
        shifts = {name: vars(getattr(self, name)) for name in ("moved", "moved_by_timm")}
        return {name: value for name, value in vars(self).items() if name != "model"} | shifts

    def __str__(self) -> str:
        sizes = {"patches": self.patch, "grid": self.grid, "images": self.image}
        changes = [
            f"{name} {describe_size(old)} -> {describe_size(new)}"
            for name, (old, new) in sizes.items()
        ]
        lines = [", ".join(changes)]
        if self.patch[0] != self.patch[1]:
            lines.append(
                f"  exact: each patch is embedded as the original embeds it resized (relative difference "
                f"{self.embedding:.1g}, rounding of the filters)"
            )
        if self.enlarged is not None:
            lines.append(
                f"  exact: an enlarged patch has the embedding of the original one ({self.enlarged:.1g})"
            )
        if self.grid[0] != self.grid[1]:
            lines.append("  not exact: embeddings of positions are interpolated to the new grid")
        lines.append(
            f"  outputs on these images move by {self.moved}; by timm's set_input_size {self.moved_by_timm}"
        )
        return "\n".join(lines)

    __repr__ = __str__


def describe_size(size: ImageSize) -> str:
    return f"{size[0]}x{size[1]}"


@torch.no_grad()
def resize_patches(
    model: nn.Module,
    images: Tensor,
    patch_size: int | ImageSize | None = None,
    image_size: int | ImageSize | None = None,
) -> ResizeReport:
    """Return a copy of a vision transformer for another patch or image size, and what of it is exact.

    timm's `set_input_size` builds the copy; its patch filters are then computed in float64. The report says what the
    new patches embed exactly, and by how much outputs move on your images, compared with the original on the same
    images at its own size. Train it further where that is too much.

    Args:
        model: a model of timm whose patches are embedded by one convolution, and that has `set_input_size`.
        images: normalised images (B, C, H, W) of any size; they are resized to the sizes of both models.
        patch_size: by default the model's own.
        image_size: by default the model's own; with other patches, the grid changes then.

    Raises: UserError for another model (create the other size in its library, and give it the weights by
        `iso.port_weights`), or for images that the patches do not fill.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
        >>> report = iso.resize_patches(vit, torch.randn(2, 3, 32, 32), patch_size=8)
        >>> report.grid, report.model(torch.randn(2, 3, 32, 32)).shape
        (((2, 2), (4, 4)), torch.Size([2, 1000]))
    """
    original: Any = check_model(model)
    check_not_empty(images)
    new, by_timm = for_sizes(original, patch_size, image_size)
    embed = original.patch_embed
    layer = embed.proj
    old_image: ImageSize = tuple(embed.img_size)
    new_image: ImageSize = tuple(new.patch_embed.img_size)
    images_by_size = {
        size: _resized(images.to(layer.weight), size) for size in (old_image, new_image)
    }
    original_logits = _logits(original, images_by_size[old_image])
    return ResizeReport(
        model=new,
        patch=(kernel_of(layer), kernel_of(new.patch_embed.proj)),
        grid=(tuple(embed.grid_size), tuple(new.patch_embed.grid_size)),
        image=(old_image, new_image),
        embedding=_embedding_difference(layer, new.patch_embed.proj, images_by_size[new_image]),
        enlarged=_enlarged_difference(layer, new.patch_embed.proj, images_by_size[old_image]),
        moved=_shift(original_logits, _logits(new, images_by_size[new_image])),
        moved_by_timm=_shift(original_logits, _logits(by_timm, images_by_size[new_image])),
    )


def for_sizes(
    original: Any, patch_size: int | ImageSize | None, image_size: int | ImageSize | None
) -> tuple[Any, Any]:
    """Return copies of a model for other sizes, with filters computed in float64 and as timm computes them.

    Raises: UserError as `resize_patches`.
    """
    embed = getattr(original, "patch_embed", None)
    layer = getattr(embed, "proj", None)
    if not isinstance(layer, nn.Conv2d) or not hasattr(original, "set_input_size"):
        raise UserError(
            f"{type(original).__name__} is not a vision transformer of timm with set_input_size; create it for the "
            "other size in its own library, and give it the weights by iso.port_weights"
        )
    assert embed is not None
    patch = height_and_width(patch_size or kernel_of(layer))
    image = height_and_width(image_size or tuple(embed.img_size))
    if image[0] % patch[0] or image[1] % patch[1]:
        raise UserError(
            f"patches of {describe_size(patch)} do not fill images of {describe_size(image)}; give multiples of them"
        )
    by_timm: Any = copy_module(original)
    try:
        # timm warns when it interpolates relative positions
        with warnings.catch_warnings(action="ignore"):
            by_timm.set_input_size(img_size=image, patch_size=patch)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise UserError(f"timm cannot set this size: {first_line(error)}") from error
    check_attached("patch_embed.proj", layer, by_timm.patch_embed.proj)
    new: Any = copy_module(by_timm)
    with torch.no_grad():
        new.patch_embed.proj.weight.copy_(resize_filters(layer.weight, patch))
    return new, by_timm


def shift_between(
    original: nn.Module, resized: nn.Module, images: Tensor, size: ImageSize
) -> OutputShift | None:
    """Return by how much outputs move, in eval mode, to a model for images of another size; None without logits."""
    try:
        logits = _logits(original, images)
        return _shift(logits, _logits(resized, _resized(images, size)))
    except UserError:
        return None


def _single_tensor(outputs: Any) -> Tensor:
    """Return the single tensor of an output. Raises: UserError for several."""
    tensors = tensors_in(outputs)
    if len(tensors) != 1:
        raise UserError(f"the model gives {len(tensors)} tensors, not one")
    return tensors[0]


def _resized(images: Tensor, size: ImageSize) -> Tensor:
    if sides_of(images) == size:
        return images
    return F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)


def _patches(images: Tensor, size: ImageSize) -> Tensor:
    """Return patches as vectors. Shape: (B, C, H, W) -> (B, C, h w, N)"""
    vectors = F.unfold(images.double().cpu(), size, stride=size)  # (B, C h w, N)
    return vectors.unflatten(1, (images.shape[1], -1))


def _embed(layer: nn.Conv2d, patches: Tensor) -> Tensor:
    """Return the embeddings of patches without the bias, in float64. Shape: (B, C, h w, N) -> (B, O, N)"""
    return torch.einsum("ocp,bcpn->bon", layer.weight.double().cpu().flatten(2), patches)


def _embedding_difference(old: nn.Conv2d, new: nn.Conv2d, images: Tensor) -> float:
    """Return the difference of new embeddings of patches from the old ones of the patches resized."""
    sizes = kernel_of(old), kernel_of(new)
    patches = _patches(images, sizes[1])
    resized = torch.linalg.pinv(resizing_matrix(*sizes)) @ patches
    return relative_difference(_embed(old, resized), _embed(new, patches))


def _enlarged_difference(old: nn.Conv2d, new: nn.Conv2d, images: Tensor) -> float | None:
    """Return the difference of new embeddings of enlarged patches from the old ones; None if patches shrink."""
    sizes = kernel_of(old), kernel_of(new)
    if sizes[0] == sizes[1] or sizes[1][0] < sizes[0][0] or sizes[1][1] < sizes[0][1]:
        return None
    patches = _patches(images, sizes[0])
    return relative_difference(_embed(old, patches), _embed(new, resizing_matrix(*sizes) @ patches))


def sides_of(images: Tensor) -> ImageSize:
    return images.shape[-2], images.shape[-1]


def kernel_of(layer: nn.Conv2d) -> ImageSize:
    return layer.kernel_size[0], layer.kernel_size[1]


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    with eval_mode(model):
        out = call_model(model, images)
    return _single_tensor(out)


def _shift(outputs: Tensor, others: Tensor) -> OutputShift:
    if outputs.shape != others.shape:
        raise UserError(
            "outputs of the model have a value for each position; give a model with a head or pooling"
        )
    distance = (outputs - others).double().norm()
    return OutputShift(float(distance / outputs.double().norm()), class_agreement(outputs, others))
