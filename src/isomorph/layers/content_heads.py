"""Content attention of heads on feature maps: queries, keys and their softmax over the zero-padded map.

Keys are padded with zeros as the input of a convolution is. All padded keys are equal, so one key stands for them, with
the logarithm of their number as its score.

Letters: B batch, C channels, H W key grid, nh heads (one per tap), hd head width, Nq queries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from isomorph.layers.positional_attention import geometry_dtype
from isomorph.layers.tap_heads import TapHeads

MAX_DENSE_PAIRS = 512 * 512
"""Most query-key pairs for which the map is formed. Above, and for sizes that an export leaves open, no map is formed
(measured by benchmarks/gpsa.py)."""


def forms_map(queries: int, keys: int) -> bool:
    """True if a map of this many queries and keys is known to be small enough to be formed."""
    return statically_known_true(queries * keys <= MAX_DENSE_PAIRS)


def group_rows_by_head(weight: Tensor, num_heads: int) -> Tensor:
    """Assign the rows of a projection to heads in turn, padding heads that get one row fewer with zeros.

    9 heads do not divide 512 channels: row r goes to head r mod 9, so every row is used and each head gets 56 or 57
    rows. A zero row does not change any inner product.

    Shape: weight (C, C_in) -> (nh ceil(C / nh), C_in), grouped by head
    """
    head_width = -(-weight.shape[0] // num_heads)
    rows = F.pad(weight, (0, 0, 0, num_heads * head_width - weight.shape[0]))
    return rows.view(head_width, num_heads, -1).transpose(0, 1).flatten(0, 1)  # (nh hd, C_in)


class ContentHeads(TapHeads):
    """Base of layers whose heads attend by content, with the projections `query` and `key`.

    Rows of the projections are assigned to heads in turn, as k*k rarely divides C.
    """

    query: nn.Linear
    key: nn.Linear

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a query per window and a key per position of x, followed by one zero key for all of the padding.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, H W + 1, hd)
        """
        tokens = x.flatten(2).transpose(1, 2)  # (B, H W, C)
        centres = self.query_positions(x).flatten(2).transpose(1, 2)  # (B, Nq, C)
        q = F.linear(centres, group_rows_by_head(self.query.weight, self.num_heads))
        k = F.linear(tokens, group_rows_by_head(self.key.weight, self.num_heads))
        q, k = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k))
        return q, F.pad(k, (0, 0, 0, 1))

    def padding_score(self, like: Tensor, H: int, W: int) -> Tensor:
        """Return the score added to each key: 0, and log(number of padded keys) for the one key that represents them.

        Shape: -> (H W + 1,)
        """
        padded = (H + 2 * self.padding[0]) * (W + 2 * self.padding[1]) - H * W
        last = torch.full((1,), padded, dtype=geometry_dtype(like), device=like.device).log()  # log 0 is -inf
        return F.pad(last.to(like.dtype), (H * W, 0))

    def content_map(self, x: Tensor) -> Tensor:
        """Return the map of content attention over the positions of x. Shape: x (B, C, H, W) -> (B, nh, Nq, H W)"""
        q, k = self.queries_keys(x)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, nh, Nq, H W + 1)
        scores = scores.add_(self.padding_score(scores, *x.shape[-2:]))
        return torch.softmax(scores, dim=-1)[..., :-1]

    def attend_by_content(self, x: Tensor, values: Tensor) -> Tensor:
        """Return content attention times values, which all heads share, without forming a map.

        Shape: x (B, C, H, W), values (B, H W, C) -> (B, nh, Nq, C)
        """
        q, k = self.queries_keys(x)
        B, nh, Nq, hd = q.shape
        shared = F.pad(values, (0, 0, 0, 1))[:, None].expand(B, nh, -1, -1)  # (B, nh, H W + 1, C)
        if x.device.type == "cpu" and hd < self.in_channels:  # its fused kernel needs q, k and v of one width
            q, k = (F.pad(t, (0, self.in_channels - hd)) for t in (q, k))
        bias = self.padding_score(q, *x.shape[-2:]).expand(1, 1, Nq, -1)
        return F.scaled_dot_product_attention(q, k, shared, attn_mask=bias, scale=hd**-0.5)

    def content_scores(self, x: Tensor, query: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the queries, divided by sqrt(hd), the keys of the padded grid, and a score added to each key, or None.

        With `query`, an index among the Nq queries, only this one.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, (H + 2 pad) (W + 2 pad), hd), (Nq, keys)
        """
        ph, pw = self.padding
        q, k = self.queries_keys(x)
        q = q if query is None else q[:, :, query : query + 1]
        keys = k[:, :, :-1].unflatten(2, x.shape[-2:])  # (B, nh, H, W, hd)
        return q * q.shape[-1] ** -0.5, F.pad(keys, (0, 0, pw, pw, ph, ph)).flatten(2, 3), None

    def content_attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the map of content attention over the zero-padded keys, or the row of one query. Rows sum to 1.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        self.check_map(x, query)
        q, keys, bias = self.content_scores(x, query)
        scores = q @ keys.transpose(-2, -1)
        return torch.softmax(scores if bias is None else scores + bias, dim=-1)
