"""Checkpoint files: written completely or not at all, read without running code; a header may come from anyone."""

import argparse
import dataclasses
import datetime
import json
import os
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, Json, JsonValue, TypeAdapter, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from timm.models import is_model
from torch import Tensor
from torch.serialization import add_safe_globals, get_safe_globals, safe_globals

from isomorph.checkpoints.paths import move_into_place
from isomorph.errors import UserError
from isomorph.models.model_kwargs import largest_allowed
from isomorph.surgery import EDIT_RULES, Edit


def write_atomically(path: Path, write: Callable[[Path], object], new: bool = False) -> None:
    """Call `write` on a temporary file, flush it to disk and rename it, so that readers see the old or the new file.

    Raises: UserError when the file cannot be written, or must be `new` and exists; the old file is then unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        move_into_place(partial, path, new)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder; no other process may write there."""
    with suppress(OSError):
        for path in filter(Path.is_file, folder.glob(".*.[0-9]*.partial")):
            path.unlink(missing_ok=True)


_PATH_CLASSES = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
# Classes of values that training scripts write next to the weights: building one runs no code of the file.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    types.SimpleNamespace,
    datetime.datetime,
    datetime.date,
    datetime.timedelta,
    *((pure, f"{module}.{name}") for name, pure in _PATH_CLASSES.items() for module in ("pathlib", "pathlib._local")),
    PurePosixPath,
    PureWindowsPath,
    *((np._core.multiarray.scalar, f"{module}.scalar") for module in _NUMPY_MODULES),  # type: ignore[attr-defined]
    np.dtype,
    *dict.fromkeys(type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDUS"),
]
# How torch.load names the class or function that it does not build.
_REJECTED = re.compile(r"GLOBAL ([\w.]+)|(?:but got|function|class) <(?:class|function) '?([\w.]+)")


