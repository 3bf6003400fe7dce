"""The header of a saved model, from which it is rebuilt: its parts and their limits, as a file may come from anyone."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Json,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from isomorph.errors import UserError
from isomorph.models.model_kwargs import check_limits
from isomorph.surgery import EDIT_RULES, Edit

FORMAT = "isomorph-1"
_MAX_PART_LENGTH = 2**24
_MESSAGE_WIDTH = 60

_Size = Annotated[int, Field(ge=1, le=2**13)]
_FiniteNumber = Annotated[float, Field(ge=-1e6, le=1e6)]
_PositiveNumber = Annotated[float, Field(gt=0, le=1e6)]
_Count = Annotated[int, Field(ge=0, le=10**7)]
_ImageShape = tuple[_Size, _Size, _Size]
_CropPct = Annotated[float, Field(ge=0.05, le=10)]
_Fraction = Annotated[float, Field(gt=0, lt=1)]


# Arguments by which a network opens a file, fetches one, or runs its code: a user may give some, a file may not.
_OPENS_FILES = {
    "checkpoint_path",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_filter_fn",
    "cache_dir",
    "weights",
    "weights_backbone",
    "backbone_pretrained",
    "config",
    "file",
    "url",
    "hf_hub_id",
    "trust_remote_code",
    "auto_map",
    "name_or_path",
    "_name_or_path",
    "pretrained_model_name_or_path",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "quantization_config",
}
# What a path, an address or a name on the hub has, and no option of a network.
_LOCATION = re.compile(r"[/\\]|^[\w.-]+:|^~")


def check_foreign_kwargs(value: Any, where: str = "") -> None:
    """Raises: ValueError for an argument of a file, at any level, that may open another file, fetch one or run code."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, item in value.items():
            path = f"{where}.{name}".lstrip(".")
            if name in _OPENS_FILES and item:
                raise ValueError(
                    f"{path} is not allowed: a file may name no other file, repository or code"
                )
            check_foreign_kwargs(item, path)
    elif isinstance(value, str) and _LOCATION.search(value):
        raise ValueError(
            f"{where} is {value[:60]!r}: a file may name no other file, repository or code"
        )


