"""What a diffusion needs of a network: that it predicts the noise in images at time steps."""

import torch
from torch import nn

from isomorph.errors import UserError
from isomorph.tasks.diffusion.noise_schedule import NoiseSchedule
from isomorph.training.task import task_record


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
