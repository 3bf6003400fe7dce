"""Gated attention on feature maps whose heads attend by content to positions similar to the one under their tap.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads (one per tap), Nq queries, K offsets of a window.
"""

import copy
import math

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.grid import odd_window
from isomorph.layers.moments import disable_autocast
from isomorph.layers.positional_attention import compute_dtype, geometry_dtype
from isomorph.layers.similar_mean import similar_mean, similar_scores, similar_weights, window_offsets
from isomorph.layers.tap_heads import GatedHeads

SIMILAR_WINDOW = 3
"""Default height and width of the window."""

SHARPNESS = 10.0
"""Default sharpness, for images normalised to a variance of about 1 in each of three channels."""


@register_notrace_module
class SimilarGPSA2d(GatedHeads):
    """Gated attention on feature maps whose heads attend by content to positions similar to the one under their tap.

        y = sum_h A_h x weight_h + bias
        A_h(p) = (1 - sigma(gate_h)) S(p + tap_h) + sigma(gate_h) softmax(-locality_h |delta - centre_h|^2)
        S(r) = softmax_window(-sharpness |E x(r) - E x(j)|^2 / 2)    for the positions j of the window around r

    A head with an open gate reads, instead of the position under its tap, the mean of the similar positions around it
    (non-local means). With all gates open the layer is the convolution of a denoised map. `GPSA2d` compares the query
    in the middle of all taps with its keys, by their product, so an open head no longer reads its own tap. With a
    high locality, and closed gates or a sharpness that is high for the scale of the input, it is the convolution.

    All heads share S and the embedding E (`embedding`, C x C, the identity at first), so a map is averaged once, at a
    cost that is linear in its positions. `sharpness` is positive, as exp of `log_sharpness`; it has the unit of one
    over a variance of the input (`iso.fit_sharpness`). The window is clipped at the border of the map. The filters
    contain the values. The other arguments are those of `GPSA2d`.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: content attention is computed at the tap, by distance (Buades et al. 2005)
    Raises: ValueError for an even window, a sharpness that is not above 0 and finite, or as GPSA2d.

    Example:
        >>> layer = iso.layers.SimilarGPSA2d(8, 16, kernel_size=3, padding=1, window=5)
        >>> layer(torch.randn(2, 8, 20, 30)).shape
        torch.Size([2, 16, 20, 30])
        >>> layer.set_gating(locality=30.0, gate=20.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        groups: int = 1,
        window: int | tuple[int, int] = SIMILAR_WINDOW,
        sharpness: float = SHARPNESS,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias, None, groups)
        self.window = odd_window(window)
        self.embedding = nn.Linear(in_channels, in_channels, bias=False)
        self.log_sharpness = nn.Parameter(torch.empty(1))
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        nn.init.eye_(self.embedding.weight)
        self.centre_on_taps()
        self.set_gating(locality=1.0, gate=1.0)
        self.set_sharpness(sharpness)

    @torch.no_grad()
    def set_sharpness(self, sharpness: float) -> None:
        """Set how strongly similar positions are distinguished from others.

        Raises: ValueError if it is not above 0 and finite.
        """
        if not 0 < sharpness < math.inf:
            raise ValueError(f"sharpness {sharpness} must be above 0 and finite")
        self.log_sharpness.fill_(math.log(sharpness))

    @property
    def sharpness(self) -> Tensor:
        """Sharpness of the comparison, in units of one over a variance of the input. Shape: -> (1,)"""
        return self.log_sharpness.to(geometry_dtype(self.log_sharpness)).exp()

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would pull to 0: gates, sharpness, and those of the positions."""
        return super().no_weight_decay() | {"log_sharpness"}

    def embed(self, x: Tensor) -> Tensor:
        """Return what is compared: the score of two positions is minus half the squared distance of their embeddings.

        Shape: x (B, C, H, W) -> (B, C, H, W), in float32 at least
        """
        self.check_map(x)
        with disable_autocast(x.device):
            dtype = geometry_dtype(x)
            weight = self.embedding.weight.to(dtype) * self.sharpness.to(dtype).sqrt()
            return F.conv2d(x.to(dtype), weight[:, :, None, None])

    def forward(self, x: Tensor) -> Tensor:
        z, values = self.embed(x), x.to(compute_dtype(x))
        position = self.position_taps(values, self.position_share)
        similar = similar_mean(values, z, self.window)
        filters = self.scaled_filters(torch.sigmoid(-self.gate)).view_as(self.weight).to(values.dtype)
        content = F.conv2d(similar, filters, None, self.stride, self.padding, groups=self.groups)
        return self.with_bias(position + content)

    def content_attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the map of content attention over the zero-padded keys, or the row of one query. Rows sum to 1.

        A tap on the padding attends to itself, a zero.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        weights = similar_weights(self.embed(x), self.window).to(x.dtype)
        return self._by_tap(weights, own=1.0, elsewhere=0.0, query=query)

    def content_logits(self, x: Tensor) -> Tensor:
        """Return the scores of content attention over the zero-padded keys, -inf outside of the window.

        A tap on the padding has a score for itself only.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        return self._by_tap(similar_scores(self.embed(x), self.window), own=0.0, elsewhere=-torch.inf)

    def _by_tap(self, by_offset: Tensor, own: float, elsewhere: float, query: int | None = None) -> Tensor:
        """Return numbers for every offset of the window as maps over the zero-padded keys, one for each tap.

        Keys outside of the window get `elsewhere`, and positions of the padding `own` for themselves.

        Shape: by_offset (B, K, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        (H, W), (ph, pw), device = by_offset.shape[-2:], self.padding, by_offset.device
        keys, (rows, columns) = (H + 2 * ph) * (W + 2 * pw), self._taps(H, W, query, device)  # (nh, Nq)
        offsets = torch.tensor(window_offsets(self.window), device=device)  # (K, 2)
        down, right = rows[..., None] + offsets[:, 0], columns[..., None] + offsets[:, 1]  # (nh, Nq, K)
        itself = (offsets == 0).all(1)
        on_map = _is_inside(rows, columns, H, W)[..., None]
        used = torch.where(on_map, _is_inside(down, right, H, W), itself)
        numbers = by_offset[:, :, rows.clamp(0, H - 1), columns.clamp(0, W - 1)].movedim(1, -1)  # (B, nh, Nq, K)
        numbers = torch.where(on_map, numbers, own)
        key = torch.where(used, (down + ph) * (W + 2 * pw) + right + pw, keys)  # a last key that is dropped
        maps = by_offset.new_full((*numbers.shape[:-1], keys + 1), elsewhere)
        return maps.scatter(-1, key.expand_as(numbers), numbers)[..., :-1]

    def _taps(self, H: int, W: int, query: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row and column on the map of every tap of every query, or of one. Shape: -> (nh, Nq), twice"""
        along = [
            stride * torch.arange(queries, device=device) + torch.arange(self.kernel_size, device=device)[:, None] - pad
            for queries, stride, pad in zip(self.query_grid(H, W), self.stride, self.padding, strict=True)
        ]  # (k, Hq), (k, Wq)
        grid = torch.broadcast_tensors(along[0][:, None, :, None], along[1][None, :, None, :])  # (k, k, Hq, Wq)
        rows, columns = (each.flatten(2).flatten(0, 1) for each in grid)
        return (rows, columns) if query is None else (rows[:, query : query + 1], columns[:, query : query + 1])

    def deviation_from(self, conv: nn.Conv2d) -> float:
        """Return the largest relative |difference| to `conv` if all positions of a window were equally similar.

        In the standard normal input of this comparison they never are, which would hide content attention.
        """
        even = copy.deepcopy(self)
        even.log_sharpness.data.fill_(-math.inf)
        return GatedHeads.deviation_from(even, conv)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}"


def _is_inside(rows: Tensor, columns: Tensor, H: int, W: int) -> Tensor:
    """True for positions on an H x W map."""
    return (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
