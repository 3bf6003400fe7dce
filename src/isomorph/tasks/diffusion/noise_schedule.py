"""The noise schedule of a diffusion, and the networks that fit one: they predict the noise in images at time steps."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.training.task import task_record


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


def require_denoiser(model: nn.Module, name: str) -> None:
    """Raise UserError for a model that does not predict the noise in images at time steps."""
    if not isinstance(getattr(model, "time_steps", None), int):
        raise UserError(f"{name} does not predict the noise in images at time steps; give a ddpm_unet")


@torch.no_grad()
def check_denoiser_size(model: nn.Module, size: tuple[int, ...]) -> None:
    """Raise UserError if the model does not take images of this size (channels, height, width)."""
    parameter = next(model.parameters())
    try:
        model(torch.zeros(1, *size, device=parameter.device, dtype=parameter.dtype), 0)
    except UserError:
        raise
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the network does not take images of {'x'.join(map(str, size))}: {reason}") from None


def noise_schedule(model: nn.Module) -> NoiseSchedule:
    """Return the noise schedule that a network was trained with; the published one for a network of another program."""
    recorded = task_record(model)
    betas = {name: float(recorded[name]) for name in ("beta_start", "beta_end") if name in recorded}
    return NoiseSchedule(int(model.time_steps), **betas)  # type: ignore[arg-type]
