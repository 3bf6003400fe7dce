"""Porting between models for other image sizes: one of them is fitted to the images that the other takes."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.operations import copy_module, in_eval_mode
from isomorph.surgery.absorb import layers_that_read
from isomorph.surgery.calls import run_model, to_model
from isomorph.surgery.port.report import PortReport
from isomorph.surgery.resize import (
    describe_size,
    for_sizes,
    kernel_of,
    shift_between,
    sides_of,
)


@dataclass(frozen=True)
class FittedPair:
    """A source and a target of which one is fitted to the images that the other takes."""

    source: nn.Module
    target: nn.Module
    role: str
    """Which of the two is fitted: source or target."""

    original: Any
    """That model before it was fitted."""

    @torch.no_grad()
    def finish(self, report: PortReport, images: Tensor) -> PortReport:
        """Return the report with the target in its own size, and a note on what is not exact."""
        fitted: Any = getattr(self, self.role)
        embed = self.original.patch_embed
        image = tuple(embed.img_size)
        patch = kernel_of(embed.proj)
        resized = self.original
        if self.role == "target":
            resized, _ = for_sizes(report.model, patch, image)
            report = replace(report, model=resized)
        sizes = f"images of {describe_size(sides_of(images))} and {describe_size(image)}"
        fitted_patch = kernel_of(fitted.patch_embed.proj)
        if fitted_patch != patch:
            sizes += f", patches of {describe_size(fitted_patch)} and {describe_size(patch)}"
        shift = shift_between(self.source, resized, images, image)
        movement = f"; outputs on these images move by {shift}" if shift else ""
        note = (
            f"the models are for {sizes}: compared at the first size; positions of the {self.role} "
            f"are interpolated to the other, which is not exact{movement}"
        )
        return replace(report, notes=(*report.notes, note))


def fit_size(source: nn.Module, target: nn.Module, images: Tensor) -> FittedPair | None:
    """Fit the model that does not take the images; None if both take them, or none does."""
    errors = [_error_on(images, model) for model in (source, target)]
    if all(errors) or not any(errors):
        return None
    role = "source" if errors[0] else "target"
    original, other = (source, target) if errors[0] else (target, source)
    try:
        fitted, _ = for_sizes(original, _patch_of(other, images), sides_of(images))
    except UserError as error:
        reason = next(filter(None, errors)).replace("the model", f"the {role}", 1)
        raise UserError(
            f"{reason}. It cannot be fitted to them: give images of its own `size`; {error}"
        ) from error
    if role == "target":
        return FittedPair(source, fitted, role, original)
    return FittedPair(fitted, target, role, original)


@torch.no_grad()
def _error_on(images: Tensor, model: nn.Module) -> str | None:
    """Return why a model does not run on images, None for one that does."""
    plain = in_eval_mode(copy_module(model))
    try:
        run_model(plain, to_model(images[:1], plain))
    except UserError as error:
        return str(error)
    return None


def _patch_of(model: nn.Module, images: Tensor) -> tuple[int, int] | None:
    """Return the size of the patches that a model embeds; None for a model that embeds overlapping ones."""
    for name in layers_that_read(model, to_model(images[:1], model)):
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == layer.stride:
            return kernel_of(layer)
    return None
