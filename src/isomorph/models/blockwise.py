"""A base class for ViTs whose blocks take more than the tokens: they run one by one and pass a state along."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from isomorph.errors import UserError
from isomorph.models.recompute import recompute
from isomorph.models.vit_cfg import check_heads, check_whole_patches, parse_sizes, require_images

# Both read sizes, so torch.fx must call them rather than trace into them; timm wraps them in its own modules only.
torch.fx.wrap("require_images")
torch.fx.wrap("resample_abs_pos_embed")


class BlockwiseViT(VisionTransformer):
    """timm's VisionTransformer for images of any size, with a state passed from block to block next to the tokens.

    Each block is called with the tokens and the state and returns both. By default the state is the attention maps of
    earlier blocks, None at first; subclasses override `initial_state` and `run_block` for another state.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Raises: UserError for another image size, an attention mask, a number of heads that does not divide embed_dim, or
    patch_drop_rate.
    """

    def __init__(self, **kwargs: Any) -> None:
        check_heads(kwargs.get("num_heads", 12), kwargs.get("embed_dim", 768))
        if kwargs.get("patch_drop_rate"):
            raise UserError(
                "patch_drop_rate is not supported: the blocks need the whole grid of patches; leave it at 0"
            )
        super().__init__(**{**kwargs, "dynamic_img_size": True})

    def add_positions(self, x: Tensor) -> Tensor:
        """Add the position embedding and put the prefix tokens in front. Shape: x (B, H, W, C) -> (B, N, C)"""
        positions = self.resize_positions(x.shape[1], x.shape[2])
        tokens = (self.cls_token, self.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        x = x.flatten(1, 2)  # (B, H W, C)
        if self.no_embed_class:
            x = torch.cat([*prefix, x + positions], dim=1)
        else:
            x = torch.cat([*prefix, x], dim=1) + positions
        return self.pos_drop(x)

    def resize_positions(self, H: int, W: int) -> Any:
        """Return the position embedding for an H x W grid of patches, 0 if there is none. Shape: -> (1, N, C)"""
        if self.pos_embed is None:
            return 0
        prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        old = self.patch_embed.grid_size
        return resample_abs_pos_embed(self.pos_embed, [H, W], old, num_prefix_tokens=prefix)

    def embed(self, x: Tensor, rearrange: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens that the first block reads, and the size of the grid of patches.

        `rearrange` is applied to the patches before positions are added.

        Shape: x (B, in_chans, height, width) -> (B, N, C), (H, W)
        """
        x = require_images(x, self.patch_embed.patch_size, self.patch_embed.dynamic_img_pad)
        x = self.patch_embed(x)  # (B, H, W, C)
        x = rearrange(x) if rearrange else x
        return self.norm_pre(self.add_positions(x)), (x.shape[1], x.shape[2])

    def initial_state(self, grid_size: tuple[int, int]) -> Any:
        """Return the state for the first block: None."""
        return None

    def run_block(self, i: int, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Run block i; return the tokens and the state for the next block. Shape: x (B, N, C) -> (B, N, C)"""
        return self.call_block(i, x, state)

    def state_maps(self, state: Any) -> Any:
        """Return the attention maps in a state, or None."""
        return state

    def call_block(self, i: int, *arguments: Any) -> Any:
        """Call block i, recomputing it in the backward pass if gradient checkpointing is on."""
        block = self.blocks[i]
        return recompute(block, *arguments) if self.grad_checkpointing else block(*arguments)

    def forward_features(
        self, x: Tensor, rearrange: Callable[[Tensor], Tensor] | None = None, maps: list[Any] | None = None
    ) -> Tensor:
        """Return the tokens after the last block and norm.

        The attention maps that each block passes to the next are appended to the list `maps`.

        Shape: x (B, in_chans, height, width) -> (B, N, C)
        """
        x, grid_size = self.embed(x, rearrange)
        state = self.initial_state(grid_size)
        for i in range(len(self.blocks)):
            x, state = self.run_block(i, x, state)
            if maps is not None:
                maps.append(self.state_maps(state))
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
        """Return the final tokens and the tokens after chosen blocks, as timm's VisionTransformer does.

        With `return_prefix_tokens` each is paired with the prefix tokens after the same block.

        Raises: UserError for an attention mask; ValueError for an unknown format.
        """
        if attn_mask is not None:
            raise UserError(f"attn_mask is not supported by {type(self).__name__}; leave it at None")
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not available; use 'NCHW' or 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, (H, W) = self.embed(x)
        state = self.initial_state((H, W))
        intermediates: list[Tensor] = []
        prefixes: list[Tensor] = []
        for i in range(last + 1 if stop_early else len(self.blocks)):
            x, state = self.run_block(i, x, state)
            if i in take:
                y = self.norm(x) if norm else x
                prefix, patches = y.split([y.shape[1] - H * W, H * W], dim=1)
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, (H, W)).contiguous()  # (B, C, H, W)
                intermediates.append(patches)
                prefixes.append(prefix)
        if output_dict:
            outputs: dict[str, Any] = {"image_intermediates": intermediates}
            outputs |= {"image_intermediates_prefix": prefixes} if return_prefix_tokens else {}
            return outputs if intermediates_only else outputs | {"image_features": self.norm(x)}
        chosen = list(zip(intermediates, prefixes, strict=True)) if return_prefix_tokens else intermediates
        return chosen if intermediates_only else (self.norm(x), chosen)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resize the position embedding (and the patch filters) permanently, which saves resizing at each call."""
        if isinstance(img_size, int):
            img_size = (img_size, img_size)
        if isinstance(patch_size, int):
            patch_size = (patch_size, patch_size)
        embed = self.patch_embed
        check_whole_patches(
            *parse_sizes(img_size or embed.img_size, patch_size or embed.patch_size), padded=embed.dynamic_img_pad
        )
        super().set_input_size(img_size, patch_size)
        self.update_grid()

    def update_grid(self) -> None:
        """Set the reduction of every block's features, which timm's feature extraction reads, to the patch size."""
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
