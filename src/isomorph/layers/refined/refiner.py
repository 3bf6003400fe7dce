"""Refiners of attention maps: expansion, local convolution and reduction of the maps, computed as one convolution.

    A'_o = sum_m R[o, m] D_m * (sum_i E[m, i] A_i) = sum_i W[o, i] * A_i,    W[o, i] = sum_m R[o, m] E[m, i] D_m

with * the k x k convolution along queries and keys, zero-padded. W has H x H kernels for any number of expanded maps,
so expanded maps are never formed, also not in training. Initialised with init="same-function", a refiner changes
nothing and every weight gets a gradient; with init="paper", its weights are drawn as torch draws those of convolutions.

Letters: B batch, H heads, M = ratio H maps, N tokens, k kernel size.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.grid import GridSize
from isomorph.layers.modes import KeepsInEval, disable_autocast

Init = Literal["same-function", "paper"]


@torch.no_grad()
def _init_taps(weight: Tensor, init: Init, middle: float = 1.0) -> None:
    """Initialise the taps of kernels: 0 except for the middle one, or random. Shape: weight (M, k) or (M, k, k)"""
    taps = weight[0].numel()
    if init == "paper":
        nn.init.uniform_(weight, -(taps**-0.5), taps**-0.5)
    else:
        weight.zero_().flatten(1)[:, taps // 2] = middle


class SquareKernel(nn.Module):
    """One k x k kernel per map, along queries and keys: Refiner section 3.3. Shape: -> (M, k, k)

    Raises: ValueError for a kernel size that is not odd, or an unknown init.
    """

    def __init__(
        self,
        maps: int,
        kernel_size: int = 3,
        init: Init = "same-function",
        **kind: Any,
    ) -> None:
        super().__init__()
        if init not in ("same-function", "paper"):
            raise ValueError(f"init {init!r} is unknown; choose 'same-function' or 'paper'")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size {kernel_size} must be an odd number, at least 1 (1: no convolution)",
            )
        self.kernel_size = kernel_size
        self.init = init
        self.make_taps(maps, **kind)
        self.reset_parameters()

    def make_taps(self, maps: int, **kind: Any) -> None:
        """Create the parameters of the kernels of `maps` maps."""
        self.taps = nn.Parameter(torch.empty(maps, self.kernel_size, self.kernel_size, **kind))

    def reset_parameters(self) -> None:
        """Set the kernels to the identity, or draw them, as `init` says."""
        _init_taps(self.taps, self.init)

    def forward(self) -> Tensor:
        return self.taps


class CrossKernel(SquareKernel):
    """One cross-shaped kernel per map, the sum of a row and a column: fewer weights than a square one.

    Pass it to a refiner as `local`.

    Shape: -> (M, k, k)
    Source: Refiner Table 4, "Row+Col"; differs: added, as the paper does not say how the two are combined
    Raises: ValueError for a kernel size that is not odd, or an unknown init.

    Example:
        >>> refiner = iso.layers.Refiner(num_heads=4, local=iso.layers.CrossKernel)
        >>> refiner.local().shape
        torch.Size([12, 3, 3])
    """

    def make_taps(self, maps: int, **kind: Any) -> None:
        self.along_queries = nn.Parameter(torch.empty(maps, self.kernel_size, **kind))
        self.along_keys = nn.Parameter(torch.empty(maps, self.kernel_size, **kind))

    def reset_parameters(self) -> None:
        for line in (self.along_queries, self.along_keys):
            _init_taps(line, self.init, middle=0.5)

    def forward(self) -> Tensor:
        side = self.kernel_size // 2
        column = F.pad(self.along_queries[:, :, None], (side, side))
        row = F.pad(self.along_keys[:, None], (0, 0, side, side))
        return column + row


class MapConvolution(nn.Module):
    """Convolve each head's attention map with its own kernel, along queries and keys: A'_h = D_h * A_h.

    It gives each head a local pattern without mixing heads (distributed local attention). `LocalAttention` computes the
    same without forming the maps.

    Shape: maps (B, H, N, N) -> (B, H, N, N)
    Source: Refiner section 3.3
    Raises: ValueError for a kernel size that is not odd, or an unknown init.

    Example:
        >>> maps = torch.rand(2, 4, 10, 10)
        >>> torch.equal(iso.layers.MapConvolution(num_heads=4, kernel_size=3)(maps), maps)  # at initialisation
        True
    """

    def __init__(
        self,
        num_heads: int,
        kernel_size: int = 3,
        init: Init = "same-function",
        **kind: Any,
    ) -> None:
        super().__init__()
        self.local = SquareKernel(num_heads, kernel_size, init, **kind)

    def kernel(self) -> Tensor:
        """Shape: -> (H, 1, k, k)"""
        return self.local()[:, None]

    def forward(self, maps: Tensor) -> Tensor:
        return F.conv2d(
            maps, self.kernel(), padding=self.local.kernel_size // 2, groups=maps.shape[1]
        )


class Expansion(KeepsInEval):
    """Turn the attention maps of H heads into ratio H maps: mixtures of all heads, convolved locally.

    A'_m = D_m * sum_i E[m, i] A_i. Map m starts as the map of head m // ratio, to whose values `ExpandedAttention`
    applies it. `local` is the kind of kernel D: `SquareKernel`, or `CrossKernel`.

    Shape: maps (B, H, N, N) -> (B, M, N, N)
    Source: Refiner sections 3.2 and 3.3, Table 3 "w/o reduction"; differs: one convolution from H to M maps
    Raises: ValueError for a ratio that is not a whole number above 0, a kernel size that is not odd, or an unknown
    init.

    Example:
        >>> expansion = iso.layers.Expansion(num_heads=4, ratio=2)
        >>> expansion(torch.rand(2, 4, 10, 10)).shape
        torch.Size([2, 8, 10, 10])
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
            raise ValueError(f"ratio {ratio} must be a whole number, at least 1 (1: talking heads)")
        self.num_heads = num_heads
        self.ratio = ratio
        self.init = init
        self.expand = nn.Parameter(torch.empty(ratio * num_heads, num_heads, **kind))  # (M, H)
        self.local = local(ratio * num_heads, kernel_size, init, **kind)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the mixture of heads to copies of each, or draw it, as `init` says."""
        if self.init == "paper":
            bound = self.num_heads**-0.5
            nn.init.uniform_(self.expand, -bound, bound)
        else:
            self.expand.copy_(torch.eye(self.num_heads).repeat_interleave(self.ratio, 0))

    def kernel(self) -> Tensor:
        """Return the kernel of the equivalent convolution, which eval mode keeps. Shape: -> (M, H, k, k)"""
        return self.cached(tuple(self.parameters()), self.combine)

    def combine(self) -> Tensor:
        """Return the product of the weights. Shape: -> (M, H, k, k)"""
        with disable_autocast(self.expand.device):
            return self.expand[:, :, None, None] * self.local()[:, None]

    def forward(self, maps: Tensor) -> Tensor:
        return F.conv2d(maps, self.kernel(), padding=self.local.kernel_size // 2)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, ratio={self.ratio}, kernel_size={self.local.kernel_size}"
        )


class Refiner(Expansion):
    """Turn the attention maps of H heads into H better ones: mix heads, convolve locally, mix back. A' = R (D * (E A))

    E expands to ratio H maps, D convolves each of them, R reduces them to H again. Initialised with
    init="same-function", the maps are unchanged at first. kernel_size=1 leaves out the convolution; with ratio=1 as
    well it is talking-heads attention. Arguments as `Expansion`.

    Shape: maps (B, H, N, N) -> (B, H, N, N)
    Source: Refiner Fig. 3; differs: one convolution; the released code has norms and ReLUs between
    Raises: as Expansion.

    Example:
        >>> refiner = iso.layers.Refiner(num_heads=4, ratio=3, kernel_size=3)
        >>> refiner(torch.rand(2, 4, 10, 10)).shape
        torch.Size([2, 4, 10, 10])
        >>> refiner.kernel().shape  # of the one convolution that it is computed as
        torch.Size([4, 4, 3, 3])
    """

    def __init__(self, num_heads: int, ratio: int = 3, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_heads, ratio, *args, **kwargs)
        self.reduce = nn.Parameter(
            self.expand.detach().new_empty(num_heads, ratio * num_heads)
        )  # (H, M)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weights; the same function by an orthogonal E and R E = 1, as equal maps would stay equal."""
        super().reset_parameters()
        if not hasattr(self, "reduce"):
            return
        if self.init == "paper":
            bound = self.reduce.shape[1] ** -0.5
            nn.init.uniform_(self.reduce, -bound, bound)
        else:
            # in float64, which not every device has, so that R E is 1 within the rounding of the
            # model's own dtype
            directions = torch.empty(self.expand.shape, dtype=torch.float64, device="cpu")
            self.expand.copy_(nn.init.orthogonal_(directions))
            self.reduce.copy_(self.expand.mT)

    def combine(self) -> Tensor:
        """Return the product of the weights. Shape: -> (H, H, k, k)"""
        k = self.local.kernel_size
        with disable_autocast(self.reduce.device):
            expanded = self.expand[:, :, None] * self.local().flatten(1)[:, None]  # (M, H, k k)
            return (self.reduce @ expanded.flatten(1)).unflatten(1, (-1, k, k))  # (H, H, k, k)


