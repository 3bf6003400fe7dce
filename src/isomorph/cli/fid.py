"""The fid command."""

from pathlib import Path
from typing import Literal

from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show
from isomorph.errors import UserError
from isomorph.terminal_tables import metric_table


@opt.command
def fid(
    images: Path,
    /,
    *,
    data: str,
    root: opt.Root = None,
    test: opt.Flag = False,
    features: str = "inception",
    weights: Path | None = None,
    max_images: opt.MaxImages = None,
    batch_size: opt.WholeNumber = 100,
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
    batch_size
        Images per pass of the features' network.
    """
    if not images.is_dir():
        raise UserError(f"there is no folder {images}; `isomorph sample --out FOLDER` makes one of generated images")
    if weights and not weights.is_file():
        raise UserError(f"--weights {weights} does not exist")
    with opt.loading():
        from isomorph.distributed import open_runtime
        from isomorph.tasks.diffusion.image_distance import (
            compare_folder,
            open_extractor,
            open_folder,
            open_real_images,
        )
    split: Literal["train", "test"] = "test" if test else "train"
    open_folder(images)  # before the network is opened, whose weights may have to be downloaded
    real = open_real_images(data, split, root, max_images)
    extractor = open_extractor(features, weights, open_runtime(device).device)
    with progress_bar("features") as update:
        found = compare_folder(images, real, extractor, batch_size, update)
    source = "" if features == "inception" else f", features of {features}"
    result = {"generated": str(images), "data": data, "split": split, **found}
    show(json_, result, metric_table(f"{images}, {split} images of {data}{source}", found))
