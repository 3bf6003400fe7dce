"""The predict command."""

import json
from pathlib import Path
from typing import Any

from isomorph.checkpoints.paths import require_new
from isomorph.cli import options as opt
from isomorph.cli.output import show
from isomorph.errors import UserError
from isomorph.terminal_tables import row_table


@opt.command
def predict(
    model: opt.Model,
    /,
    *,
    image: Path,
    out: Path | None = None,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    device: opt.Device = "auto",
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Predict one image: the five likeliest classes, a class for every pixel, or the objects in it.

    What is predicted is what the model was trained for. Example: isomorph predict runs/camvid --image x.jpg --out y.png

    Parameters
    ----------
    image
        File of the image.
    out
        File for the image with the prediction drawn over it (.png); further files are written next to it: y-mask.png
        with the number of the class of every pixel, y.json with the objects. For a classifier a .json file. By default
        nothing is written.
    """
    if not image.is_file():
        raise UserError(f"--image {image} does not exist" if not image.is_dir() else f"--image {image} is a folder")
    if out and out.exists() and out.samefile(image):
        raise UserError(f"--out {out} is the image itself; give another file")
    with opt.loading():
        from isomorph.cli.open_models import open_given
        from isomorph.distributed import open_runtime
        from isomorph.training.classification import CLASSIFICATION
        from isomorph.training.task import recorded_task
    net = open_given(model, opening).to(open_runtime(device).device)
    prediction = (recorded_task(net) or CLASSIFICATION).predict(net, image)
    files = _planned_files(prediction.files, out, overwrite) if out else {}
    for path, value in files.items():
        _write(path, value)
    found = {"model": model, "image": str(image), "rows": prediction.rows, "files": list(map(str, files))}
    table = row_table(prediction.rows) if prediction.rows else [["", str(image)], ["nothing", ""]]
    show(json_, found, table, *(f"wrote {path}" for path in files))


def _planned_files(values: dict[str, Any], out: Path, overwrite: bool) -> dict[Path, Any]:
    """Return what to write to which file: `out` itself, and others next to it with their endings.

    Raises: UserError for another kind of file than the prediction has, or a file that exists without `overwrite`.
    """
    kinds = [ending for ending in values if ending.startswith(".")]
    if out.suffix not in kinds:
        raise UserError(f"--out {out} must end in {' or '.join(kinds)} for this model")
    files = {out.with_name(out.stem + ending): value for ending, value in values.items()}
    for path in files:
        require_new(path, overwrite, "--out")
    return files


def _write(path: Path, value: Any) -> None:
    """Write an image or plain values, completely or not at all. Raises: UserError when it cannot be written."""
    from PIL import Image

    from isomorph.checkpoints.files import write_atomically

    if isinstance(value, Image.Image):
        write_atomically(path, lambda file: value.save(file, format="PNG"))
    else:
        write_atomically(path, lambda file: file.write_text(json.dumps(value, indent=1)))
