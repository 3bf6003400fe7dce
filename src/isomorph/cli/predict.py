"""The predict command."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isomorph.cli.app import app, loading
from isomorph.cli.json_output import print_json
from isomorph.cli.options import CheckpointOptions, Device, Json, Model, Overwrite, Pretrained, Weights, check_limits
from isomorph.errors import UserError
from isomorph.terminal_tables import METRIC_FORMATS, print_table


@app.command
@check_limits
def predict(
    model: Model,
    /,
    *,
    image: Path,
    out: Path | None = None,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    device: Device = "auto",
    overwrite: Overwrite = False,
    json_: Json = False,
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
    _check_files(image, out)
    with loading():
        from isomorph.cli.open_models import open_given
        from isomorph.cli.prediction_files import planned_files, write_files
        from isomorph.distributed import open_runtime
        from isomorph.training.classification import CLASSIFICATION
        from isomorph.training.task import recorded_task
    net = open_given(model, checkpoint, weights, pretrained).to(open_runtime(device).device)
    prediction = (recorded_task(net) or CLASSIFICATION).predict(net, image)
    files = planned_files(prediction, out, overwrite) if out else {}
    write_files(files)
    if json_:
        print_json({"model": model, "image": str(image), "rows": prediction.rows, "files": list(map(str, files))})
        return
    print_table(_table(str(image), prediction.rows))
    for path in files:
        print(f"wrote {path}")


def _check_files(image: Path, out: Path | None) -> None:
    """Raise UserError for an image that does not exist, or is the file to write."""
    if not image.is_file():
        raise UserError(f"--image {image} does not exist" if not image.is_dir() else f"--image {image} is a folder")
    if out and out.exists() and out.samefile(image):
        raise UserError(f"--out {out} is the image itself; give another file")


def _table(title: str, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a table of predictions, which have the same keys."""
    if not rows:
        return [["", title], ["nothing", ""]]
    heads = [METRIC_FORMATS[name][0] if name in METRIC_FORMATS else name for name in rows[0]]
    return [heads, *([_cell(name, value) for name, value in row.items()] for row in rows)]


def _cell(name: str, value: Any) -> str:
    """Return a value as text: with its metric's format, numbers with three digits."""
    if name in METRIC_FORMATS and value is not None:
        return METRIC_FORMATS[name][1](value)
    if isinstance(value, list | tuple):
        return " ".join(_cell("", each) for each in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
