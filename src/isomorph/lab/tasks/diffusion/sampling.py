"""Diffusion of images into noise, and images from a trained network, step by step from noise; files of them.

A network predicts the noise in images at time steps.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from isomorph.checkpoints.files import write_atomically
from isomorph.checkpoints.paths import move_into_place, must_be_new
from isomorph.errors import UserError, one_line
from isomorph.lab.data.loaders import batch_ranges
from isomorph.lab.distributed import derive_seed
from isomorph.layers.modes import eval_mode, require_finite
from isomorph.spec import ImageSize, spec_of
from isomorph.surgery import fuse, fusible_modules

Sampler = Literal["ancestral", "ddim"]
DDIM_STEPS = 50


@dataclass(frozen=True)
class NoiseSchedule:
    """Diffusion of images into noise in `time_steps` steps, whose variances beta rise linearly.

        x_t = sqrt(a_t) x + sqrt(1 - a_t) noise,  a_t = product over s <= t of (1 - beta_s)

    Source: Ho et al. (2020) eq. 4 and section 4

    >>> from isomorph.lab.tasks.diffusion import NoiseSchedule
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
        raise UserError(
            f"{name} does not predict the noise in images at time steps; give a ddpm_unet"
        )


@torch.no_grad()
def check_denoiser_size(model: nn.Module, size: tuple[int, ...]) -> None:
    """Raise UserError if the model does not take images of this size (channels, height, width)."""
    parameter = next(model.parameters())
    try:
        model(torch.zeros(1, *size, device=parameter.device, dtype=parameter.dtype), 0)
    except UserError:
        raise
    except (RuntimeError, ValueError) as error:
        sides = "x".join(map(str, size))
        raise UserError(f"the network does not take images of {sides}: {one_line(error)}") from None


def noise_schedule(model: nn.Module) -> NoiseSchedule:
    """Return the noise schedule that a network was trained with; the published one for a network of another program."""
    recorded = spec_of(model).task
    betas = {}
    for name in ("beta_start", "beta_end"):
        if name in recorded:
            betas[name] = float(recorded[name])
    return NoiseSchedule(int(model.time_steps), **betas)  # type: ignore[arg-type]


