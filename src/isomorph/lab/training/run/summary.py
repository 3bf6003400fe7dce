"""What a run's folder tells of a model that it trained: its recipe and its last metrics."""

import json
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_map

from isomorph.errors import UserError, short_reason
from isomorph.json_values import JsonObject
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.log import read_log
from isomorph.terminal_tables import METRIC_FORMATS, Row

# About the machine, or the paper's result.
_LOCAL_FIELDS: Any = {"out": True, "expected": True, "data": {"root"}}


def read_training(run: Path) -> tuple[JsonObject, dict[str, float]]:
    """Return a run's recipe, less its defaults, and its last metrics (of the folder and its model.safetensors only).

    Raises: UserError when there is no readable run.
    """
    folder = run if run.is_dir() else run.parent
    try:
        recipe = validate(json.loads((folder / "recipe.json").read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{run} does not belong to a run with a readable recipe.json ({short_reason(error)})"
        ) from None
    changed = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_LOCAL_FIELDS)
    rows = [row for row in read_log(folder / "log.jsonl") if METRIC_FORMATS.keys() & row.keys()]
    last: Row = {}
    if rows and (run.is_dir() or run.name == "model.safetensors"):
        last = rows[-1]
    metrics = {key: value for key, value in last.items() if key in METRIC_FORMATS or key == "epoch"}
    return {"name": recipe.name, **tree_map(_without_folders, changed)}, metrics


def _without_folders(value: Any) -> Any:
    """Return the last name of a path, which tells of this machine; other values as they are."""
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value
