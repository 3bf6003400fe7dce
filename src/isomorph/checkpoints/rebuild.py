"""Headers that describe how to rebuild a model: its timm base, the edits made on it, and the images it expects."""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from timm.models._input import get_model_args
from torch import Tensor, nn

from isomorph.checkpoints.header import DATA_KEYS, FORMAT, parse_header
from isomorph.checkpoints.same_network import find_difference
from isomorph.checkpoints.unpickle import short_reason
from isomorph.errors import UserError
from isomorph.evaluation.class_names import label_names
from isomorph.evaluation.input_sizes import built_size
from isomorph.models import create
from isomorph.surgery import EDIT_RULES, Edit, Fuse, edits, replay
from isomorph.surgery.joint_projections import joint_candidates

_ALWAYS_ALLOWED_NUMEL = 2**20
"""Models of up to this many numbers are built however small their file is."""
T = TypeVar("T", bound=nn.Module)


def describe_edits(made: tuple[Edit, ...]) -> list[dict[str, Any]]:
    """Return edits as plain values. Raises: UserError for a rule that is not registered."""
    for edit in made:
        if EDIT_RULES.get(type(edit.rule).__name__) is not type(edit.rule):
            raise UserError(f"{type(edit.rule).__name__} is not a rule of isomorph: a checkpoint could not replay it")
    return [
        {"rule": type(edit.rule).__name__, "fields": dataclasses.asdict(edit.rule), "names": list(edit.names)}  # type: ignore[call-overload]
        for edit in made
    ]


def _describe_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments with which timm would create the model as it is now, those that JSON can hold.

    timm keeps those of changes such as reset_classifier too, but leaves out dropout rates.
    """
    given = getattr(model, "_model_args", {})
    return {name: value for name, value in {**given, **get_model_args(model)}.items() if _is_json_value(value)}


def _is_json_value(value: Any) -> bool:
    """True if JSON can hold a value."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def describe_base(model: nn.Module) -> dict[str, Any]:
    """Return the timm.create_model arguments of the model before its edits.

    They are those of `record_base`, else name, number of classes and input channels.
    """
    recorded = getattr(model, "isomorph_base", None)
    if recorded:
        return recorded
    config = getattr(model, "pretrained_cfg", None) or {}
    if not config.get("architecture"):
        raise UserError(f"{type(model).__name__} does not come from timm.create_model; give save() its base")
    return {
        "name": config["architecture"],
        "num_classes": getattr(model, "num_classes", None),
        "in_chans": getattr(model, "in_chans", 3),
    }


def record_base(model: nn.Module, base: dict[str, Any]) -> nn.Module:
    """Record on the model the timm.create_model arguments of its base, for `save`."""
    model.isomorph_base = {key: value for key, value in base.items() if key != "pretrained"}  # type: ignore[assignment]
    return model


def describe_data(model: nn.Module) -> dict[str, Any]:
    """Return the images that the model expects, from its pretrained_cfg, at the size that it was built for.

    Class names are left out where `label_names` takes them for those of other weights.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    data = {key: config[key] for key in DATA_KEYS if config.get(key) is not None}
    if not label_names(model):
        data.pop("label_names", None)
    size = built_size(model)
    return data | ({"input_size": (data["input_size"][0], *size)} if size and "input_size" in data else {})


def record_data(model: nn.Module, data: dict[str, Any]) -> None:
    """Record the images that the model expects in its pretrained_cfg, where timm's resolve_data_config reads them."""
    config = getattr(model, "pretrained_cfg", None) or {}
    of_old_weights = ("test_input_size", "test_crop_pct", "label_names", "split", "task")
    config = {key: value for key, value in config.items() if key not in of_old_weights}
    model.pretrained_cfg = model.default_cfg = config | {k: v for k, v in data.items() if k in DATA_KEYS}  # type: ignore[assignment]
    if "input_size" in data:
        model.isomorph_trained_size = True  # type: ignore[assignment]


def rebuild(base: dict[str, Any], recorded: Sequence[Edit]) -> nn.Module:
    """Create the base and replay the edits that its constructor has not made itself."""
    model = create(base["name"], **{key: value for key, value in base.items() if key not in ("name", "pretrained")})
    for edit in recorded[len(edits(model)) :]:
        model = replay(model, edit)
    return record_base(model, base)


def _check_rebuilds(model: nn.Module, base: dict[str, Any], made: tuple[Edit, ...]) -> None:
    """Raise UserError unless base and edits rebuild this model, which is tried on the meta device."""
    with torch.device("meta"):
        twin = rebuild(base, made)
    if difference := find_difference(model, twin):
        raise UserError(
            f"timm.create_model({base}) and the recorded edits do not rebuild this model: {difference}; "
            "give save() base={'name': ..., and all other arguments}, or the module before its edits as base"
        )


