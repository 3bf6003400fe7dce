"""The base class of the groups of recipe fields, and the types that several of them use."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)
from pydantic.fields import FieldInfo

Positive = Annotated[float, Field(gt=0)]
PartRate = Annotated[float, Field(gt=0, validate_default=True)]
"""Learning rate of a parameter group: a number, or a multiple of lr like `10x` (`OptimPart.resolve_multiple`)."""
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
File = Annotated[Path, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Epochs = Annotated[int, Field(ge=1, le=100_000)]
Size = Annotated[int, Field(ge=1, le=2**14)]


class Part(BaseModel):
    """Base class of the groups of fields."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @classmethod
    def documented_fields(cls, values: Any = None) -> dict[str, FieldInfo]:
        """Return the fields by name, as `--help` lists them; only those that fit the values, if these are given."""
        return cls.model_fields


def _as_list(value: Any) -> Any:
    """Return a single glob as a list, and a list unchanged."""
    return [value] if isinstance(value, str) else value


Globs = Annotated[list[str], BeforeValidator(_as_list)]
