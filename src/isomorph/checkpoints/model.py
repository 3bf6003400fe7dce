"""Files that survive: written whole or not at all, read without running code, and enough to rebuild the model."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from timm.models._input import get_model_args
from torch import Tensor, nn

from isomorph.checkpoints.header import DATA_KEYS, FORMAT, parse_header
from isomorph.errors import UserError
from isomorph.models import create
from isomorph.surgery import EDIT_RULES, Edit, Fuse, edits, replay
from isomorph.surgery.compiled import unwrap_compiled
from isomorph.surgery.joint_projections import joint_candidates

_ALWAYS_ALLOWED_NUMEL = 2**20
"""Numbers of a model that may always be built."""
T = TypeVar("T", bound=nn.Module)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a file beside `path`, flushes it to disk and renames it: readers see the old file or the new.

    Raises: UserError when it cannot be written; the old file is then as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save and safetensors have their own kinds
        raise UserError(f"cannot write {path}: {' '.join(str(error).split())}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def describe_edits(made: tuple[Edit, ...]) -> list[dict[str, Any]]:
    """Edits as plain values. Raises: UserError for a rule that isomorph could not find again."""
    for edit in made:
        if EDIT_RULES.get(type(edit.rule).__name__) is not type(edit.rule):
            raise UserError(f"{type(edit.rule).__name__} is not a rule of isomorph: a checkpoint could not replay it")
    return [
        {"rule": type(edit.rule).__name__, "fields": dataclasses.asdict(edit.rule), "names": list(edit.names)}  # type: ignore[call-overload]
        for edit in made
    ]


def _describe_arguments(model: nn.Module) -> dict[str, Any]:
    """The further arguments that timm noted when it created the model, as far as JSON can hold them."""
    return {name: value for name, value in get_model_args(model).items() if _is_json_value(value)}


def _is_json_value(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def describe_base(model: nn.Module) -> dict[str, Any]:
    """How timm creates the model that the edits start from: as `record_base` noted, else name, classes, channels."""
    noted = getattr(model, "isomorph_base", None)
    if noted:
        return noted
    config = getattr(model, "pretrained_cfg", None) or {}
    if not config.get("architecture"):
        raise UserError(f"{type(model).__name__} does not come from timm.create_model; give save() its base")
    return {
        "name": config["architecture"],
        "num_classes": getattr(model, "num_classes", None),
        "in_chans": getattr(model, "in_chans", 3),
    }


def record_base(model: nn.Module, base: dict[str, Any]) -> nn.Module:
    """Notes on the model how timm creates its base, for `save`."""
    model.isomorph_base = {key: value for key, value in base.items() if key != "pretrained"}  # type: ignore[assignment]
    return model


def _describe_data(model: nn.Module) -> dict[str, Any]:
    """What images the model expects, as its pretrained_cfg says."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return {key: config[key] for key in DATA_KEYS if config.get(key) is not None}


def record_data(model: nn.Module, data: dict[str, Any]) -> None:
    """Puts what images the model expects into its pretrained_cfg, where timm's resolve_data_config reads it."""
    config = dict(getattr(model, "pretrained_cfg", None) or {})
    for key in ("test_input_size", "test_crop_pct", "label_names"):  # of the weights that the base may come with
        config.pop(key, None)
    model.pretrained_cfg = model.default_cfg = config | {k: v for k, v in data.items() if k in DATA_KEYS}  # type: ignore[assignment]


def rebuild(base: dict[str, Any], recorded: Sequence[Edit]) -> nn.Module:
    """Creates the base and replays the edits that it was not born with."""
    model = create(base["name"], **{key: value for key, value in base.items() if key not in ("name", "pretrained")})
    for edit in recorded[len(edits(model)) :]:
        model = replay(model, edit)
    return record_base(model, base)


def check_rebuilds(model: nn.Module, base: dict[str, Any], made: tuple[Edit, ...]) -> None:
    """Raises: UserError when base and edits do not rebuild this very model (seen on the meta device)."""
    with torch.device("meta"):
        twin = rebuild(base, made)
    layout = [{name: tuple(tensor.shape) for name, tensor in m.state_dict().items()} for m in (model, twin)]
    if layout[0] != layout[1] or repr(model) != repr(twin):
        raise UserError(
            f"timm.create_model({base}) and the recorded edits do not rebuild this model; "
            "give save() base={'name': ..., and all other arguments}, and change modules with recast and revert only"
        )


