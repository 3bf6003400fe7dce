"""The fid command."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from isomorph.cli.app import app, loading
from isomorph.cli.json_output import print_json
from isomorph.cli.options import Device, Json, MaxImages, Root, WholeNumber, check_limits
from isomorph.errors import UserError
from isomorph.terminal_tables import metric_table, print_table


@app.command
@check_limits
def fid(
    images: Path,
    /,
    *,
    data: str,
    root: Root = None,
    test: Annotated[bool, Parameter(negative="")] = False,
    features: str = "inception",
    weights: Path | None = None,
    max_images: MaxImages = None,
    batch_size: WholeNumber = 100,
    cache: Path | None = None,
    device: Device = "auto",
    json_: Json = False,
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
    cache
        Folder in which the features of real images are stored; by default isomorph/features below $XDG_CACHE_HOME or
        ~/.cache.
    """
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size} must be at least 1")
    if not images.is_dir():
        raise UserError(f"there is no folder {images}; `isomorph sample --out FOLDER` makes one of generated images")
    if weights and not weights.is_file():
        raise UserError(f"--weights {weights} does not exist")
    with loading():
        from isomorph.cli.progress import progress_bar
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
        found = compare_folder(images, real, extractor, batch_size, cache, update)
    result: dict[str, Any] = {"generated": str(images), "data": data, "split": split, **found}
    if json_:
        print_json(result)
    else:
        source = "" if features == "inception" else f", features of {features}"
        print_table(metric_table(f"{images}, {split} images of {data}{source}", found))
