"""Schema of a snapshot's values other than tensors (state.json)."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isomorph.errors import UserError

_Count = Annotated[int, Field(ge=0)]
_Number = bool | int | float


class _ClosedSchema(BaseModel):
    """Base of schemas that reject unknown fields and other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RunProgress(_ClosedSchema):
    """Progress of a run: finished steps, closed (evaluated and logged) epochs, and their metrics."""

    step: _Count = 0
    closed: _Count = 0
    recast: bool = True
    metrics: dict[str, int | float] = {}
    best: float = -math.inf
    unreadable: list[str] = []
    first_loss: float | None = None
    seconds: float = 0.0


class OptimizerValues(_ClosedSchema):
    """The optimiser's values that are not tensors, by parameter and key, and by group and option."""

    state: dict[str, dict[str, _Number]]
    groups: dict[str, dict[str, _Number]]


class DataCounts(_ClosedSchema):
    """Numbers of images, steps and classes of a run's data."""

    images: _Count
    steps: _Count
    classes: _Count


class SnapshotValues(_ClosedSchema):
    """The content of state.json. `model` is the header that rebuilds it, `digest` that of all other values."""

    step: _Count
    files: dict[str, str]
    optimizer: OptimizerValues
    recipe: dict[str, Any]
    progress: RunProgress
    lanes: _Count
    data: DataCounts
    model: dict[str, str]
    digest: str


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all values except the digest itself, as JSON with sorted keys."""
    rest = {name: value for name, value in values.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def parse_values(text: str) -> dict[str, Any]:
    """Return the values of a state.json. Raises: UserError when they are not as written."""
    try:
        found = json.loads(text)
        digest = digest_of(found) if isinstance(found, dict) else ""
        values = SnapshotValues.model_validate(found)
    except ValidationError as error:
        raise UserError(f"not the state of a run: {_first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"not readable JSON ({' '.join(str(error).split())})") from None
    if values.digest != digest:
        raise UserError("not what was written: its SHA-256 differs from the one it holds")
    if values.progress.step != values.step:
        raise UserError(f"not the state of a run: step {values.step}, progress.step {values.progress.step}")
    return values.model_dump()


def _first_problem(error: ValidationError) -> str:
    """Return the first problem in words: the field and what is wrong with it."""
    problem = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, problem["loc"])) or "all of it"
    return f"{field} is missing" if problem["type"] == "missing" else f"{field}: {problem['msg'][:120].lower()}"
