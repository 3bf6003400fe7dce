"""The sample command."""

from pathlib import Path
from typing import Literal

from isomorph.checkpoints.paths import require_new
from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show
from isomorph.errors import UserError

MAX_GRID = 4096
"""Largest number of images in one grid."""


@opt.command
def sample(
    model: str,
    /,
    *,
    out: Path,
    images: opt.WholeNumber = 64,
    sampler: Literal["ancestral", "ddim"] = "ancestral",
    steps: opt.WholeNumber | None = None,
    seed: opt.WholeNumber = 0,
    size: opt.Sizes = None,
    batch_size: opt.WholeNumber = 64,
    device: opt.Device = "auto",
    overwrite: opt.Overwrite = False,
    checkpoint: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    json_: opt.Json = False,
) -> None:
    """Generate images with a diffusion model, as a grid in one PNG or as a folder of PNGs.

    Example: isomorph sample runs/ddpm_cifar10 --images 64 --out grid.png

    Parameters
    ----------
    model
        The folder of a run of the task diffusion, or a checkpoint of a ddpm_unet.
    out
        A file NAME.png for a grid, or a folder for one file per image, for example for `isomorph fid`.
    images
        Number of images.
    sampler
        ancestral: the model's random steps (Ho et al.); ddim: fewer steps, without noise (Song et al.).
    steps
        Number of steps; by default all time steps of the model for ancestral, 50 for ddim.
    seed
        Seed of the noise. Image N of a seed is the same for every number of images and batch size.
    size
        Height and width of the images; by default those that the model was trained on.
    batch_size
        Images that are generated at the same time.
    """
    _check_out(out, images, overwrite)
    height_width = opt.only_size(size)
    with opt.loading():
        from isomorph.cli.open_models import open_given
        from isomorph.distributed import open_runtime
        from isomorph.tasks.diffusion.sampling import check_replaceable, require_denoiser, write_folder, write_grid
        from isomorph.tasks.diffusion.sampling import sample as generate
    target = open_runtime(device).device
    net = open_given(model, checkpoint)
    require_denoiser(net, model)
    if out.is_dir():
        check_replaceable(out)
    with progress_bar("sampling") as update:
        pixels = generate(
            net.to(target),
            images,
            sampler,
            steps,
            seed=seed,
            batch_size=batch_size,
            size=height_width,
            progress=lambda done, total: update(done, total, "sampling"),
        )
    (write_grid if out.suffix == ".png" else write_folder)(pixels, out)
    made = {"out": str(out), "images": images, "sampler": sampler, "seed": seed, "size": list(pixels.shape[-2:])}
    show(json_, made, f"wrote {out}: {images:,} images of {pixels.shape[-2]} x {pixels.shape[-1]}")


def _check_out(out: Path, images: int, overwrite: bool) -> None:
    """Raise UserError for an --out that exists or is neither a PNG nor a folder, or for too many images in one."""
    if out.suffix not in (".png", ""):
        raise UserError(f"--out {out} must end in .png for a grid, or have no ending for a folder")
    if out.suffix and images > MAX_GRID:
        raise UserError(f"--images {images:,} are too many for one grid, at most {MAX_GRID:,}; give a folder as --out")
    if out.suffix and out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file in it, or a name without .png")
    if not out.suffix and out.is_file():
        raise UserError(f"--out {out} is a file; give a folder")
    require_new(out, overwrite, "--out")
