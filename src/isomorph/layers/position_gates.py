"""Parameters of position attention: a locality and a centre for every head, and a gate (ConViT)."""

import math

import torch
from torch import Tensor, nn

from isomorph.layers.grid import axis_offsets, square_window, window_centres
from isomorph.layers.positional_attention import geometry_dtype, quadratic_axis_attention


class TokenPositions(nn.Module):
    """Base of the layers whose heads attend by position: the parameter `position`, read per head.

    It holds v_pos of ConViT eq. 4, from which `locality` and `centre` are read.

    Source: ConViT eq. 4 and 5
    """

    num_heads: int
    position: nn.Parameter

    def tap_offsets(self) -> Tensor:
        """Return the initial centre of every head, in (row, column) steps from the query. Shape: -> (nh, 2)"""
        return window_centres(square_window(self.num_heads))

    @torch.no_grad()
    def _set_position(self, centre: Tensor, locality: float) -> None:
        """Centre every head on an offset (row, column). Shape: centre (nh, 2)"""
        row, column = centre.unbind(1)
        self.position.copy_(locality * torch.stack([2 * column, 2 * row, -torch.ones_like(row)], dim=1))

    @property
    def locality(self) -> Tensor:
        """Sharpness of each head's position attention; not positive where a head has no centre. Shape: -> (nh,)"""
        return -self.position[:, 2]

    @property
    def centre(self) -> Tensor:
        """Offset (row, column) where each head's position attention peaks; NaN without a peak. Shape: -> (nh, 2)"""
        locality = self.locality[:, None]
        return torch.where(locality > 0, self.position[:, [1, 0]] / (2 * locality), math.nan)

    def axis_maps(self, grid_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return position attention along rows and along columns, softmax(v_pos . r). Shape: -> (nh, H, H), (nh, W, W)

        Source: ConViT eq. 4
        """
        dtype, device = geometry_dtype(self.position), self.position.device
        along_x, along_y, square = self.position.to(dtype).unbind(1)
        rows, columns = (axis_offsets(size, size, device=device, dtype=dtype) for size in grid_size)
        return quadratic_axis_attention(rows, along_y, square), quadratic_axis_attention(columns, along_x, square)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would pull to 0, and with them the centres and localities."""
        return {"position", "gate"} & set(self._parameters)


class PositionGates(TokenPositions):
    """Base of the layers that mix content and position attention: parameters `gate` and `position`, read per head.

    Source: ConViT eq. 4, 5 and 7
    """

    gate: nn.Parameter

    def set_gating(self, locality: float | None = None, gate: float | None = None) -> None:
        """Set the locality and the gate of every head; None leaves a parameter unchanged.

        Centres are unchanged; a head that has lost its centre (locality not positive) is centred on its initial tap
        again.

        Raises: ValueError if the locality is not above 0 and finite.
        """
        if locality is not None:
            if not 0 < locality < math.inf:
                raise ValueError(f"locality {locality} must be above 0 and finite")
            centre = self.centre.detach()
            self._set_position(torch.where(centre.isfinite(), centre, self.tap_offsets().to(centre)), locality)
        if gate is not None:
            nn.init.constant_(self.gate, gate)

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head: sigmoid(gate). Shape: -> (nh,)"""
        return torch.sigmoid(self.gate)