def _find_rebuild_record(model: nn.Module) -> tuple[dict[str, Any], tuple[Edit, ...]]:
    """Return the shortest base and edits that rebuild the model: for a fused model, the plain network if possible.

    Raises: UserError as `_check_rebuilds` when none does.
    """
    base, made = describe_base(model), edits(model)
    remaining = _drop_fused_edits(made)
    plain = base if remaining == made else {**base, **getattr(model, "fused_arguments", {})}
    pairs = ((plain, remaining), (plain, made), (base, made))
    now = _describe_arguments(model)
    records = [(b, e) for b, e in pairs for b in (b, {**now, **b}, {**b, **now})]
    for record in records[:-1]:
        with suppress(UserError):
            _check_rebuilds(model, *record)
            return record
    _check_rebuilds(model, *records[-1])
    return records[-1]


def _drop_fused_edits(made: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """Return the edits without those of modules that were fused later, and without the fusing itself."""
    fused = {name for edit in made if isinstance(edit.rule, Fuse) for name in edit.names}
    remaining = (
        Edit(e.rule, tuple(n for n in e.names if fused.isdisjoint([n, *joint_candidates(n)])))
        for e in made
        if not isinstance(e.rule, Fuse)
    )
    return tuple(edit for edit in remaining if edit.names)


def describe_model(model: nn.Module, base: dict[str, Any] | nn.Module | None = None) -> dict[str, str]:
    """Return the header from which the model can be rebuilt. Raises: UserError when none rebuilds it."""
    if isinstance(base, nn.Module) or (base is None and not _comes_from_timm(model)):
        return _describe_module(model, base)
    base, made = _find_rebuild_record(model) if base is None else (base, edits(model))
    _check_rebuilds(model, base, made)
    parts = {"base": base, "edits": describe_edits(made), "data": describe_data(model)}
    header = {"format": FORMAT, **{key: json.dumps(part) for key, part in parts.items()}}
    parse_header(header, type(model).__name__, "correct the model's pretrained_cfg, or base")
    return header


def _comes_from_timm(model: nn.Module) -> bool:
    """True if timm.create_model can build the model before its edits."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return bool(getattr(model, "isomorph_base", None) or config.get("architecture"))


def _describe_module(model: nn.Module, base: nn.Module | None) -> dict[str, str]:
    """Return the header of a model that timm cannot build: its class, its edits, and the images it expects.

    Raises: UserError when the edits on `base`, if it is given, do not make this model.
    """
    if base is not None:
        with torch.device("meta"):
            twin = copy.deepcopy(base).to("meta")
            for edit in edits(model)[len(edits(base)) :]:
                twin = replay(twin, edit)
        if difference := find_difference(model, twin):
            made = f"the edits of this model do not make it from base {type(base).__name__}"
            raise UserError(f"{made}: {difference}; give another base")
    kind = type(base or model)
    parts = {"module": {"class": f"{kind.__module__}.{kind.__qualname__}"}}
    parts |= {"edits": describe_edits(edits(model)), "data": describe_data(model)}  # type: ignore[dict-item]
    header = {"format": FORMAT, **{key: json.dumps(part) for key, part in parts.items()}}
    parse_header(header, type(model).__name__, "correct the model's pretrained_cfg")
    return header


def rebuild_from_header(header: Mapping[str, str], state: Mapping[str, Tensor], path: Path) -> nn.Module:
    """Return the model that a header describes, without its tensors. Raises: UserError as `load`."""
    if header.get("format") != FORMAT:
        raise UserError(f"{path} was written by another version of isomorph; create the model and use load_weights")
    parts = parse_header(header, path)
    if parts.module:
        kind = parts.module["class"]
        raise UserError(
            f"{path} holds a {kind}, which timm cannot build; open it in Python: iso.load(path, base="
            f"{kind.rpartition('.')[2]}(...)), or give a timm model with the same tensors as --arch"
        )
    model = build_checked(state, path, lambda: rebuild(parts.base, parts.edits))
    model.isomorph_edits = parts.edits  # type: ignore[assignment]
    record_data(model, parts.data)
    return model


def build_checked(state: Mapping[str, Tensor], path: Path, build: Callable[[], T], plan: str = "its header") -> T:
    """Return the model that `build` makes, after checking on the meta device that it is not larger than its file.

    `plan` names in messages what says how large the model is.

    Raises: UserError when it is, before memory is allocated, or when it cannot be built.
    """
    held = sum(tensor.numel() for tensor in state.values() if isinstance(tensor, Tensor))
    try:
        with torch.device("meta"):
            wanted = sum(tensor.numel() for tensor in build().state_dict().values())
        if wanted > max(2 * held, _ALWAYS_ALLOWED_NUMEL):
            raise UserError(f"cannot rebuild {path}: {plan} asks for {wanted:,} numbers, it holds {held:,}")
        return build()
    except UserError:
        raise
    except Exception as error:  # modules raise many types for arguments of other modules
        raise UserError(f"cannot rebuild {path}: {type(error).__name__} {short_reason(error)}") from error
