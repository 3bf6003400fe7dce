"""The sample and fid commands."""

from pathlib import Path
from typing import Literal

from isomorph.checkpoints.paths import require_new
from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show
from isomorph.errors import UserError
from isomorph.terminal_tables import metric_table


@opt.command
def sample(
    model: str,
    /,
    *,
    out: Path,
    images: opt.Count = 64,
    sampler: Literal["ancestral", "ddim"] = "ancestral",
    steps: opt.Count | None = None,
    seed: opt.Seed = 0,
    size: opt.Size = None,
    batch_size: opt.BatchSize = 64,
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
    """
    if out.suffix not in ("", ".png") or (out.exists() and out.is_dir() == bool(out.suffix)):
        raise UserError(f"--out {out} must be a file that ends in .png for a grid, or a folder")
    require_new(out, overwrite, "--out")
    with opt.loading():
        from isomorph.cli.open_models import open_given
        from isomorph.lab.distributed import open_runtime
        from isomorph.lab.tasks.diffusion.sampling import (
            check_replaceable,
            require_denoiser,
            write_folder,
            write_grid,
        )
        from isomorph.lab.tasks.diffusion.sampling import sample as generate
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
            size=size,
            progress=lambda done, total: update(done, total, "sampling"),
        )
    if out.suffix == ".png":
        write_grid(pixels, out)
    else:
        write_folder(pixels, out)
    made = {
        "out": str(out),
        "images": images,
        "sampler": sampler,
        "seed": seed,
        "size": list(pixels.shape[-2:]),
    }
    show(json_, made, f"wrote {out}: {images:,} images of {pixels.shape[-2]} x {pixels.shape[-1]}")


@opt.command
def fid(
    images: opt.Folder,
    /,
    *,
    data: str,
    root: opt.Root = None,
    test: opt.Flag = False,
    features: str = "inception",
    weights: opt.File | None = None,
    max_images: opt.Count | None = None,
    batch_size: opt.BatchSize = 100,
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Compare generated images with real ones: FID, KID, precision and recall, as torch-fidelity computes them.

    Example: isomorph fid samples --data cifar10

    Parameters
    ----------
    images
        Folder of generated images of one size, as `isomorph sample --out FOLDER` writes it.
    data
        The real images: a data source (cifar10, ...), a folder with train/ and val/, or any other folder, of which all
        images are taken. They are resized and cropped to the size of the generated ones, as for training.
    test
        Take the test images of the data instead of the training images.
    features
        inception, or another network by its timm name, checkpoint or run. Its distances are not FID and KID, and the
        result names the network.
    weights
        File with the weights of the features' network; without it, Inception's are downloaded.
    max_images
        Use only this many real images, evenly spaced.
    """
    with opt.loading():
        from isomorph.lab.distributed import open_runtime
        from isomorph.lab.tasks.diffusion import image_distance
    split: Literal["train", "test"] = "test" if test else "train"
    # before the network is opened, whose weights may have to be downloaded
    image_distance.open_folder(images)
    real = image_distance.open_real_images(data, split, root, max_images)
    extractor = image_distance.open_extractor(features, weights, open_runtime(device).device)
    with progress_bar("features") as update:
        found = image_distance.compare_folder(images, real, extractor, batch_size, update)
    source = "" if features == "inception" else f", features of {features}"
    result = {"generated": str(images), "data": data, "split": split, **found}
    show(json_, result, metric_table(f"{images}, {split} images of {data}{source}", found))
