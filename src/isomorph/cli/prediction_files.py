"""The files that `isomorph predict` writes."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from isomorph.checkpoints.files import write_atomically
from isomorph.errors import UserError
from isomorph.training.task import Prediction


def planned_files(prediction: Prediction, out: Path, overwrite: bool) -> dict[Path, Any]:
    """Return what to write to which file: `out` itself, and others next to it with their endings.

    Raises: UserError for another kind of file than the prediction has, or a file that exists without `overwrite`.
    """
    kinds = [ending for ending in prediction.files if ending.startswith(".")]
    if out.suffix not in kinds:
        raise UserError(f"--out {out} must end in {' or '.join(kinds)} for this model")
    files = {out.with_name(out.stem + ending): value for ending, value in prediction.files.items()}
    existing = [path for path in files if path.exists()]
    if existing and not overwrite:
        raise UserError(f"--out: {existing[0]} exists; give --overwrite to replace it, or another file")
    return files


def write_files(files: dict[Path, Any]) -> None:
    """Write pictures and plain values, each completely or not at all. Raises: UserError when one cannot be written."""
    for path, value in files.items():
        if isinstance(value, Image.Image):
            write_atomically(path, lambda file, value=value: value.save(file, format="PNG"))  # type: ignore[misc]
        else:
            text = json.dumps(value, indent=1)
            write_atomically(path, lambda file, text=text: file.write_text(text))  # type: ignore[misc]
