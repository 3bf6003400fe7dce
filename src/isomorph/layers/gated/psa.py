"""Positional self-attention on tokens (ConViT eq. 4): content and position in one softmax, the ablation of GPSA.

    A_h = softmax(q_h k_h^T / sqrt(hd) + v_pos_h . r)

The larger of the two terms alone decides where a head attends. GPSA (`gpsa.py`) mixes two softmaxes instead, so that a
gate can weigh them.

Letters: B batch, N tokens, C channels, nh heads, hd head width.
"""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor

from isomorph.layers.attention_base import attend_with_bias, join_heads, scaled, softmax_map
from isomorph.layers.gated.positions import axis_scores, image_axis, outer_sum
from isomorph.layers.gated.token_heads import TokenHeads
from isomorph.layers.grid import GridSize


@register_notrace_module
class PSA(TokenHeads):
    """Self-attention with a learnt position score for each head, which can start out local like a convolution.

    It is GPSA without the gate: each head adds the scores of content and position before one softmax.

        y = proj(softmax(q k^T / sqrt(hd) + v_pos . (dx, dy, dx^2 + dy^2)) v)

    Parameters, arguments and initialisation are those of GPSA without gates: `position` holds v_pos, and head h starts
    at tap h of a window with sharpness `locality`. `grid_size` (H, W) is the grid of the tokens; pass another one to
    `forward` at any call. Scores from and to prefix tokens are by content only.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 4 and 5; differs: 1/sqrt(hd) as in GPSA; W_qry and W_key keep their usual initialisation, since
    at 0 the gradient of each is 0 and they would stay there; taps row-major, any rectangle
    Raises: ValueError if the number of heads does not divide C, or if the tokens do not fill the grid.

    Example:
        >>> layer = iso.layers.PSA(dim=32, num_heads=4, grid_size=(6, 8))
        >>> layer(torch.randn(2, 48, 32)).shape
        torch.Size([2, 48, 32])
        >>> layer.attention(torch.randn(1, 20, 32), grid_size=(4, 5)).shape
        torch.Size([1, 4, 20, 20])
    """

    def position_bias(self, grid_size: GridSize, dtype: torch.dtype) -> Tensor:
        """Return v_pos . r for every query and key, 0 from and to prefix tokens. Shape: -> (1, nh, N, N)"""
        scores = outer_sum(*axis_scores(self.position, map(image_axis, grid_size, grid_size)))
        bias = scores[None].to(dtype)
        return F.pad(bias, (self.prefix_tokens, 0) * 2) if self.prefix_tokens else bias

    def forward(self, x: Tensor, grid_size: GridSize | None = None) -> Tensor:
        grid_size = self.check_grid(x, grid_size)
        q, k = self.queries_keys(x)
        v = self.split_heads(self.v(x)).transpose(1, 2)  # (B, nh, N, hd)
        bias = self.cached((self.position,), self.position_bias, grid_size, q.dtype)
        scale = q.shape[-1] ** -0.5
        mixed = attend_with_bias(bias[0], 0.0, scale, q, k, v, reaches_far=True)  # (B, nh, N, hd)
        return self.proj_drop(self.proj(join_heads(mixed)))

    def content_scores(
        self,
        x: Tensor,
        grid_size: GridSize | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scaled queries, the keys and v_pos . r. Shape: -> two of (B, nh, N, hd), (1, nh, N, N)"""
        q, k = self.queries_keys(x)
        bias = self.position_bias(self.check_grid(x, grid_size), q.dtype)
        return scaled(q), k, bias

    def attention(self, x: Tensor, grid_size: GridSize | None = None) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, N, C) -> (B, nh, N, N)"""
        return softmax_map(*self.content_scores(x, grid_size))
