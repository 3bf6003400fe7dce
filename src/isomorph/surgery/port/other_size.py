"""Porting between models for other image sizes: one of them is fitted to the images that the other takes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.operations import copy_module, unwrap
from isomorph.surgery.absorb import layers_that_read
from isomorph.surgery.calls import describe_shape, run_model, to_model
from isomorph.surgery.port.report import PortReport
from isomorph.surgery.resize import OtherSize


@dataclass(frozen=True)
class FittedPair:
    """A source and a target of which one is fitted to the images that the other takes."""

    source: nn.Module
    target: nn.Module
    size: OtherSize
    original: nn.Module | None
    """The source before it was fitted; None if it was the target."""

    def finish(self, report: PortReport, images: Tensor) -> PortReport:
        """Return the report with the target in its own size, and a note on what is not exact."""
        if self.original is not None:
            note = self._note("source", self.source, self.original, images)
            return replace(report, notes=(*report.notes, note))
        new = self.size.back(report.model)
        note = self._note("target", self.source, new, images)
        return replace(report, model=new, notes=(*report.notes, note))

    def _note(self, role: str, original: nn.Module, resized: nn.Module, images: Tensor) -> str:
        """Return the note that models are compared at one size, and by how much outputs move at the other."""
        shift = self.size.shift(original, resized, images)
        movement = f"; outputs on these images move by {shift}" if shift else ""
        return (
            f"the models are for {self.size.describe(images)}: compared at the first size; positions of the {role} "
            f"are interpolated to the other, which is not exact{movement}"
        )


def fit_size(source: nn.Module, target: nn.Module, images: Tensor) -> FittedPair | None:
    """Fit the model that does not take the images; None if both take them, or none does."""
    fits = [_fits(model, images) for model in (source, target)]
    if all(fits) or not any(fits):
        return None
    role = "target" if fits[0] else "source"
    model_to_fit, other = (target, source) if fits[0] else (source, target)
    try:
        size = OtherSize.of(model_to_fit, images, _patch_of(other, images))
    except UserError as error:
        raise UserError(
            f"the {role} does not take images of {describe_shape(images[0])}, and cannot be fitted to them: give "
            f"images of its own `size`; {error}"
        ) from error
    if role == "target":
        return FittedPair(source, size.model, size, None)
    return FittedPair(size.model, target, size, source)


@torch.no_grad()
def _fits(model: nn.Module, images: Tensor) -> bool:
    """True if a model runs on the images."""
    plain = copy_module(unwrap(model)).eval()
    try:
        run_model(plain, to_model(images[:1], plain))
    except UserError:
        return False
    return True


def _patch_of(model: nn.Module, images: Tensor) -> tuple[int, int] | None:
    """Return the size of the patches that a model embeds; None for a model that embeds overlapping ones."""
    for name in layers_that_read(model, to_model(images[:1], model)):
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == layer.stride:
            return layer.kernel_size[0], layer.kernel_size[1]
    return None