def _find_rebuild_record(model: nn.Module) -> tuple[dict[str, Any], tuple[Edit, ...]]:
    """The shortest base and edits that rebuild the model: a fused one is the plain network again where that is so.

    Raises: UserError as `check_rebuilds` does when none does.
    """
    base, made = describe_base(model), edits(model)
    left = drop_fused_edits(made)
    plain = base if left == made else {**base, **getattr(model, "fused_arguments", {})}
    pairs = ((plain, left), (plain, made), (base, made))
    records = [(b, e) for b, e in pairs for b in (b, {**_describe_arguments(model), **b})]
    for record in records[:-1]:
        with suppress(UserError):
            check_rebuilds(model, *record)
            return record
    check_rebuilds(model, *records[-1])
    return records[-1]


def drop_fused_edits(made: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """The edits without those of modules that have been fused since, and without the fusing."""
    gone = {name for edit in made if isinstance(edit.rule, Fuse) for name in edit.names}
    kept = (
        Edit(e.rule, tuple(n for n in e.names if gone.isdisjoint([n, *joint_candidates(n)])))
        for e in made
        if not isinstance(e.rule, Fuse)
    )
    return tuple(edit for edit in kept if edit.names)


def save(model: nn.Module, path: str | Path, base: dict[str, Any] | None = None) -> None:
    """Writes the weights with all that rebuilds the model: its base, the edits made on it, the images it expects.

    `base`: name and further arguments of timm.create_model, like {"name": "convit_ti", "img_size": [32, 32]}; needed
    only where timm has not noted them itself, or they are no plain values. The file is safetensors, written whole or
    not at all.

    Raises: UserError when base and edits do not rebuild the model, or the file cannot be written.
    """
    model = unwrap_compiled(model)
    if Path(path).suffix != ".safetensors":
        raise UserError(f"{path} must end in .safetensors")
    if base is not None and not (isinstance(base, dict) and "name" in base):
        raise UserError(f"base {base!r} must be a dictionary like {{'name': 'convit_ti', 'img_size': [32, 32]}}")
    write_model(describe_model(model, base), model.state_dict(), Path(path))


def describe_model(model: nn.Module, base: dict[str, Any] | None = None) -> dict[str, str]:
    """The header of a checkpoint: all that rebuilds the model. Raises: UserError when nothing does."""
    base, made = _find_rebuild_record(model) if base is None else (base, edits(model))
    check_rebuilds(model, base, made)
    parts = {"base": base, "edits": describe_edits(made), "data": _describe_data(model)}
    header = {"format": FORMAT, **{key: json.dumps(part) for key, part in parts.items()}}
    parse_header(header, type(model).__name__, "correct the model's pretrained_cfg, or base")
    return header


def write_model(header: dict[str, str], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a checkpoint from its parts. Raises: UserError when it cannot be written."""
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(path, lambda file: file.write_bytes(serialize(kept, metadata=header)))


def load(path: str | Path) -> nn.Module:
    """Rebuilds a model written by `save`: creates the base, replays the edits, loads every tensor strictly; eval mode.

    Raises: UserError when the file is missing, truncated, not isomorph's, or does not fit.
    """
    path = Path(path)
    header, state = read_header(path), read_tensors(path)
    model = rebuild_from_header(header, state, path)
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    load_weights(model.to(dtypes.pop()) if len(dtypes) == 1 else model, path)
    return model.eval()


def rebuild_from_header(header: Mapping[str, str], state: Mapping[str, Tensor], path: Path) -> nn.Module:
    """The model that the header of a checkpoint describes, its tensors not yet loaded. Raises: UserError as `load`."""
    if header.get("format") != FORMAT:
        raise UserError(f"{path} holds weights only, not how to rebuild their model; create it and use load_weights")
    parts = parse_header(header, path)
    model = build_checked(state, path, lambda: rebuild(parts.base, parts.edits))
    model.isomorph_edits = parts.edits  # type: ignore[assignment]
    record_data(model, parts.data)
    return model


def build_checked(state: Mapping[str, Tensor], path: Path, build: Callable[[], T]) -> T:
    """The model that `build` makes, once it is known to be no larger than the tensors of its file.

    Raises: UserError when it is, before memory is taken, or when it cannot be built.
    """
    held = sum(tensor.numel() for tensor in state.values())
    try:
        with torch.device("meta"):
            wanted = sum(tensor.numel() for tensor in build().state_dict().values())
        if wanted > max(2 * held, _ALWAYS_ALLOWED_NUMEL):
            raise UserError(f"cannot rebuild {path}: its header asks for {wanted:,} numbers, it holds {held:,}")
        return build()
    except UserError:
        raise
    except Exception as error:  # modules fail in many ways on arguments that are not theirs
        raise UserError(f"cannot rebuild {path}: {type(error).__name__} {short_reason(error)}") from error


def read_header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises: UserError when it cannot be read."""
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); it may be truncated") from None


def is_complete(path: Path) -> bool:
    """Whether a safetensors file is there with all its bytes."""
    try:
        with safe_open(str(path), framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def read_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file or of a PyTorch one (weights only: no code in it is run)."""
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(str(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load and safetensors raise many kinds for a damaged file
        raise UserError(
            f"cannot read checkpoint {path} ({short_reason(error)}); it may be truncated or foreign"
        ) from None
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise UserError(f"checkpoint {path} holds a {type(state).__name__}, not a dictionary of tensors")
    if not all(isinstance(name, str) for name in state):
        raise UserError(f"checkpoint {path} holds tensors without names, not a dictionary of tensors by name")
    return state


def short_reason(error: Exception) -> str:
    """The first line of an error, and its kind where the line alone says little."""
    line = next(iter(str(error).splitlines()), "")
    return line if " " in line else f"{type(error).__name__} {line}".strip()


def load_weights(model: nn.Module, path: str | Path, fresh_head: bool = False) -> list[str]:
    """Loads a checkpoint into a model, strictly, through the model's own filter for foreign layouts.

    Gives the names of the tensors that the checkpoint has not, which stay the model's own: a fresh head, and what a
    filter adds.

    `fresh_head`: a checkpoint without a classifier, or with one of other classes, leaves the model's own as it is.

    Raises: UserError saying which tensors are missing, unexpected or of another shape; the model is then unchanged.
    """
    return load_state(model, read_tensors(Path(path)), path, fresh_head)


def load_state(model: nn.Module, state: dict[str, Any], path: str | Path, fresh_head: bool = False) -> list[str]:
    """Loads the tensors of the checkpoint at `path` into a model, as `load_weights` does. Raises: as it does."""
    path = Path(path)
    module = __import__(type(model).__module__, fromlist=["checkpoint_filter_fn"])
    try:
        state = module.checkpoint_filter_fn(state, model) if hasattr(module, "checkpoint_filter_fn") else state
    except UserError:
        raise
    except Exception as error:  # timm's filters fail in many ways on a checkpoint of another family
        raise UserError(f"{path} does not fit {type(model).__name__}: {short_reason(error)}") from None
    state = _keep_own_head(model, state) if fresh_head else state
    check_state_fits(model, state, path)
    kept = [name for name, own in model.state_dict().items() if state[name].data_ptr() == own.data_ptr()]
    model.load_state_dict(state)
    return [name for name in kept if not name.endswith(".num_batches_tracked")]


def _keep_own_head(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the model's own classifier where it has none, or one of other classes."""
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    own = model.state_dict()
    heads = [n for c in ([named] if isinstance(named, str) else named) for n in own if n.startswith(f"{c}.")]
    if all(name in state and not _shape_differs(own, state, name) for name in heads):
        return state
    return {**state, **{name: own[name] for name in heads}}


def check_state_fits(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Raises: UserError when the state is not the model's, tensor for tensor."""
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if _shape_differs(own, state, name)
    ]
    parts = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if parts:
        pooled = any(name.startswith("fc_norm.") for name in unexpected)
        hint = "; it is of a model that averages over tokens: create it with global_pool='avg'" if pooled else ""
        raise UserError(f"{path} does not fit {type(model).__name__}: tensors {'; '.join(parts)}{hint}")


def _shape_differs(own: dict[str, Any], state: dict[str, Any], name: str) -> bool:
    return name in state and getattr(state[name], "shape", None) != own[name].shape
