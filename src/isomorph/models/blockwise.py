"""A ViT whose blocks are told more than the tokens: they run one by one, with a state handed from each to the next."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from isomorph.errors import UserError
from isomorph.models.vit_cfg import check_heads, check_image_size, parse_sizes, require_images

torch.fx.wrap("require_images")  # they read sizes, so a tracer calls them; timm's list does not reach subclasses' files
torch.fx.wrap("resample_abs_pos_embed")


class BlockwiseViT(VisionTransformer):
    """timm's VisionTransformer for any image size at every call, with `run_block` between embedding and norm.

    What goes from block to block beside the tokens is a state, which each block is called with and gives: maps of
    attention, none at first. A family may start from another, and call its blocks otherwise.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Raises: UserError for another size, an attention mask, heads that do not divide the channels, or dropped patches.
    """

    def __init__(self, **kwargs: Any) -> None:
        check_heads(kwargs.get("num_heads", 12), kwargs.get("embed_dim", 768))
        if kwargs.get("patch_drop_rate"):
            raise UserError("patch_drop_rate leaves a grid with holes, which a state from block to block cannot have")
        super().__init__(**{**kwargs, "dynamic_img_size": True})

    def place_patches(self, x: Tensor) -> Tensor:
        """Patches with their positions, after the prefix tokens. Shape: x (B, H, W, C) -> (B, N, C)"""
        positions = self.resized_positions(x.shape[1], x.shape[2])
        tokens = (self.cls_token, self.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        x = x.flatten(1, 2)  # (B, H W, C)
        if self.no_embed_class:
            x = torch.cat([*prefix, x + positions], dim=1)
        else:
            x = torch.cat([*prefix, x], dim=1) + positions
        return self.pos_drop(x)

    def resized_positions(self, H: int, W: int) -> Any:
        """The position embedding for a grid of patches; 0 where there is none. Shape: -> (1, N, C)"""
        if self.pos_embed is None:
            return 0
        prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        old = self.patch_embed.grid_size
        return resample_abs_pos_embed(self.pos_embed, [H, W], old, num_prefix_tokens=prefix)

    def embed(self, x: Tensor, rearrange: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, tuple[int, int]]:
        """What the first block reads, and the grid of the patches, which may be rearranged before they are placed.

        Shape: x (B, in_chans, height, width) -> (B, N, C), (H, W)
        """
        x = require_images(x, self.patch_embed.patch_size, self.patch_embed.dynamic_img_pad)
        x = self.patch_embed(x)  # (B, H, W, C)
        x = rearrange(x) if rearrange else x
        return self.norm_pre(self.place_patches(x)), (x.shape[1], x.shape[2])

    def start(self, grid_size: tuple[int, int]) -> Any:
        """What the first block is told: nothing."""
        return None

    def run_block(self, i: int, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Block i: tokens, and what the next block is told. Shape: x (B, N, C) -> (B, N, C)"""
        return self.call_block(i, x, state)

    def handed(self, state: Any) -> Any:
        """What a block hands to the next besides the tokens: attention maps, where it has any."""
        return state

    def call_block(self, i: int, *arguments: Any) -> Any:
        """Calls block i, keeping only its arguments for the backward pass where gradient checkpointing is on."""
        block = self.blocks[i]
        return checkpoint(block, *arguments) if self.grad_checkpointing else block(*arguments)

    def forward_features(
        self, x: Tensor, rearrange: Callable[[Tensor], Tensor] | None = None, handed_on: list[Any] | None = None
    ) -> Tensor:
        """Shape: x (B, in_chans, height, width) -> (B, N, C); what each block tells the next is added to `handed_on`"""
        x, grid_size = self.embed(x, rearrange)
        state = self.start(grid_size)
        for i in range(len(self.blocks)):
            x, state = self.run_block(i, x, state)
            if handed_on is not None:
                handed_on.append(self.handed(state))
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: None = None,
    ) -> Any:
        """The final tokens and those after chosen blocks, as timm's VisionTransformer gives them.

        `return_prefix_tokens` pairs each with its prefix tokens, as many as there are by then.

        Raises: UserError for a mask: every place of the image is real; ValueError for an unknown format.
        """
        if attn_mask is not None:
            raise UserError(f"a {type(self).__name__} takes no attention mask: every place of the image is real")
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not available; use 'NCHW' or 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, (H, W) = self.embed(x)
        state = self.start((H, W))
        taken: list[Tensor] = []
        prefixes: list[Tensor] = []
        for i in range(last + 1 if stop_early else len(self.blocks)):
            x, state = self.run_block(i, x, state)
            if i in take:
                y = self.norm(x) if norm else x
                prefix, patches = y.split([y.shape[1] - H * W, H * W], dim=1)
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, (H, W)).contiguous()  # (B, C, H, W)
                taken.append(patches)
                prefixes.append(prefix)
        if output_dict:
            found: dict[str, Any] = {"image_intermediates": taken}
            found |= {"image_intermediates_prefix": prefixes} if return_prefix_tokens else {}
            return found if intermediates_only else found | {"image_features": self.norm(x)}
        pairs = list(zip(taken, prefixes, strict=True)) if return_prefix_tokens else taken
        return pairs if intermediates_only else (self.norm(x), pairs)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resizes the position embedding (and the patch filters) for good; other sizes are resized at each call."""
        if isinstance(img_size, int):
            img_size = (img_size, img_size)
        if isinstance(patch_size, int):
            patch_size = (patch_size, patch_size)
        embed = self.patch_embed
        check_image_size(
            *parse_sizes(img_size or embed.img_size, patch_size or embed.patch_size), padded=embed.dynamic_img_pad
        )
        super().set_input_size(img_size, patch_size)
        self.update_grid()

    def update_grid(self) -> None:
        """Blocks tell timm's feature extraction their patch size."""
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
