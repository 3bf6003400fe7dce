"""From a backbone to a feature pyramid for detection: windows in a plain ViT (ViTDet), and pyramids of maps."""

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from timm.layers import Attention, LayerNorm2d, resample_abs_pos_embed
from timm.models import checkpoint_seq
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork

from isomorph.errors import UserError
from isomorph.layers import DecomposedAttention
from isomorph.models.variants import own_filter


def is_windowable(model: nn.Module) -> bool:
    """Return True for timm's VisionTransformer, or a subclass, whose blocks have timm's plain Attention."""
    if not isinstance(model, VisionTransformer):
        return False
    return all(type(getattr(block, "attn", None)) is Attention for block in model.blocks)


def _without_prefix_tokens(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a ViT's tensors without its class token, other tokens that are not patches, and their positions.

    The number of positions of patches is the largest square.
    """
    state = {name: tensor for name, tensor in state.items() if name not in ("cls_token", "reg_token", "dist_token")}
    positions = state.get("pos_embed")
    if isinstance(positions, Tensor) and positions.ndim == 3:
        state["pos_embed"] = positions[:, positions.shape[1] - math.isqrt(positions.shape[1]) ** 2 :]
    return state


class WindowedViT(nn.Module):
    """Turn a plain ViT into a backbone for large images: one feature map, at a cost that grows with their area.

    Attention of most blocks is limited to windows; that of the `global_blocks`, the last of each quarter by default,
    is not. Both know relative positions by row and column, which start at zero. The class token is dropped, and
    absolute positions are resized to the image. There is no norm after the last block. Projections stay those of the
    given network, pyramids included. `img_size` is the image size that the relative positions of global blocks are
    created for; all positions are resized to other sizes.

    Shape: x (B, in_chans, height, width), multiples of the patch -> a list of one (B, C, height / patch, width / patch)
    Source: ViTDet (Li et al., 2022), section 3
    Raises: UserError for a window below 0 or a block that the network does not have.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        img_size: tuple[int, int],
        window: int = 14,
        global_blocks: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        depth, self.source_filter = len(vit.blocks), own_filter(type(vit))
        self.pretrained_cfg, self.grad_checkpointing = getattr(vit, "pretrained_cfg", None), False
        quarters = sorted({-(-quarter * depth // 4) - 1 for quarter in range(1, 5)})  # 2, 5, 8, 11 of 12
        chosen = tuple(quarters if global_blocks is None else global_blocks)
        if window < 1 or not all(0 <= block < depth for block in chosen):
            raise UserError(f"window {window} must be at least 1, and global_blocks {chosen} from 0 to {depth - 1}")
        self.patch_embed, self.pos_drop = vit.patch_embed, vit.pos_drop
        self.norm_pre, self.blocks = vit.norm_pre, vit.blocks
        self.grid_size = tuple(vit.patch_embed.grid_size)
        prefix = 0 if vit.no_embed_class or vit.pos_embed is None else vit.num_prefix_tokens
        self.pos_embed = None if vit.pos_embed is None else nn.Parameter(vit.pos_embed.detach()[:, prefix:].clone())
        self.num_prefix_tokens, self.no_embed_class, self.embed_dim = 0, True, vit.embed_dim
        patch = self.patch_embed.patch_size
        grid = (-(-img_size[0] // patch[0]), -(-img_size[1] // patch[1]))
        for number, block in enumerate(self.blocks):
            inside = None if number in chosen else (window, window)
            block.attn = DecomposedAttention.from_attention(block.attn, inside, inside or grid)

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a classification checkpoint of the given network with that network's own filter."""
        return self.source_filter(_without_prefix_tokens(state), self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the blocks in the backward pass, to save memory."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameter groups for layer decay: patches and positions, then blocks."""
        return dict(stem=r"^(?:patch_embed|pos_embed|norm_pre)", blocks=r"^blocks\.(\d+)")

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would change without need: the absolute positions."""
        return {"pos_embed"}

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.patch_embed(x)  # (B, H, W, C)
        if self.pos_embed is not None:
            grid = (x.shape[1], x.shape[2])
            positions = resample_abs_pos_embed(self.pos_embed, grid, self.grid_size, num_prefix_tokens=0)
            x = x + positions.unflatten(1, grid)
        x = self.norm_pre(self.pos_drop(x))
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing and self.training else self.blocks(x)
        return [x.permute(0, 3, 1, 2)]


class SimpleFeaturePyramid(nn.Module):
    """Maps at 4, 2, 1 and 1/2 times the resolution of a single map, and one at 1/4 (ViTDet).

    The map is enlarged by transposed convolutions or pooled, and each result passes a 1 x 1 and a 3 x 3 convolution
    with LayerNorm over the channels. The coarsest map is the one before it, subsampled.

    Shape: x (B, in_channels, H, W), both even -> five of (B, out_channels, 4 H, 4 W) to (B, out_channels, H / 4, W / 4)
    Source: ViTDet (Li et al., 2022), section 3
    """

    def __init__(self, in_channels: int, out_channels: int = 256) -> None:
        super().__init__()
        half, quarter = in_channels // 2, in_channels // 4
        enlarged = nn.Sequential(
            nn.ConvTranspose2d(in_channels, half, 2, 2),
            LayerNorm2d(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, 2),
        )
        resize = [enlarged, nn.ConvTranspose2d(in_channels, half, 2, 2), nn.Identity(), nn.MaxPool2d(2)]
        widths = [quarter, half, in_channels, in_channels]
        self.levels = nn.ModuleList(
            nn.Sequential(step, _conv(width, out_channels, 1), _conv(out_channels, out_channels, 3))
            for step, width in zip(resize, widths, strict=True)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [level(x) for level in self.levels]
        return [*maps, F.max_pool2d(maps[-1], 1, 2)]


class StagePyramid(nn.Module):
    """Feature pyramid network over the stages of a hierarchical network, and one more map at half the resolution.

    Shape: n of (B, in_channels[i], H_i, W_i) -> n + 1 of (B, out_channels, H_i, W_i)
    Source: FPN (Lin et al., 2017), torchvision's, with LayerNorm over the channels after each convolution
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int = 256) -> None:
        super().__init__()
        self.network = FeaturePyramidNetwork(list(in_channels), out_channels, norm_layer=LayerNorm2d)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        merged = list(self.network({str(i): x for i, x in enumerate(maps)}).values())
        return [*merged, F.max_pool2d(merged[-1], 1, 2)]


def _conv(in_channels: int, out_channels: int, kernel_size: int) -> Conv2dNormActivation:
    """Return a convolution without bias, and LayerNorm over its channels."""
    return Conv2dNormActivation(
        in_channels, out_channels, kernel_size, norm_layer=LayerNorm2d, activation_layer=None, bias=False
    )