def unpickle(path: Path) -> Any:
    """Return the content of a PyTorch file: tensors, plain values and harmless classes such as argparse.Namespace.

    Raises: UserError when it is damaged, or holds a class that could run code.
    """
    allowed = get_safe_globals()
    try:
        with safe_globals(_HARMLESS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for a damaged file
        raise _explain(path, error) from None
    finally:
        add_safe_globals(allowed)  # safe_globals also removes those that the program had added before


def _explain(path: Path, error: Exception) -> UserError:
    text = " ".join(str(error).split())
    if rejected := _REJECTED.search(text):
        return UserError(
            f"cannot read checkpoint {path}: it holds a {rejected[1] or rejected[2]}, and building one could run code. "
            "In the program that wrote the file, save the weights alone: torch.save(model.state_dict(), 'weights.pth')"
        )
    reason = "" if isinstance(error, KeyError) else f" ({short_reason(error)})"  # a number of no meaning to the user
    return UserError(
        f"cannot read checkpoint {path}{reason}; it may be truncated or of another format; give "
        "a file written by torch.save or safetensors"
    )


def short_reason(error: Exception) -> str:
    """Return the first sentence of an error, with its type if it is a single word."""
    line = next(iter(str(error).splitlines()), "").partition(". ")[0]
    return line if " " in line else f"{type(error).__name__} {line}".strip()


# Entries of training checkpoints that hold the model's tensors, averaged over training (EMA) or as they were last.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "ema_model", "params_ema")
_LAST = ("state_dict", "model_state_dict", "model", "net", "module", "weights", "params")
# Those of training without labels, where the teacher is the average of the student; next to others it is another model.
_PAIR = ("teacher", "student")


class Contents(NamedTuple):
    """What a checkpoint holds: tensors by name, and what was written next to them.

    `header` is the metadata of a safetensors file, `settings` are the arguments of the training script, if it saved
    them. `notes` says which of several weights were chosen, if there was a choice.
    """

    path: Path
    tensors: dict[str, Any]
    header: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """True for a file that isomorph wrote, whose header rebuilds the model; others have the format "pt"."""
        return is_own(self.header)


def is_own(header: Mapping[str, str]) -> bool:
    """True for the header of a file that isomorph wrote."""
    return header.get("format", "").startswith("isomorph")


def read_header(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises: UserError when it cannot be read."""
    return _read_safetensors(path, tensors=False)[1]


def _read_safetensors(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise UserError(_describe_missing(path))
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys() if tensors else ()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except Exception as error:  # safetensors raises many types for a damaged file
        raise UserError(f"cannot read checkpoint {path} ({short_reason(error)}); it may be truncated") from None


def _describe_missing(path: Path) -> str:
    if not path.is_dir():
        if not path.suffix and is_model(str(path)):
            return f"{path} is a timm model, not a checkpoint; give a checkpoint or the folder of a run"
        return f"there is no checkpoint {path}"
    inside = path / "model.safetensors"
    return f"{path} is a folder, not a checkpoint" + f"; give {inside}" * inside.is_file()


def read_contents(path: Path, ema: bool = True) -> Contents:
    """Return the tensors of a safetensors or PyTorch file, and what is next to them; no code in it is run.

    Averaged weights (EMA) are taken where the file has any; with `ema=False`, the last ones.

    Raises: UserError when the file is missing, damaged, or holds no tensors by name.
    """
    if path.suffix.lower() == ".safetensors":
        return Contents(path, *_read_safetensors(path))
    if not path.is_file():
        raise UserError(_describe_missing(path))
    held = unpickle(path)
    if not isinstance(held, Mapping):
        raise UserError(
            f"checkpoint {path} holds a {type(held).__name__}, not a dictionary of tensors; save model.state_dict()"
        )
    if not all(isinstance(name, str) for name in held):
        raise UserError(f"checkpoint {path} holds tensors without names; save model.state_dict(), which names them")
    return _choose_tensors(path, held, ema)


def _choose_tensors(path: Path, held: Mapping[str, Any], ema: bool) -> Contents:
    settings = held.get("args", held.get("hyper_parameters"))
    settings = dict(settings if isinstance(settings, Mapping) else getattr(settings, "__dict__", {}))
    if isinstance(held.get("arch"), str):
        settings.setdefault("model", held["arch"])
    known = [key for key in (*_AVERAGED, *_LAST, *_PAIR) if _holds_tensors(held.get(key))]
    entries = [key for key in known if key not in _PAIR] or known
    if not entries:
        if not _holds_tensors(held, depth=0):
            found = "the state of an optimiser" if "param_groups" in held else ", ".join(list(held)[:6]) or "nothing"
            raise UserError(f"{path} holds no weights, only {found}; give a file with the model's state_dict")
        return Contents(path, dict(held), settings=settings)
    last = [key for key in entries if key in (*_LAST, "student")]
    chosen = (entries if ema or not last else last)[0]
    notes: tuple[str, ...] = ()
    if other := next((key for key in entries if (key in last) != (chosen in last)), ""):
        averaged = f"averaged weights (EMA, {chosen}); --no-ema (ema=False) takes {other}"
        newest = f"last weights ({chosen}); --ema (ema=True) takes the average, {other}"
        notes = (f"{path.name}: {newest if chosen in last else averaged}",)
    inner = _choose_tensors(path, held[chosen], ema)
    return Contents(path, inner.tensors, {}, settings, notes or inner.notes)


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    """True for a dictionary of tensors by name, or one that holds it in one of the entries above, `depth` levels in."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    within = depth and any(_holds_tensors(value.get(key), depth - 1) for key in (*_AVERAGED, *_LAST, *_PAIR))
    return within or any(isinstance(each, Tensor) for each in value.values())


_WRAPPERS = ("module.", "model.", "backbone.")  # which DistributedDataParallel and training modules add to all names
_COMPILED = "_orig_mod."
_PROJECTIONS = ("dino_head.", "ibot_head.", "head.mlp.", "head.last_layer")  # next to the backbone, in DINO's training


def strip_wrappers(tensors: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Remove the prefixes of DistributedDataParallel, torch.compile and training modules, but those of `own` names."""
    stripped = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}  # of AveragedModel
    if not any(_COMPILED in name for name in own):
        stripped = {name.replace(_COMPILED, ""): tensor for name, tensor in stripped.items()}
    while stripped:
        trained = any(name.startswith("backbone.") for name in stripped)
        known = [name for name in stripped if not (trained and name.startswith(_PROJECTIONS))]
        prefix = next((p for p in _WRAPPERS if all(name.startswith(p) for name in known)), None)
        if prefix is None or any(name.startswith(prefix) for name in own):
            break
        stripped = {name.removeprefix(prefix): stripped[name] for name in known}
    return stripped


FORMAT = "isomorph-1"
_MAX_PART_LENGTH = 2**24
_MESSAGE_WIDTH = 60

_Size = Annotated[int, Field(ge=1, le=2**13)]
_FiniteNumber = Annotated[float, Field(ge=-1e6, le=1e6)]
_PositiveNumber = Annotated[float, Field(gt=0, le=1e6)]


# Arguments by which a network opens a file, fetches one, or runs its code: a user may give some, a file may not.
_OPENS_FILES = {
    *("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_filter_fn"),
    *("cache_dir", "weights", "weights_backbone", "backbone_pretrained", "config", "file", "url", "hf_hub_id"),
    *("trust_remote_code", "auto_map", "name_or_path", "_name_or_path", "pretrained_model_name_or_path"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "quantization_config"),
}
# What a path, an address or a name on the hub has, and no option of a network.
_LOCATION = re.compile(r"[/\\]|^[\w.-]+:|^~")


def check_foreign_kwargs(value: Any, where: str = "") -> None:
    """Raises: ValueError for an argument of a file, at any level, that may open another file, fetch one or run code."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, each in value.items():
            place = f"{where}.{name}".lstrip(".")
            if name in _OPENS_FILES and each:
                raise ValueError(f"{place} is not allowed: a file may name no other file, repository or code")
            check_foreign_kwargs(each, place)
    elif isinstance(value, str) and _LOCATION.search(value):
        raise ValueError(f"{where} is {value[:60]!r}: a file may name no other file, repository or code")


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
    num_classes: Annotated[int, Field(ge=0, le=10**7)] | None = None
    in_chans: _Size | None = None

    @model_validator(mode="after")
    def check_arguments(self) -> "_BaseSchema":
        check_foreign_kwargs({key: x for key, x in self.__pydantic_extra__.items() if key != "pretrained"})
        for name, value in self.__pydantic_extra__.items():
            limit = largest_allowed(name)
            if not (number := _max_magnitude(value)) <= limit:
                raise ValueError(f"{name} holds {number:.6g} and should not be above {limit:,}")
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

    input_size: tuple[_Size, _Size, _Size] | None = None
    mean: Annotated[tuple[_FiniteNumber, ...], Field(min_length=1, max_length=2**14)] | None = None
    std: Annotated[tuple[_PositiveNumber, ...], Field(min_length=1, max_length=2**14)] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = None
    crop_pct: Annotated[float, Field(ge=0.05, le=10)] | None = None
    test_input_size: tuple[_Size, _Size, _Size] | None = None
    test_crop_pct: Annotated[float, Field(ge=0.05, le=10)] | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    source: Annotated[str, Field(max_length=1000)] | None = None
    label_names: list[str] | None = None
    split: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[int, Field(ge=1)]] | None = None
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
    num_classes: Annotated[int, Field(ge=0, le=10**7)] | None = None
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
    mask: Annotated[float, Field(gt=0, lt=1)]
    normalise: bool


DATA_KEYS = tuple(_DataSchema.model_fields)  # keys of a pretrained_cfg that are saved with the weights


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


def parse_header(header: Mapping[str, str], whose: object, todo: str = "save the model again with iso.save") -> Header:
    """Return the parts of a header as plain values; `whose` and `todo` are the file and the advice in messages.

    Raises: UserError for a missing part, or a field of another type or size.
    """
    try:
        return _parse_parts(header)
    except UserError as error:
        raise UserError(f"cannot rebuild {whose}: in its header {error}; {todo}") from None


def parse_data(values: Mapping[str, JsonValue], whose: object, part: str = "data") -> dict[str, Any]:
    """Check the values on the images that a model or exported file expects. Raises: UserError for other values."""
    schema = _ArtefactSchema if part == "artefact" else _DataSchema
    try:
        found = schema.model_validate_json(json.dumps(values))
    except (ValidationError, RecursionError) as error:
        problem = describe_problems(error, part) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"cannot read the metadata of {whose}: {problem}") from None
    return {name: value for name, value in found.model_dump(exclude_unset=True).items() if value is not None}


def _parse_parts(header: Mapping[str, str]) -> Header:
    if longest := next((name for name, text in header.items() if len(text) > _MAX_PART_LENGTH), None):
        raise UserError(f"{longest} has more than {_MAX_PART_LENGTH:,} characters")
    try:
        found = _HeaderSchema.model_validate(dict(header))
    except ValidationError as error:
        raise UserError(describe_problems(error)) from None
    if found.base is None and found.module is None:
        raise UserError("base is missing")
    made = tuple(_build_edit(edit, f"edits.{number}") for number, edit in enumerate(found.edits))
    plain = found.model_dump(exclude_unset=True, by_alias=True)
    base = {name: value for name, value in plain.get("base", {}).items() if name != "pretrained"}
    data = {name: value for name, value in plain["data"].items() if value is not None}
    return Header(base, made, data, plain.get("autoencoder", {}), plain.get("module", {}))


def _build_edit(edit: _EditSchema, place: str) -> Edit:
    rule = EDIT_RULES.get(edit.rule)
    if rule is None:
        raise UserError(f"{place}.rule is {_shorten(edit.rule)} and should be one of {', '.join(EDIT_RULES)}")
    known = [field.name for field in dataclasses.fields(rule)]  # type: ignore[arg-type]
    for name in edit.fields:
        if name not in known:
            raise UserError(f"{place}.fields.{name} is not a field of {edit.rule}; it has {', '.join(known)}")
    try:
        made: Any = TypeAdapter(rule).validate_json(json.dumps(edit.fields), strict=True)
    except ValidationError as error:
        raise UserError(describe_problems(error, f"{place}.fields")) from None
    return Edit(made, tuple(edit.names))


def describe_problems(error: ValidationError, part: str = "") -> str:
    """Return the first problem of a part in words, and the number of further ones."""
    first, *others = error.errors()
    field = ".".join(filter(None, [part, *map(str, first["loc"])])) or "all of it"
    message = first["msg"].removeprefix("Value error, ")
    kinds = {"missing": "is missing", "extra_forbidden": "is not a field"}
    if first["type"] == "value_error":
        said = f"{field}.{message}" if field == "base" else f"{field}: {message}"
    elif first["type"] == "json_invalid":
        said = f"{field} is not JSON ({message.removeprefix('Invalid JSON: ')})"
    else:
        wrong = f"is {_shorten(first['input'])} and {message.removeprefix('Input ').removeprefix('String ')}"
        said = f"{field} {kinds.get(first['type'], wrong)}"
    return said + (f" (and {len(others)} more)" if others else "")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MESSAGE_WIDTH else text[: _MESSAGE_WIDTH - 3] + "..."


def _max_magnitude(value: JsonValue) -> float:
    """Return the largest absolute number or list length in a plain value; NaN counts as infinite."""
    if isinstance(value, Mapping):
        return max(map(_max_magnitude, value.values()), default=0)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return max(len(value), *map(_max_magnitude, value), 0)
    if not isinstance(value, int | float):
        return 0
    return float("inf") if value != value else abs(value)
