"""The patch embedding of Refined-ViT (following T2T-ViT and LV-ViT): three convolutions, then the patch projection."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from timm.layers import PatchEmbed, to_2tuple
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.attention_base import factory_kwargs


class ConvPatchEmbed(PatchEmbed):
    """Three convolutions with BatchNorm and ReLU, the first with stride 2, then a patch embedding of the feature map.

    conv 7x7, stride 2 -> conv 3x3 -> conv 3x3 -> conv p/2 x p/2, stride p/2, for patch size p. The arguments are those
    of timm's PatchEmbed; `widths` are the channels of the three convolutions. State-dict keys are those of the authors'
    checkpoints.

    Shape: x (B, in_chans, height, width) -> (B, H, W, C)
    Source: Refiner code; 3 convolutions in Refiner Table 11, "More convs for patch embedding"
    Raises: UserError for an odd patch size, or when the patch size is changed later.
    """

    def __init__(
        self,
        img_size: Any = 224,
        patch_size: Any = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        widths: Sequence[int] = (32, 64, 128),
        **kwargs: Any,
    ) -> None:
        patch = to_2tuple(patch_size)
        if any(size % 2 for size in patch):
            raise UserError(f"patch_size {patch_size} must be even: the first convolution halves the image")
        super().__init__(img_size, patch, in_chans, embed_dim, **kwargs)
        factory = factory_kwargs(kwargs)
        first, second, third = widths
        self.conv1 = nn.Conv2d(in_chans, first, 7, stride=2, padding=3, bias=False, **factory)
        self.bn1 = nn.BatchNorm2d(first, **factory)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1, bias=False, **factory)
        self.bn2 = nn.BatchNorm2d(second, **factory)
        self.conv3 = nn.Conv2d(second, third, 3, padding=1, bias=False, **factory)
        self.bn3 = nn.BatchNorm2d(third, **factory)
        half = (patch[0] // 2, patch[1] // 2)
        self.proj = nn.Conv2d(third, embed_dim, half, half, bias=kwargs.get("bias", True), **factory)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Change the image size. Raises: UserError for a different patch size."""
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise UserError(f"patch_size {patch_size} cannot replace {self.patch_size}; create a new model with it")
        super().set_input_size(img_size)

    def forward(self, x: Tensor) -> Tensor:
        if self.dynamic_img_pad:
            (height, width), (ph, pw) = x.shape[-2:], self.patch_size
            x = F.pad(x, (0, -width % pw, 0, -height % ph))
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        x = F.relu(self.bn3(self.conv3(x)), inplace=True)  # (B, 128, height / 2, width / 2)
        return self.norm(self.proj(x).permute(0, 2, 3, 1))  # (B, H, W, C)