class SpatialRefiner(Refiner):
    """A refiner that convolves over the image: for each query, the attention over the grid of keys is convolved.

    Keys without a position (class token, registers) have no neighbours; only the middle tap applies to them. Arguments
    as `Refiner`.

    Shape: maps (B, H, N, N), grid_size (h, w) -> (B, H, N, N) with N = prefix_tokens + h w
    Source: Refiner Table 4, "Spatial"
    Raises: as Expansion.

    Example:
        >>> refiner = iso.layers.SpatialRefiner(num_heads=4)
        >>> refiner(torch.rand(2, 4, 13, 13), grid_size=(3, 4), prefix_tokens=1).shape
        torch.Size([2, 4, 13, 13])
    """

    def forward(
        self,
        maps: Tensor,
        grid_size: GridSize = (1, 1),
        prefix_tokens: int = 0,
    ) -> Tensor:
        kernel = self.kernel()
        side = self.local.kernel_size // 2
        by_query = maps[..., prefix_tokens:].transpose(1, 2)  # (B, N, H, h w)
        images = by_query.flatten(0, 1).unflatten(-1, grid_size)  # (B N, H, h, w)
        convolved = F.conv2d(images, kernel, padding=side).flatten(2)
        convolved = convolved.unflatten(0, by_query.shape[:2])  # (B, N, H, h w)
        middle = kernel[..., side, side]  # (H, H)
        prefix = torch.einsum(
            "oi,biqk->boqk", middle, maps[..., :prefix_tokens]
        )  # (B, H, N, prefix)
        return torch.cat([prefix.to(convolved.dtype), convolved.transpose(1, 2)], dim=-1)
