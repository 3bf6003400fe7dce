"""CKA between the layers of two models, from features that are averaged over the image."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis import linear_cka
from isomorph.analysis.taps import run_hooked
from isomorph.errors import UserError
from isomorph.report.charts import Matrix


def pooled_features(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """What each layer that timm names for the model gives, averaged over places, in eval mode.

    Shape: batches of (images (B, C, H, W), ...) -> {name: (images, channels)}
    Raises: UserError when there are no such layers or no images.
    """
    modules = dict(model.named_modules())
    channels = {
        info["module"]: info["num_chs"] for info in getattr(model, "feature_info", ()) if info["module"] in modules
    }
    if not channels:
        raise UserError("timm names no layers of this model that give features")
    seen: dict[str, list[Tensor]] = {name: [] for name in channels}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            found = (output[0] if isinstance(output, tuple) else output).float()
            last = found.ndim == 3 or found.shape[1] != channels[name]
            seen[name].append((found.flatten(1, -2).mean(1) if last else found.flatten(2).mean(2)).cpu())

        return hook

    like = next(model.parameters())
    for images, *_ in batches:
        run_hooked(model, images.to(like), [modules[name].register_forward_hook(keep(name)) for name in channels])
    if not all(seen.values()):
        raise UserError("there are no images to compare features on")
    return {name: torch.cat(parts) for name, parts in seen.items()}


def similarity_chart(title: str, names: tuple[str, str], a: dict[str, Tensor], b: dict[str, Tensor]) -> Matrix:
    """Linear CKA of every layer of one model (down) with every layer of the other (across)."""
    values = [[float(linear_cka(x, y)) for y in b.values()] for x in a.values()]
    return Matrix(title, *names, list(a), list(b), values)
