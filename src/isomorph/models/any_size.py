"""The positions of a ViT whose images may have any size, and of which there may be none."""

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


class AnySizeViT(VisionTransformer):
    """timm's VisionTransformer, whose positions fit an empty batch too.

    Shape: x (B, in_chans, height, width) -> (B, num_classes)
    """

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Patches and prefix tokens with their positions. Shape: x (B, H, W, C) or (B, H W, C) -> (B, N, C)"""
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        patches = x.flatten(1, -2)  # (B, H W, C)
        if self.pos_embed is None:
            return torch.cat([*prefix, patches], dim=1)
        position = self.pos_embed
        if self.dynamic_img_size:
            first = 0 if self.no_embed_class else self.num_prefix_tokens
            position = resample_abs_pos_embed(position, list(x.shape[1:3]), self.patch_embed.grid_size, first)
        if self.no_embed_class:
            return self.pos_drop(torch.cat([*prefix, patches + position], dim=1))
        return self.pos_drop(torch.cat([*prefix, patches], dim=1) + position)
