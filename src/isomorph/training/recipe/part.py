"""The base class of the groups of recipe fields, and the types that several of them use."""

from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
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
Globs = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Part(BaseModel):
    """Base class of the groups of fields."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @classmethod
    def documented_fields(cls, values: Any = None) -> dict[str, FieldInfo]:
        """Return the fields by name, as `--help` lists them; only those that fit the values, if these are given."""
        return cls.model_fields


def part_of(hint: Any) -> type[Part] | None:
    """Return the group of fields that a type stands for; None for the type of a single field."""
    kinds = [hint, *get_args(hint)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)), None)