def may_be_in_file(name: str, value: Any) -> bool:
    """True for an argument of timm.create_model that a file may give (`check_foreign_kwargs`)."""
    try:
        check_foreign_kwargs({name: value})
    except ValueError:
        return False
    return True


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _BaseSchema(_StrictModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: Annotated[str, Field(min_length=1, max_length=200)]
    num_classes: _Count | None = None
    in_chans: _Size | None = None

    @model_validator(mode="after")
    def check_arguments(self) -> "_BaseSchema":
        """Reject arguments with which a file could make the model read others or run code, or need endless memory."""
        for name, value in self.__pydantic_extra__.items():
            if name != "pretrained":  # never passed on: a file brings its own weights
                check_foreign_kwargs({name: value})
            check_limits(name, value)
        return self


class _ModuleSchema(_StrictModel):
    """The class of a model that timm cannot build; `load` is given such a module as its base."""

    class_: Annotated[str, Field(alias="class", max_length=1000)]


class _EditSchema(_StrictModel):
    rule: str
    fields: dict[str, JsonValue]
    names: list[str]


class _DataSchema(_StrictModel):
    """The images that the model expects, in tests `test_*`; `source` names the data set, `label_names` its classes.

    `split` is the fraction of a folder that training left out for testing, and the number of images in the folder.
    `task` is what the model was trained for, with its options, if that is not image classification.
    """

    input_size: _ImageShape | None = None
    mean: Annotated[tuple[_FiniteNumber, ...], Field(min_length=1, max_length=2**14)] | None = None
    std: Annotated[tuple[_PositiveNumber, ...], Field(min_length=1, max_length=2**14)] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = (
        None
    )
    crop_pct: _CropPct | None = None
    test_input_size: _ImageShape | None = None
    test_crop_pct: _CropPct | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    source: Annotated[str, Field(max_length=1000)] | None = None
    label_names: list[str] | None = None
    split: tuple[_Fraction, Annotated[int, Field(ge=1)]] | None = None
    task: dict[Annotated[str, Field(max_length=200)], JsonValue] | None = None


class _FidelitySchema(_StrictModel):
    model_config = ConfigDict(extra="forbid")

    output_sqnr: Annotated[float, Field(ge=-1e3, le=1e3)]
    agreement: Annotated[float, Field(ge=0, le=100)] | None = None
    images: Annotated[int, Field(ge=1)]


class _ArtefactSchema(_DataSchema):
    """What an exported file says about itself: its images, and the inputs and sizes that it takes."""

    isomorph_version: str
    architecture: str | None = None
    num_classes: _Count | None = None
    dynamic: list[Literal["batch", "size"]] = []
    size_multiple: _Size | None = None
    inputs: Annotated[list[str], Field(min_length=1, max_length=16)] | None = None
    length: Annotated[int, Field(ge=1, le=2**24)] | None = None
    quantization: str | None = None
    fidelity: _FidelitySchema | None = None


class _DecoderSchema(_StrictModel):
    model_config = ConfigDict(extra="forbid")

    depth: Annotated[int, Field(ge=0, le=100)]
    width: _Size
    heads: _Size
    mask: _Fraction
    normalise: bool


# keys of a pretrained_cfg that are saved with the weights
DATA_KEYS = tuple(_DataSchema.model_fields)


class _HeaderSchema(_StrictModel):
    """The parts of a header, each a text in JSON."""

    base: Json[_BaseSchema] | None = None
    module: Json[_ModuleSchema] | None = None
    edits: Json[list[_EditSchema]]
    data: Json[_DataSchema]
    autoencoder: Json[_DecoderSchema] | None = None


class Header(NamedTuple):
    """The checked parts of a header; it has either a base or a module."""

    base: dict[str, Any]
    edits: tuple[Edit, ...]
    data: dict[str, Any]
    autoencoder: dict[str, Any]
    module: dict[str, Any]


def parse_header(
    header: Mapping[str, str], origin: object, advice: str = "save the model again with iso.save"
) -> Header:
    """Return the parts of a header as plain values; `origin` is the file that messages name.

    Raises: UserError for a missing part, or a field of another type or size.
    """
    try:
        return _parse_parts(header)
    except UserError as error:
        raise UserError(f"cannot rebuild {origin}: in its header {error}; {advice}") from None


def parse_data(
    values: Mapping[str, JsonValue], origin: object, part: str = "data"
) -> dict[str, Any]:
    """Check the values on the images that a model or exported file expects. Raises: UserError for other values."""
    schema = _ArtefactSchema if part == "artefact" else _DataSchema
    try:
        parsed = schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(
            f"cannot read the metadata of {origin}: {describe_problems(error, part)}"
        ) from None
    except RecursionError as error:
        raise UserError(f"cannot read the metadata of {origin}: {error}") from None
    return {
        name: value
        for name, value in parsed.model_dump(exclude_unset=True).items()
        if value is not None
    }


def _parse_parts(header: Mapping[str, str]) -> Header:
    """Return the parts of a header. Raises: UserError for one that is missing, too long or invalid."""
    for name, text in header.items():
        if len(text) > _MAX_PART_LENGTH:
            raise UserError(f"{name} has more than {_MAX_PART_LENGTH:,} characters")
    try:
        parsed = _HeaderSchema.model_validate(dict(header))
    except ValidationError as error:
        raise UserError(describe_problems(error)) from None
    if parsed.base is None and parsed.module is None:
        raise UserError("base is missing")
    edits = tuple(_build_edit(edit, f"edits.{number}") for number, edit in enumerate(parsed.edits))
    plain = parsed.model_dump(exclude_unset=True, by_alias=True)
    base = dict(plain.get("base", {}))
    base.pop("pretrained", None)
    data = {name: value for name, value in plain["data"].items() if value is not None}
    return Header(base, edits, data, plain.get("autoencoder", {}), plain.get("module", {}))


def _build_edit(edit: _EditSchema, path: str) -> Edit:
    """Return an edit with its rule. Raises: UserError for an unknown rule or an invalid field."""
    rule = EDIT_RULES.get(edit.rule)
    if rule is None:
        raise UserError(
            f"{path}.rule is {_shorten(edit.rule)} and should be one of {', '.join(EDIT_RULES)}"
        )
    field_names = [field.name for field in dataclasses.fields(rule)]  # type: ignore[arg-type]
    for name in edit.fields:
        if name not in field_names:
            raise UserError(
                f"{path}.fields.{name} is not a field of {edit.rule}; it has {', '.join(field_names)}"
            )
    try:
        rule_built: Any = TypeAdapter(rule).validate_json(json.dumps(edit.fields), strict=True)
    except ValidationError as error:
        raise UserError(describe_problems(error, f"{path}.fields")) from None
    return Edit(rule_built, tuple(edit.names))


def describe_problems(error: ValidationError, part: str = "") -> str:
    """Return the first problem of a part in words, and the number of further ones."""
    first, *others = error.errors()
    field = ".".join(filter(None, [part, *map(str, first["loc"])])) or "all of it"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        text = f"{field}.{message}" if field == "base" else f"{field}: {message}"
    elif first["type"] == "json_invalid":
        text = f"{field} is not JSON ({message.removeprefix('Invalid JSON: ')})"
    elif first["type"] == "missing":
        text = f"{field} is missing"
    elif first["type"] == "extra_forbidden":
        text = f"{field} is not a field"
    else:
        wrong = message.removeprefix("Input ").removeprefix("String ")
        text = f"{field} is {_shorten(first['input'])} and {wrong}"
    if others:
        text += f" (and {len(others)} more)"
    return text


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MESSAGE_WIDTH else text[: _MESSAGE_WIDTH - 3] + "..."
