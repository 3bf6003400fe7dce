"""Token labelling (Jiang et al., 2021): a label for every patch, from the image or a label map, and MixToken."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torchvision.ops import roi_align

from isomorph.errors import UserError
from isomorph.lab.data.label_maps import MapLabels
from isomorph.lab.training.objectives.supervised import PenalisedLoss
from isomorph.lab.training.recipe.fields import MapSimilarityPart, TokenLabelPart
from isomorph.lab.training.task import Losses
from isomorph.models.blockwise import Box
from isomorph.spec import ImageSize


def _smooth(probabilities: Tensor, smoothing: float) -> Tensor:
    return probabilities * (1 - smoothing) + smoothing / probabilities.shape[-1]


def _soft_labels(target: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return labels as smoothed probabilities; mixed labels already are. Shape: (B,) or (B, K) -> (B, K classes)"""
    if target.ndim == 2:
        return target
    return _smooth(F.one_hot(target, num_classes), smoothing)


def dense_scores(maps: Tensor, num_classes: int) -> Tensor:
    """Return scores of all classes, 0 but for the K likeliest. Shape: (B, 2, K, h, w) -> (B, num_classes, h, w)"""
    scores, classes = maps.unbind(1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    dense = scores.new_zeros(len(maps), num_classes, *maps.shape[-2:])
    return dense.scatter_(1, classes.long(), scores)


def crop_label_maps(dense: Tensor, target: MapLabels, grid_size: ImageSize) -> Tensor:
    """Return class probabilities at the grid positions of a crop: the softmax of scores sampled by RoIAlign.

    Shape: dense (B, num_classes, h, w) -> (B, H W, num_classes)
    Source: Jiang et al. (2021); differs: their code swaps rows and columns of the crop
    """
    height, width = dense.shape[-2:]
    boxes = target.box.to(dense)[:, [1, 0, 3, 2]]
    boxes = boxes * dense.new_tensor([width, height, width, height])
    scores = roi_align(
        dense, list(boxes[:, None]), grid_size, aligned=True
    )  # (B, num_classes, H, W)
    scores = torch.where(target.flipped[:, None, None, None], scores.flip(-1), scores)
    return scores.flatten(2).transpose(1, 2).softmax(-1)  # (B, H W, num_classes)


def draw_box(grid_size: ImageSize, beta: float) -> Box:
    """Draw a box of area 1 - lambda, lambda from Beta(beta, beta), with a uniform centre, clipped at the border."""
    lam = torch.distributions.Beta(beta, beta).sample().item()
    share = math.sqrt(1 - lam)
    top, bottom = _draw_interval(grid_size[0], share)
    left, right = _draw_interval(grid_size[1], share)
    return Box(top, bottom, left, right)


def _draw_interval(size: int, share: float) -> tuple[int, int]:
    half = int(size * share) // 2
    centre = int(torch.randint(size, ()))
    return max(centre - half, 0), min(centre + half, size)


class MixedLabelMaps(NamedTuple):
    """Label maps of images mixed with the reversed batch, and each image's own share. Shape: own (B,)"""

    target: MapLabels
    own: Tensor

    def mix(self, labels: Tensor) -> Tensor:
        """Mix labels by the shares of the images, the same everywhere. Shape: (B, ..., num_classes), the same"""
        ones = [1] * (labels.ndim - 1)
        own = self.own.to(labels).view(-1, *ones)
        return own * labels + (1 - own) * labels.flip(0)


class LabelMapMixup(Mixup):
    """timm's mixup and cutmix with label maps. Shape: x (B, C, H, W), target -> x, mixed in place, MixedLabelMaps"""

    def __call__(self, x: Tensor, target: MapLabels) -> tuple[Tensor, MixedLabelMaps]:
        # with one class per image, the mixed label of an image holds its own share
        self.num_classes = len(x)
        self.label_smoothing = 0.0
        mixed, shares = super().__call__(x, torch.arange(len(x), device=x.device))
        return mixed, MixedLabelMaps(target, shares.diagonal())


class TokenLabelLoss(PenalisedLoss):
    """Token labelling: CE(class token, image's label) + weight mean over patches of CE(patch, patch's label).

    Without label maps, every patch has the image's label. With them (`MapLabels`), a patch has its part of the map, and
    the class token the image's label or, with `part.class_token` map, the mean of the map over the crop. MixToken
    replaces a box of patches by those of another image. A patch has the label of the image it comes from; the label of
    the class token is mixed by area. After mixup or cutmix, the labels of an image and of its patches are mixed by the
    same share, as in the released code.

    Source: Jiang et al. (2021), the paper's loss with class_token label, their code's with map; the Refiner code has no
    label maps
    Raises: UserError when the model does not classify its patches, or, for a penalty, does not pass its maps on.
    """

    def __init__(
        self,
        model: nn.Module,
        part: TokenLabelPart,
        smoothing: float,
        device: torch.device,
        similarity: MapSimilarityPart | None = None,
    ) -> None:
        super().__init__(model, SoftTargetCrossEntropy(), device, similarity)
        if getattr(model, "aux_head", None) is None:
            raise UserError(
                "token_labels needs a model that classifies its patches; train a refined_vit_* with dense_head=True"
            )
        self.part = part
        self.smoothing = smoothing
        self.num_classes: int = model.num_classes  # type: ignore[assignment]
        self.grid_of: Any = model.patch_embed.dynamic_feat_size  # type: ignore[union-attr]

    def labels(self, target: Any, grid_size: ImageSize) -> tuple[Tensor, Tensor]:
        """Return the labels of images and patches. Shape: -> (B, num_classes), (B, H W or 1, num_classes)"""
        if not isinstance(target, MapLabels):
            labels = _soft_labels(target, self.num_classes, self.smoothing)
            return labels, labels[:, None]
        dense = dense_scores(target.maps, self.num_classes)
        patches = _smooth(crop_label_maps(dense, target, grid_size), self.smoothing)
        if self.part.class_token == "label":
            return _soft_labels(target.label, self.num_classes, self.smoothing), patches
        image = crop_label_maps(dense, target, (1, 1))[:, 0]
        return _smooth(image, self.smoothing), patches

    def mixed_labels(self, target: Any, grid_size: ImageSize) -> tuple[Tensor, Tensor]:
        """Return `labels`, mixed if the images were mixed. Shape: -> (B, num_classes), (B, H W or 1, num_classes)"""
        if not isinstance(target, MixedLabelMaps):
            return self.labels(target, grid_size)
        image, patches = self.labels(target.target, grid_size)
        return target.mix(image), target.mix(patches)

    def forward(self, input: Tensor, target: Any) -> Losses:
        grid_size = self.grid_of(tuple(input.shape[-2:]))
        labels, dense = self.mixed_labels(target, grid_size)
        box = Box(0, 0, 0, 0)
        if self.part.mix:
            box = draw_box(grid_size, self.part.beta)
        (logits, tokens), penalty = self.predict(input, tokens=True, box=box)
        inside = box.mask(grid_size, input.device).flatten()  # (H W,)
        mixed = torch.lerp(labels, labels.flip(0), inside.to(labels).mean())
        dense = torch.where(inside[:, None], dense.flip(0), dense)  # (B, H W, num_classes)
        image = self.criterion(logits, mixed)
        patches = self.criterion(tokens.flatten(0, 1), dense.flatten(0, 1))
        loss = image + self.part.weight * patches + penalty
        return {
            "loss": loss,
            "output": logits,
            "target": mixed,
            "task_loss": image,
            "token_loss": patches,
        }
