"""How features and attention maps change from block to block (Refiner section 3.1, Fig. 2, 4 and 5)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.analysis.attention import attention_map, attention_maps, run_hooked, visit
from isomorph.analysis.similarity import linear_cka
from isomorph.errors import UserError
from isomorph.surgery.recast import Where, matches


def feature_layers(model: nn.Module, where: Where | None) -> dict[str, nn.Module]:
    """The modules whose outputs are the features: those that timm names for the model, or those selected.

    Raises: UserError when there are fewer than two.
    """
    modules = dict(model.named_modules())
    if where is None:
        names = [info["module"] for info in getattr(model, "feature_info", [])]
        found = {name: modules[name] for name in names if name in modules}
    else:
        found = {name: module for name, module in modules.items() if name and matches(where, name, module)}
    if len(found) < 2:
        raise UserError(f"features of {len(found)} layers do not evolve; give where, like 'blocks.?' or 'layer?'")
    return found


@torch.no_grad()
def features(model: nn.Module, batch: Tensor, layers: dict[str, nn.Module]) -> dict[str, Tensor]:
    """What each layer gives, every image as one vector, in eval mode. Shape: -> {name: (B, features)}"""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).flatten(1).float()

        return hook

    run_hooked(model, batch, [layer.register_forward_hook(keep(name)) for name, layer in layers.items()])
    return {name: seen[name] for name in layers if name in seen}


def feature_evolution(model: nn.Module, batches: Iterable[Any], where: Where | None = None) -> dict[str, float]:
    """How fast features become the final ones: F_k = CKA(f_k, f_out) / CKA(f_in, f_out), mean over batches.

    f_k is what layer k gives, f_in the first layer's, f_out the last one's; 1 at the first. A network that evolves fast
    starts low and rises late: its last features are far from the first. The paper takes 10 batches of 32 images; of
    fewer images CKA is biased upwards.

    Layers are those that timm's `feature_info` names (the blocks of a ViT, the stages of a CNN), or `where`.

    Shape: batches of (B, C, H, W), a loader's with labels too -> {name: F_k}, in order
    Source: Refiner eq. 2
    Raises: UserError when there is no batch, a batch of one image, or fewer than two layers.
    """
    layers, count = feature_layers(model, where), 0
    sums: dict[str, float] = {}
    for given in [batches] if isinstance(batches, Tensor) else batches:
        batch = given[0] if isinstance(given, tuple | list) else given  # a loader gives labels too
        if len(batch) < 2:
            raise UserError("CKA compares images with each other; give batches of several, 32 as the paper does")
        found = list(features(model, batch, layers).items())
        final = found[-1][1]
        first = linear_cka(found[0][1], final)
        for name, value in found:
            sums[name] = sums.get(name, 0.0) + (linear_cka(value, final) / first).item()
        count += 1
    if not count:
        raise UserError("there is nothing to look at: no batch was given")
    return {name: total / count for name, total in sums.items()}


def map_similarity(model: nn.Module, batch: Tensor) -> Tensor:
    """How alike the attention maps of blocks are: cosine of what a query looks at, mean over images, heads, queries.

    Shape: batch (B, C, H, W) -> (layers, layers), NaN between layers with maps of different shapes
    """
    maps = [F.normalize(found.float(), dim=-1) for found in attention_maps(model, batch).values()]
    rows = [[(a * b).sum(-1).mean() if a.shape == b.shape else a.new_tensor(float("nan")) for b in maps] for a in maps]
    return torch.stack([torch.stack(row) for row in rows])


def head_similarity(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """How alike the maps of a block's heads are: cosine of what a query looks at, mean over images and queries.

    Shape: batch (B, C, H, W) -> {name: (maps, maps)}
    """

    def look(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        maps = F.normalize(attention_map(layer, x, *args, **kwargs).float(), dim=-1)  # (B, H, N, N)
        return torch.einsum("bhqk,bgqk->hg", maps, maps) / (maps.shape[0] * maps.shape[2])

    return visit(model, batch, look)
