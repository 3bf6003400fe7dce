"""GPSA on tokens whose heads attend by position, by content or by both: what is left when closed heads are pruned.

A head is described by a letter: p (position only), c (content only) or b (both).
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.gated_mix import attend_positions, gated_mix
from isomorph.layers.position_gates import position_axis_maps
from isomorph.layers.positional_attention import kronecker
from isomorph.layers.token_heads import TokenHeads, softmax_map
from isomorph.layers.vit_call import ViTCall

LETTERS = "pbc"
"""Position only, both, content only: the order of the heads inside the layer."""


@register_notrace_module
class PrunedGPSA(TokenHeads):
    """A GPSA of which some heads attend by position only, without queries and keys, and some by content only.

        y = proj(cat_h A_h v_h),    A_h = P_h for letter p, C_h for c, (1 - s_h) C_h + s_h P_h for b

    `heads` has a letter for each head. Heads of letter p cost work linear in the number of tokens. Their prefix tokens
    (class token, registers) attend by content still, as they have no position: for them `prefix_qk` keeps queries and
    keys, and only the prefix tokens have queries. Inside the layer heads are sorted: position, both, content. The other
    arguments are those of `GPSA`.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 7, with gates at 0 or 1 for some heads
    Raises: ValueError if a letter is not p, c or b, the heads do not divide C, or N is not prefix_tokens + H W.

    Example:
        >>> layer = iso.layers.PrunedGPSA("ppbc", dim=32, grid_size=(6, 8))
        >>> layer(torch.randn(2, 48, 32)).shape
        torch.Size([2, 48, 32])
        >>> [round(share, 2) for share in layer.position_share.tolist()]
        [1.0, 1.0, 0.73, 0.0]
    """

    def __init__(
        self,
        heads: str,
        dim: int,
        grid_size: tuple[int, int] = (14, 14),
        qkv_bias: bool = False,
        prefix_tokens: int = 0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if not heads or set(heads) - set(LETTERS):
            raise ValueError(f"heads {heads!r} must be letters of p, c and b, one for each head")
        if dim % len(heads):
            raise ValueError(f"{len(heads)} heads do not divide {dim} channels; choose a divisor")
        self.heads, self.num_heads = heads, len(heads)
        self.grid_size, self.prefix_tokens = grid_size, prefix_tokens
        self.counts = {letter: heads.count(letter) for letter in LETTERS}
        width, placed = dim // len(heads), self.counts["p"] + self.counts["b"]
        with_content = (len(heads) - self.counts["p"]) * width
        by_prefix = self.counts["p"] * width if prefix_tokens else 0
        self.qk = nn.Linear(dim, 2 * with_content, bias=qkv_bias) if with_content else None
        self.prefix_qk = nn.Linear(dim, 2 * by_prefix, bias=qkv_bias) if by_prefix else None
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.position = nn.Parameter(torch.tensor([0.0, 0.0, -1.0]).expand(placed, 3).clone())
        self.gate = nn.Parameter(torch.ones(self.counts["b"]))

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would pull to 0, and with them the centres and localities."""
        return {"position", "gate"}

    @property
    def sorted_heads(self) -> list[int]:
        """The heads in the order of this layer's parameters: position, both, content."""
        return sorted(range(self.num_heads), key=lambda h: (LETTERS.index(self.heads[h]), h))

    def in_head_order(self, values: Tensor) -> Tensor:
        """Return a tensor with one row for each sorted head in the order of the heads. Shape: (nh, ...)"""
        order = torch.tensor(self.sorted_heads).argsort()
        return values.index_select(0, order.to(values.device))

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head: 1, sigmoid(gate) or 0. Shape: -> (nh,)"""
        ones, zeros = (self.gate.new_full((self.counts[letter],), float(letter == "p")) for letter in "pc")
        return self.in_head_order(torch.cat([ones, torch.sigmoid(self.gate), zeros]))

    @property
    def locality(self) -> Tensor:
        """Sharpness of each head's position attention; NaN for a head without position. Shape: -> (nh,)"""
        return self.in_head_order(F.pad(-self.position[:, 2], (0, self.counts["c"]), value=torch.nan))

    @property
    def centre(self) -> Tensor:
        """Offset (row, column) where each head's position attention peaks; NaN without a peak. Shape: -> (nh, 2)"""
        locality, rows = -self.position[:, 2:], self.position[:, [1, 0]]
        centre = torch.where(locality > 0, rows / (2 * locality), torch.nan)
        return self.in_head_order(F.pad(centre, (0, 0, 0, self.counts["c"]), value=torch.nan))

    def split_queries_keys(self, queries: Tensor, keys: Tensor, qk: nn.Linear) -> tuple[Tensor, Tensor]:
        """Return the queries of some tokens and the keys of others, by one joint projection.

        Shape: queries (B, Nq, C), keys (B, N, C) -> (B, nh, Nq, hd), (B, nh, N, hd)
        """
        weights, biases = qk.weight.chunk(2), (None, None) if qk.bias is None else qk.bias.chunk(2)
        width = self.v.out_features // self.num_heads
        pairs = zip((queries, keys), weights, biases, strict=True)
        q, k = (F.linear(x, w, b).unflatten(-1, (-1, width)).transpose(1, 2) for x, w, b in pairs)
        return self.normalise(q, k)

    def forward(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        rows, columns = position_axis_maps(self.position, self.check_grid(x, grid_size))
        p, n_p, n_b = self.prefix_tokens, self.counts["p"], self.counts["b"]
        v = self.split_heads(self.v(x))  # (B, N, nh, hd), sorted
        parts = {}
        if n_p + n_b:  # heads of letters p and b in one product
            gated = rows * F.pad(torch.sigmoid(self.gate.to(rows.dtype)), (n_p, 0), value=1.0)[:, None, None]
            placed = attend_positions(v[:, p:, : n_p + n_b], gated, columns)  # (B, H W, n_p + n_b, hd)
        if n_p:
            parts["p"] = self.add_prefix(x, placed[:, :, :n_p], v[:, :, :n_p])
        if self.qk is not None:
            q, k = self.split_queries_keys(x, x, self.qk)
            content = F.scaled_dot_product_attention(q, k, v[:, :, n_p:].transpose(1, 2)).transpose(1, 2)
            parts["c"] = content[:, :, n_b:]  # (B, N, n_c, hd)
            if n_b:
                weight = torch.sigmoid(-self.gate.to(rows.dtype)).to(content.dtype)[:, None]  # (n_b, 1)
                mixed = content[:, p:, :n_b] * weight + placed[:, :, n_p:]
                parts["b"] = torch.cat([content[:, :p, :n_b], mixed], dim=1) if p else mixed
        return self.proj_drop(self.proj(self.join_heads(parts, dim=2).flatten(2)))

    def add_prefix(self, x: Tensor, attended: Tensor, values: Tensor) -> Tensor:
        """Add what the prefix tokens attend to in heads of position only, by content.

        Shape: x (B, N, C), attended (B, H W, n, hd), values (B, N, n, hd) -> (B, N, n, hd)
        """
        if self.prefix_qk is None:
            return attended
        q, k = self.split_queries_keys(x[:, : self.prefix_tokens], x, self.prefix_qk)
        prefix = F.scaled_dot_product_attention(q, k, values.transpose(1, 2)).transpose(1, 2)
        return torch.cat([prefix, attended], dim=1)

    def join_heads(self, parts: dict[str, Tensor], dim: int) -> Tensor:
        """Join the parts of each letter in the order of the heads, which are one dimension of all parts."""
        taken, runs = dict.fromkeys(LETTERS, 0), []
        for letter, run in groupby(self.heads):
            length = len(list(run))
            runs.append(parts[letter].narrow(dim, taken[letter], length))
            taken[letter] += length
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)

    def attention(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """Return the attention map that `forward` applies; it is formed only here.

        Shape: x (B, N, C) -> (B, nh, N, N)
        """
        p, n_p, n_b = self.prefix_tokens, self.counts["p"], self.counts["b"]
        position = kronecker(*position_axis_maps(self.position, self.check_grid(x, grid_size)))
        position = F.pad(position, (p, 0)).to(x.dtype)  # (n_p + n_b, H W, N)
        parts = {}
        if n_p:
            placed = position[:n_p].expand(x.shape[0], -1, -1, -1)
            parts["p"] = placed
            if self.prefix_qk is not None:
                prefix = softmax_map(*self.split_queries_keys(x[:, :p], x, self.prefix_qk))
                parts["p"] = torch.cat([prefix, placed], dim=2)
        if self.qk is not None:
            content = softmax_map(*self.split_queries_keys(x, x, self.qk))
            parts["c"] = content[:, n_b:]
            mixed = gated_mix(content[:, :n_b, p:], position[n_p:], self.gate)
            parts["b"] = torch.cat([content[:, :n_b, :p], mixed], dim=2)
        return self.join_heads(parts, dim=1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, {super().extra_repr()}"


class PrunedViTGPSA(ViTCall, PrunedGPSA):  # type: ignore[misc]  # a ViT passes a mask too
    """A `PrunedGPSA` in place of timm's Attention in a ViT, with its norms of queries and keys.

    In a recast model every call gets the grid of its image; `grid_size` is used for other calls and can be set.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 7, with gates at 0 or 1 for some heads
    Raises: ValueError as PrunedGPSA, or for a mask, which position attention cannot obey.

    Example:
        >>> layer = iso.layers.PrunedViTGPSA("ppc", dim=48, grid_size=(4, 5), prefix_tokens=1)
        >>> layer(torch.randn(2, 21, 48)).shape
        torch.Size([2, 21, 48])
    """

    def extra_repr(self) -> str:
        return f"heads={self.heads}, {super().extra_repr()}"
