"""Fit the sharpness of similarity attention to what its layers read."""

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode
from isomorph.layers.similar_gpsa2d import SimilarGPSA2d
from isomorph.surgery.compiled import copy_model
from isomorph.surgery.field_checks import SHARPNESS, check_number
from isomorph.surgery.model_inputs import Inputs, run_model

RELATIVE_SHARPNESS = 32.0
"""Default: chosen on validation images of CIFAR-10 (docs/methods/tcnn.md)."""


@torch.no_grad()
def fit_sharpness(model: nn.Module, images: Inputs, sharpness: float = RELATIVE_SHARPNESS) -> nn.Module:
    """Return a copy of the model in which every `SimilarGPSA2d` tells positions apart as sharply for what it reads.

    Each layer's sharpness becomes `sharpness` divided by the total variance of the layer's input on these images (of
    all channels, over images and positions). Layers are fitted in the order in which they run, in eval mode.

    Args:
        model: a model with layers of `ConvToGPSA(content="similar")`.
        images: a batch as the model reads it (B, C, H, W), or a dictionary of the model's inputs by name.
        sharpness: how sharply, relative to the variance. Higher values keep more of the function, lower ones average
            more.

    Raises: UserError if the model has no such layer, for a sharpness out of range, or if a layer reads the same value
        everywhere.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(content="similar"), where="conv1")
        >>> round(iso.fit_sharpness(tcnn, torch.randn(8, 3, 32, 32)).conv1.sharpness.item(), 1)  # 32 / 3
        10.7
    """
    check_number("sharpness", sharpness, SHARPNESS)
    model = copy_model(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SimilarGPSA2d)}
    if not layers:
        raise UserError(
            "the model has no SimilarGPSA2d to fit; recast convolutions with iso.ConvToGPSA(content='similar') first"
        )

    def fit(name: str, layer: SimilarGPSA2d, x: Tensor) -> None:
        variance = x.double().var((0, 2, 3), correction=0).sum().item()
        if not variance > 0:
            raise UserError(f"{name} reads the same value everywhere, so its sharpness cannot be fitted; use images")
        layer.set_sharpness(sharpness / variance)

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
    return model
