"""CoAtNet's Transformer blocks on feature maps, with or without relative attention, and the patch stem of ViT_REL."""

from functools import partial

import torch.nn.functional as F
from timm.layers import Attention, DropPath, Mlp
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import PostRelativeAttention, RelativeAttention
from isomorph.layers.mbconv import make_pool, make_shortcut

LayerNorm = partial(nn.LayerNorm, eps=1e-6)


def _check_head_dim(width: int, head_dim: int) -> None:
    """Raises: UserError if head_dim does not divide the width."""
    if width % head_dim:
        raise UserError(f"head_dim {head_dim} does not divide the width {width}")


def _as_channels_last(x: Tensor) -> Tensor:
    """Shape: (B, C, H, W) -> (B, H, W, C)"""
    return x.permute(0, 2, 3, 1)


def _as_channels_first(x: Tensor) -> Tensor:
    """Shape: (B, H, W, C) -> (B, C, H, W)"""
    return x.permute(0, 3, 1, 2)


class TransformerBlock(nn.Module):
    """Attention between the positions of a feature map, then an MLP, both pre-activated; stride 2 halves the map.

    x = Proj(Pool(x)) + attn(Pool(norm1(x))),    x = x + mlp(norm2(x))

    `grid_size` is the height and width of the output, at the image size that the network is created for.

    Shape: x (B, dim, H, W) -> (B, dim_out, ceil(H / stride), ceil(W / stride))
    Source: CoAtNet A.1, eq. 4
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        stride: int = 1,
        head_dim: int = 32,
        grid_size: tuple[int, int] = (14, 14),
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.shortcut = make_shortcut(dim, dim_out, stride)
        self.norm1 = LayerNorm(dim)
        self.pool = make_pool(stride)
        self.attn = self.build_attention(dim, dim_out, head_dim, grid_size)
        self.norm2 = LayerNorm(dim_out)
        self.mlp = Mlp(dim_out, 4 * dim_out)
        self.drop_path = DropPath(drop_path)

    def build_attention(self, dim: int, dim_out: int, head_dim: int, grid_size: tuple[int, int]) -> Attention:
        """Build the attention, whose queries, keys and values have dim_out channels.

        Raises: UserError if head_dim does not divide dim_out.
        """
        _check_head_dim(dim_out, head_dim)
        arguments = dict(attn_head_dim=head_dim, dim_out=dim_out, qkv_bias=True)
        return self.attention_class(dim, dim_out // head_dim, grid_size, **arguments)

    attention_class: type[RelativeAttention] = RelativeAttention

    def attend(self, x: Tensor) -> Tensor:
        """Apply attention. Shape: x (B, H, W, dim) -> (B, H, W, dim_out)"""
        return self.attn(x)

    def forward(self, x: Tensor) -> Tensor:
        y = _as_channels_last(self.pool(_as_channels_first(self.norm1(_as_channels_last(x)))))  # (B, H', W', dim)
        x = _as_channels_last(self.shortcut(x)) + self.drop_path(self.attend(y))  # (B, H', W', dim_out)
        return _as_channels_first(x + self.drop_path(self.mlp(self.norm2(x))))


class PostTransformerBlock(TransformerBlock):
    """A Transformer block whose attention adds the relative bias after the softmax (eq. 3, post)."""

    attention_class = PostRelativeAttention


class PlainTransformerBlock(TransformerBlock):
    """A Transformer block with plain attention, which ignores positions (Table 6, without relative attention)."""

    def build_attention(self, dim: int, dim_out: int, head_dim: int, grid_size: tuple[int, int]) -> Attention:
        _check_head_dim(dim_out, head_dim)
        return Attention(dim, dim_out // head_dim, attn_head_dim=head_dim, dim_out=dim_out, qkv_bias=True)

    def attend(self, x: Tensor) -> Tensor:
        return self.attn(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


class PatchStem(nn.Module):
    """Patch embedding, the stem of a ViT; the image is padded with zeros to a multiple of the patch size.

    Shape: x (B, in_chans, H, W) -> (B, dim, ceil(H / size), ceil(W / size))
    Source: CoAtNet section 2.2, ViT stem
    """

    def __init__(self, in_chans: int, dim: int, size: int = 16) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(in_chans, dim, size, size)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        return self.proj(F.pad(x, (0, -width % self.size, 0, -height % self.size)))
