"""Set the sharpness of attention to similar positions from the variance of each layer's input."""

import math

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode
from isomorph.layers.similar_gpsa2d import SimilarGPSA2d
from isomorph.surgery.compiled import copy_model
from isomorph.surgery.field_checks import SHARPNESS, check_number
from isomorph.surgery.model_inputs import Inputs, run_model

RELATIVE_SHARPNESS = 32.0
"""Sharpness times the total variance of what is compared; the default of `fit_sharpness`, chosen on validation images
of CIFAR-10 (docs/notes/tcnn.md)."""


@torch.no_grad()
def fit_sharpness(model: nn.Module, images: Inputs, relative_sharpness: float = RELATIVE_SHARPNESS) -> nn.Module:
    """Return a copy of the model with the sharpness of every `SimilarGPSA2d` fitted to the variance of its input.

    Each layer's sharpness becomes `relative_sharpness` divided by the total variance, on these images, of what the
    layer compares (of all channels, over images and positions). Layers are fitted one after the other as they run, in
    eval mode, and one that runs several times by its first input.

    Args:
        model: a model with layers of `ConvToGPSA(content="similar")`.
        images: a batch as the model reads it (B, C, H, W), or a dictionary of the model's inputs by name.
        relative_sharpness: how strongly similar positions are distinguished from others, relative to the variance.
            Higher values keep more of the function, lower ones average more.

    Raises: UserError if the model has no such layer, for a sharpness out of range, if a layer reads the same value
        everywhere or values that are not finite, or if one does not run.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(content="similar"), where="conv1")
        >>> round(iso.fit_sharpness(tcnn, torch.randn(8, 3, 32, 32)).conv1.sharpness.item(), 1)  # 32 / 3
        10.7
    """
    check_number("relative_sharpness", relative_sharpness, SHARPNESS)
    model = copy_model(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SimilarGPSA2d)}
    if not layers:
        raise UserError(
            "the model has no SimilarGPSA2d to fit; recast convolutions with iso.ConvToGPSA(content='similar') first"
        )
    fitted: set[str] = set()

    def fit(name: str, layer: SimilarGPSA2d, x: Tensor) -> None:
        if name not in fitted:
            fitted.add(name)
            layer.set_sharpness(_relative_to(name, layer, x, relative_sharpness))

    hooks = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: fit(name, layer, args[0]))
        for name, layer in layers.items()
    ]
    try:
        with eval_mode(model):
            run_model(model, images)
    finally:
        for hook in hooks:
            hook.remove()
    if left := [name for name in layers if name not in fitted]:
        raise UserError(f"{', '.join(left)} did not run on these images, so the sharpness cannot be fitted")
    return model


def _relative_to(name: str, layer: SimilarGPSA2d, x: Tensor, sharpness: float) -> float:
    """Return a sharpness divided by the total variance of what a layer compares.

    Raises: UserError if the variance is 0 or not finite, or leads to a sharpness out of range.
    """
    if not x.numel():
        raise UserError(f"{name or 'the model'} reads an empty batch, so its sharpness cannot be fitted")
    compared = layer.embed(x)
    variance = compared.var((0, 2, 3), correction=0).sum().item() / layer.sharpness.item()
    if not math.isfinite(variance):
        raise UserError(f"{name or 'the model'} reads NaN or infinite values, so its sharpness cannot be fitted")
    if variance == 0:
        raise UserError(
            f"{name or 'the model'} reads the same value everywhere, so its sharpness cannot be fitted; use images"
        )
    check_number(f"the fitted sharpness of {name or 'the model'},", sharpness / variance, SHARPNESS)
    return sharpness / variance