def sample(
    model: nn.Module,
    images: int,
    sampler: Sampler = "ancestral",
    steps: int | None = None,
    *,
    seed: int = 0,
    batch_size: int = 64,
    size: ImageSize | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Generate images with a diffusion model, from noise that depends on the seed and the number of the image alone.

    `ancestral` draws x_(t-1) from the model's mean and variance beta_t, by default in all time steps of the model;
    `ddim` is deterministic after the first noise, and takes 50 steps by default. The model is fused first, on its own
    device.

    Args:
        size: Height and width of the images; by default the model's own.
        progress: Called after every step with the number of network passes so far and in all.

    Shape: -> (images, C, H, W), uint8
    Source: Ho et al. (2020), algorithm 2, without clipping before the end; Song et al. (2021), eq. 12 with sigma = 0
    Raises: UserError for a model that does not predict noise, for a number of images or steps that
        is too small or too large, an unknown sampler, or a size that the model does not take; NotFinite for images with
        NaN or infinite values.

    >>> from isomorph.lab.tasks.diffusion import sample
    >>> net = timm.create_model("ddpm_unet", channels=(8, 8), blocks=1, groups=4, attention=(), time_steps=4)
    >>> sample(net, images=2, size=(8, 12)).shape
    torch.Size([2, 3, 8, 12])
    """
    require_denoiser(model, type(model).__name__)
    if images < 1 or batch_size < 1:
        raise UserError(
            f"{images} images in batches of {batch_size} cannot be sampled; give at least 1 of each"
        )
    schedule = noise_schedule(model)
    steps = check_steps(sampler, steps, schedule.time_steps)
    height, width = size or model.pretrained_cfg["input_size"][-2:]  # type: ignore[index]
    net = model
    if fusible_modules(model):
        with eval_mode(model):
            net = fuse(model, norms=False)
    shape = (int(model.in_chans), height, width)  # type: ignore[arg-type]
    batches = []
    passes = count(1)
    total = -(-images // batch_size) * steps
    with eval_mode(net):
        for numbers in batch_ranges(images, batch_size):
            x = denoise(
                net,
                numbers,
                shape,
                sampler,
                schedule,
                steps,
                seed,
                lambda: progress(next(passes), total),
            )
            levels = (x.float().clamp(-1, 1) + 1) * 127.5
            batches.append(levels.round().to(torch.uint8).cpu())
    return torch.cat(batches)


def check_steps(sampler: str, steps: int | None, time_steps: int) -> int:
    """Return the number of steps of a sampler. Raises: UserError for an unknown sampler, or another number of steps."""
    if sampler not in get_args(Sampler):
        raise UserError(
            f"the sampler {sampler!r} is unknown; choose {' or '.join(get_args(Sampler))}"
        )
    if steps is None:
        steps = time_steps
        if sampler == "ddim":
            steps = min(DDIM_STEPS, time_steps)
    if not 2 <= steps <= time_steps:
        raise UserError(f"{steps:,} steps are out of range; the model takes 2 to {time_steps:,}")
    return steps


def spaced_times(time_steps: int, steps: int) -> list[int]:
    return torch.linspace(time_steps - 1, 0, steps, dtype=torch.float64).round().int().tolist()


def next_images(
    x: Tensor,
    noise: Tensor,
    signal: tuple[float, float],
    sampler: str,
    generators: list[torch.Generator],
) -> Tensor:
    """Return the images of the next time step, given the noise predicted in those of this one.

    `signal` is a_t now and then, 1 after the last step. `ddim`: the image that the noise implies, with the same noise
    at the next time. `ancestral`: the model's mean, with new noise of variance 1 - a_now / a_then but in the end.

    Shape: (B, C, H, W), the same -> the same
    Source: Ho et al. (2020), algorithm 2; Song et al. (2021), eq. 12 with sigma = 0
    """
    now, then = signal
    if sampler == "ddim":
        image = (x - (1 - now) ** 0.5 * noise) / now**0.5
        return then**0.5 * image + (1 - then) ** 0.5 * noise
    beta = 1 - now / then
    mean = (x - beta / (1 - now) ** 0.5 * noise) / (1 - beta) ** 0.5
    if then == 1:
        return mean
    new = [torch.randn(x.shape[1:], generator=generator) for generator in generators]
    return mean + beta**0.5 * torch.stack(new).to(x)


@torch.no_grad()
def denoise(
    net: nn.Module,
    numbers: Sequence[int],
    shape: tuple[int, int, int],
    sampler: str,
    schedule: NoiseSchedule,
    steps: int,
    seed: int,
    after_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return images of these numbers, from about -1 to 1. Shape: (C, H, W) -> (B, C, H, W). Raises: NotFinite."""
    parameter = next(net.parameters())
    times = spaced_times(schedule.time_steps, steps)
    generators = []
    first = []
    for number in numbers:
        generator = torch.Generator().manual_seed(derive_seed("sample", seed, number))
        generators.append(generator)
        first.append(torch.randn(shape, generator=generator))
    x = torch.stack(first).to(parameter)
    signal = [*schedule.signal()[torch.tensor(times)].tolist(), 1.0]
    for t, (now, then) in zip(times, pairwise(signal), strict=True):
        noise = net(x, torch.full((len(x),), t, device=x.device))
        x = next_images(x, noise, (now, then), sampler, generators)
        after_step()
    require_finite(x)
    return x


def write_grid(images: Tensor, path: Path) -> None:
    """Write images as one PNG, in rows of a square. Shape: (N, C, H, W) uint8. Raises: UserError when it cannot."""
    columns = math.ceil(math.sqrt(len(images)))
    grid = make_grid(images, nrow=columns, padding=2, pad_value=255)  # (3, H, W)
    write_atomically(path, lambda file: to_pil_image(grid).save(file, format="PNG"))


def write_folder(images: Tensor, folder: Path) -> None:
    """Write each image (N, C, H, W, uint8) as 000000.png, ... in a new folder, which exists only once it is complete.

    Raises: UserError when it cannot be written, or a folder of this name, which is replaced, holds other files.
    """
    check_replaceable(folder)
    if folder.is_dir() and not must_be_new(folder):
        folder = folder.resolve()  # of a link, and of "."
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        for number, image in enumerate(images):
            to_pil_image(image).save(partial / f"{number:06d}.png")
        if folder.exists() and not must_be_new(folder):
            shutil.rmtree(folder)
        move_into_place(partial, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_replaceable(folder: Path) -> None:
    """Raise UserError for a folder that holds anything but numbered PNGs, which are those of an earlier call."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = [name for name in names if not re.fullmatch(r"\d{6,}\.png", name)]
    if others:
        raise UserError(
            f"{folder} holds other files, such as {others[0]}, and is not replaced; give another folder"
        )
