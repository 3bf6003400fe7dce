"""The noise schedule of a diffusion: how much noise an image has at each time step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseSchedule:
    """Diffusion of images into noise in `time_steps` steps, whose variances beta rise linearly.

        x_t = sqrt(a_t) x + sqrt(1 - a_t) noise,  a_t = product over s <= t of (1 - beta_s)

    Source: Ho et al. (2020) eq. 4 and section 4

    >>> from isomorph.tasks.diffusion import NoiseSchedule
    >>> round(NoiseSchedule(time_steps=1000).signal()[-1].item(), 6)
    4e-05
    """

    time_steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02

    def signal(self) -> Tensor:
        """Return a_t, the part of the image's variance that is left, in float64. Shape: -> (time_steps,)"""
        betas = torch.linspace(self.beta_start, self.beta_end, self.time_steps, dtype=torch.float64)
        return (1 - betas).cumprod(0)

    def add_noise(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return images x at time steps t. Shape: (B, C, H, W), the same, (B,) -> (B, C, H, W)"""
        signal = self.signal()
        factors = torch.stack([signal.sqrt(), (1 - signal).sqrt()]).to(x)[:, t]  # (2, B)
        kept, added = factors[..., None, None, None]
        return kept * x + added * noise
