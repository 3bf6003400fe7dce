"""The algebra of refined attention: expansion, local convolution and reduction of attention maps are one convolution.

    A'_o = sum_m R[o, m] D_m * (sum_i E[m, i] A_i) = sum_i W[o, i] * A_i,    W[o, i] = sum_m R[o, m] E[m, i] D_m

with * the k x k convolution along queries and keys, zeros around the map. W has H x H kernels however many maps stand
between, so no expanded map exists, in training or after. Born with the `same-function`, a refiner changes nothing and
every weight can move; born as in the `paper`, its weights are drawn as torch draws those of convolutions.
Letters: B batch, H heads, M = ratio H maps, N tokens, k kernel size.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.moments import full_precision

Init = Literal["same-function", "paper"]


@torch.no_grad()
def start(weight: Tensor, init: Init, middle: float = 1.0) -> None:
    """Sets the taps of kernels: all 0 but the middle one, or drawn. Shape: weight (M, k) or (M, k, k)"""
    if init == "paper":
        bound = weight[0].numel() ** -0.5
        nn.init.uniform_(weight, -bound, bound)
    else:
        weight.zero_().flatten(1)[:, weight[0].numel() // 2] = middle


class SquareKernel(nn.Module):
    """One k x k kernel for each map: along queries and keys. Shape: -> (M, k, k)

    Source: Refiner section 3.3
    Raises: ValueError for a kernel without a middle, or an unknown start.
    """

    def __init__(self, maps: int, kernel_size: int = 3, init: Init = "same-function", **kind: Any) -> None:
        super().__init__()
        if init not in ("same-function", "paper"):
            raise ValueError(f"init {init!r} is unknown; choose 'same-function' or 'paper'")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel size {kernel_size} has no middle; give an odd one (1: no convolution)")
        self.kernel_size, self.init = kernel_size, init
        self.make_taps(maps, **kind)
        self.reset_parameters()

    def make_taps(self, maps: int, **kind: Any) -> None:
        self.taps = nn.Parameter(torch.empty(maps, self.kernel_size, self.kernel_size, **kind))

    def reset_parameters(self) -> None:
        start(self.taps, self.init)

    def forward(self) -> Tensor:
        return self.taps


class CrossKernel(SquareKernel):
    """One kernel for each map that is the sum of a row and a column: a cross. Shape: -> (M, k, k)

    Source: Refiner Table 4, "Row+Col"; differs: added, as the paper does not say how the two are combined
    Raises: as SquareKernel.
    """

    def make_taps(self, maps: int, **kind: Any) -> None:
        self.along_queries = nn.Parameter(torch.empty(maps, self.kernel_size, **kind))
        self.along_keys = nn.Parameter(torch.empty(maps, self.kernel_size, **kind))

    def reset_parameters(self) -> None:
        for line in (self.along_queries, self.along_keys):
            start(line, self.init, middle=0.5)

    def forward(self) -> Tensor:
        side = self.kernel_size // 2
        return F.pad(self.along_queries[:, :, None], (side, side)) + F.pad(self.along_keys[:, None], (0, 0, side, side))


class MapConvolution(nn.Module):
    """Distributed local attention on the map: each head's map is convolved on its own, A'_h = D_h * A_h.

    Shape: maps (B, H, N, N) -> (B, H, N, N)
    Source: Refiner section 3.3
    Raises: ValueError for a kernel without a middle.
    """

    def __init__(self, num_heads: int, kernel_size: int = 3, init: Init = "same-function", **kind: Any) -> None:
        super().__init__()
        self.local = SquareKernel(num_heads, kernel_size, init, **kind)

    def kernel(self) -> Tensor:
        """Shape: -> (H, 1, k, k)"""
        return self.local()[:, None]

    def forward(self, maps: Tensor) -> Tensor:
        return F.conv2d(maps, self.kernel(), padding=self.local.kernel_size // 2, groups=maps.shape[1])


class Expansion(nn.Module):
    """More maps than heads, each a mixture of all heads and convolved: A'_m = D_m * sum_i E[m, i] A_i.

    Map m starts near head m // ratio, whose values it weighs.

    Shape: maps (B, H, N, N) -> (B, M, N, N)
    Source: Refiner sections 3.2 and 3.3, Table 3 "w/o reduction"; differs: one convolution from H to M maps
    Raises: ValueError for a ratio that is no whole number, or a kernel without a middle.
    """

    def __init__(
        self,
        num_heads: int,
        ratio: int = 3,
        kernel_size: int = 3,
        init: Init = "same-function",
        local: type[SquareKernel] = SquareKernel,
        **kind: Any,
    ) -> None:
        super().__init__()
        if not isinstance(ratio, int) or ratio < 1:
            raise ValueError(f"expansion ratio {ratio} must be a whole number, at least 1 (1: talking heads)")
        self.num_heads, self.ratio, self.init = num_heads, ratio, init
        self.expand = nn.Parameter(torch.empty(ratio * num_heads, num_heads, **kind))  # (M, H)
        self.local = local(ratio * num_heads, kernel_size, init, **kind)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.init == "paper":
            nn.init.uniform_(self.expand, -(self.num_heads**-0.5), self.num_heads**-0.5)
        else:
            self.expand.copy_(torch.eye(self.num_heads).repeat_interleave(self.ratio, 0))

    def kernel(self) -> Tensor:
        """The one convolution that this is. Shape: -> (M, H, k, k)"""
        with full_precision(self.expand.device):
            return self.expand[:, :, None, None] * self.local()[:, None]

    def forward(self, maps: Tensor) -> Tensor:
        return F.conv2d(maps, self.kernel(), padding=self.local.kernel_size // 2)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, ratio={self.ratio}, kernel_size={self.local.kernel_size}"


class Refiner(Expansion):
    """Expands attention maps, convolves each and reduces them to as many as there were: A' = R (D * (E A)).

    Kernel size 1: no convolution; ratio 1 and kernel size 1: talking heads.

    Shape: maps (B, H, N, N) -> (B, H, N, N)
    Source: Refiner Fig. 3; differs: one convolution; the released code has norms and ReLUs between
    Raises: as Expansion.
    """

    def __init__(self, num_heads: int, ratio: int = 3, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_heads, ratio, *args, **kwargs)
        self.reduce = nn.Parameter(self.expand.detach().new_empty(num_heads, ratio * num_heads))  # (H, M)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Born with the same function, R E = 1 with E orthogonal: copies of the heads would learn alike for ever."""
        super().reset_parameters()
        if not hasattr(self, "reduce"):
            return
        if self.init == "paper":
            nn.init.uniform_(self.reduce, -(self.reduce.shape[1] ** -0.5), self.reduce.shape[1] ** -0.5)
        else:
            directions = torch.empty(self.expand.shape, device=self.expand.device)
            self.expand.copy_(nn.init.orthogonal_(directions))
            self.reduce.copy_(self.expand.mT)

    def kernel(self) -> Tensor:
        """The one convolution that this is. Shape: -> (H, H, k, k)"""
        k = self.local.kernel_size
        with full_precision(self.reduce.device):
            taps = self.local().flatten(1).mT[:, None]  # (k k, 1, M)
            return ((self.reduce * taps) @ self.expand).permute(1, 2, 0).unflatten(2, (k, k))  # (H, H, k, k)


class SpatialRefiner(Refiner):
    """A refiner whose convolution runs over the image: what a query looks at is a picture, and that is convolved.

    Keys without a place (class token, registers) have no neighbours: the middle tap alone is theirs.

    Shape: maps (B, H, N, N), grid_size (H, W) -> (B, H, N, N) with N = prefix_tokens + H W
    Source: Refiner Table 4, "Spatial"
    Raises: as Expansion.
    """

    def forward(self, maps: Tensor, grid_size: tuple[int, int] = (1, 1), prefix_tokens: int = 0) -> Tensor:
        kernel, k = self.kernel(), self.local.kernel_size
        pictures = maps[..., prefix_tokens:].transpose(1, 2).flatten(0, 1).unflatten(-1, grid_size)  # (B N, H, h, w)
        placed = (
            F.conv2d(pictures, kernel, padding=k // 2).flatten(2).unflatten(0, (maps.shape[0], maps.shape[2]))
        )  # (B, N, H, h w)
        middle = kernel[..., k // 2, k // 2]  # (H, H)
        free = torch.einsum("oi,biqk->boqk", middle, maps[..., :prefix_tokens])  # (B, H, N, prefix)
        return torch.cat([free.to(placed.dtype), placed.transpose(1, 2)], dim=-1)
