"""Change of features and attention maps from block to block (Refiner section 3.1, Fig. 2, 4 and 5)."""

import torch
from torch import Tensor, nn

from isomorph.analysis.attention import attention_maps
from isomorph.analysis.batches import Data, batches, count_images, mean_over, single_images
from isomorph.analysis.cka import linear_cka
from isomorph.analysis.features import feature_layers, features
from isomorph.analysis.map_statistics import centred_rows
from isomorph.errors import UserError
from isomorph.operations import unwrap
from isomorph.surgery.calls import Inputs, to_model
from isomorph.surgery.site import Where

# Number and size of the random batches over which the paper averages F_k.
NUM_DRAWS = 10
DRAW_SIZE = 32


def random_draw_indices(images: int) -> Tensor:
    """Return the indices of the images in the random batches for F_k, batch after batch; the same at every call.

    Shape: -> (NUM_DRAWS * DRAW_SIZE,)
    Raises: UserError if there are fewer images than in a batch.
    """
    if images < DRAW_SIZE:
        raise UserError(
            f"{images} images are too few for random batches of {DRAW_SIZE}; give more test images"
        )
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randperm(images, generator=generator, device="cpu") for _ in range(NUM_DRAWS)]
    return torch.cat([draw[:DRAW_SIZE] for draw in draws])


def feature_evolution(model: nn.Module, data: Data, where: Where | None = None) -> dict[str, float]:
    """Return the similarity of every layer's features to the final ones: F_k = CKA(f_k, f_out) / CKA(f_in, f_out).

    f_k are the features of layer k, f_in those of the first layer, f_out those of the last. The mean is over batches:
    the paper uses 10 batches of 32 images, and CKA of fewer images is biased upwards. Layers are those of timm's
    `feature_info` (the blocks of a ViT, the stages of a CNN), or those of `where`.

    Shape: batch (B, C, H, W) or inputs by name, or a loader of such -> {name: F_k}, in order
    Source: Refiner eq. 2
    Raises: UserError if there is no batch, a batch of one image, or fewer than two layers.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> evolution = iso.analysis.feature_evolution(vit, torch.randn(8, 3, 32, 32))
    >>> list(evolution), evolution["blocks.0"]
    (['blocks.0', 'blocks.1'], 1.0)
    """
    model = unwrap(model, to_copy=False)
    layers = feature_layers(model, where)
    count = 0
    sums: dict[str, float] = {}
    for batch in batches(data):
        if count_images(batch) < 2:
            raise UserError(
                "CKA needs several images in a batch, and one has 1; give batches of 32, as the paper does",
            )
        batch = to_model(batch, model)
        outputs = features(model, batch, layers, lambda output: output.flatten(1).float().clone())
        values = list(outputs.values())
        final = values[-1]
        first = linear_cka(values[0], final)
        for name, value in outputs.items():
            sums[name] = sums.get(name, 0.0) + (linear_cka(value, final) / first).item()
        count += 1
    return {name: total / count for name, total in sums.items()}


def map_similarity(model: nn.Module, data: Data, where: Where = "*") -> Tensor:
    """Return the similarity between the attention maps of all layers: mean over images, heads, queries.

    It is the correlation of a query's weights, as in `head_similarity`. Maps of one image are in memory at a time.

    Shape: batch (B, C, H, W) or inputs by name, or a loader of such -> (layers, layers), NaN between layers with maps
    of different shapes
    Raises: UserError as in `attention_maps`.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> tuple(iso.analysis.map_similarity(vit, torch.randn(4, 3, 32, 32)).shape)
    (2, 2)
    """

    def measure(image: Inputs) -> dict[str, Tensor]:
        maps = [
            centred_rows(layer_maps.float())
            for layer_maps in attention_maps(model, image, where).values()
        ]
        similarity = maps[0].new_full((len(maps), len(maps)), torch.nan)
        for i, layer_map in enumerate(maps):
            for j, other_map in enumerate(maps):
                if layer_map.shape == other_map.shape:
                    similarity[i, j] = (layer_map * other_map).sum(-1).mean()
        return {"": similarity}

    return mean_over(model, single_images(data), measure)[""]
