"""Saving models with a header that rebuilds them (timm base, edits, images), and loading weights into a model.

Before a model is saved, the header is tried: the network that it builds must be the same but for its values.
"""

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn

from isomorph.checkpoints.difference import find_difference
from isomorph.checkpoints.files import (
    Contents,
    count_numbers,
    read_contents,
    strip_wrappers,
    write_atomically,
)
from isomorph.checkpoints.header import DATA_KEYS, FORMAT, Header, may_be_in_file, parse_header
from isomorph.errors import DataWarning, UserError, first_line, short_reason
from isomorph.layers import ViTRelativeAttention
from isomorph.models import arguments_before, arguments_to_record, create
from isomorph.models.input_sizes import built_size, label_names
from isomorph.operations import copy_module, unwrap
from isomorph.spec import record_config, spec_of
from isomorph.surgery import EDIT_RULES, Edit, Fuse, apply_edit, edits
from isomorph.surgery.calls import cast_model, dtype_name
from isomorph.surgery.insert import temporary_blocks
from isomorph.surgery.modules import lies_within, list_names, parent_name, tensors_by_name
from isomorph.surgery.recast import Ties, check_model
from isomorph.surgery.rule import add_notes, record, update_record
from isomorph.surgery.site import joint_candidates, only_embedding_model

# models of up to this many numbers are built however small their file is
_ALWAYS_ALLOWED_NUMEL = 2**20
T = TypeVar("T", bound=nn.Module)
# Name and arguments of timm.create_model, or the module before its edits.
Base = dict[str, Any] | nn.Module


def describe_edits(all_edits: tuple[Edit, ...]) -> list[dict[str, Any]]:
    """Return edits as plain values. Raises: UserError for a rule that is not registered."""
    described = []
    for edit in all_edits:
        name = type(edit.rule).__name__
        if EDIT_RULES.get(name) is not type(edit.rule):
            raise UserError(f"{name} is not a rule of isomorph: a checkpoint could not replay it")
        fields = dataclasses.asdict(edit.rule)  # type: ignore[call-overload]
        described.append({"rule": name, "fields": fields, "names": list(edit.names)})
    return described


def describe_base(model: nn.Module) -> dict[str, Any]:
    """Return the name and arguments with which timm.create_model makes the model as it is now, without its edits.

    They were recorded when it was created; timm says what was changed since, such as the number of classes.

    Raises: UserError for a model that timm did not create.
    """
    spec = spec_of(model)
    recorded = record(model).base or {"name": spec.name}
    if not recorded["name"]:
        raise UserError(
            f"{type(model).__name__} does not come from timm.create_model; give save() its base"
        )
    arguments = {
        name: value for name, value in spec.arguments.items() if may_be_in_file(name, value)
    }
    numbers = {
        "num_classes": getattr(model, "num_classes", None),
        "in_chans": getattr(model, "in_chans", 3),
    }
    return {**numbers, **arguments_to_record(model), **recorded, **arguments}


def describe_data(model: nn.Module) -> dict[str, Any]:
    """Return the images that the model expects, at the size that it was built for.

    Class names are left out where `label_names` takes them for those of other weights.
    """
    config = spec_of(model).config
    data = {key: config[key] for key in DATA_KEYS if config.get(key) is not None}
    if not label_names(model):
        data.pop("label_names", None)
    size = built_size(model)
    if size is not None and "input_size" in data:
        data["input_size"] = (data["input_size"][0], *size)
        data.pop("test_input_size", None)
    return data


# Entries of a model's config that hold for the weights that it had before.
_OF_OLD_WEIGHTS = ("test_input_size", "test_crop_pct", "label_names", "split", "task")


def record_data(model: nn.Module, data: dict[str, Any]) -> None:
    """Record the images that the model expects, where timm's resolve_data_config reads them."""
    config = {
        key: value for key, value in spec_of(model).config.items() if key not in _OF_OLD_WEIGHTS
    }
    config |= {key: value for key, value in data.items() if key in DATA_KEYS}
    record_config(model, config)
    if "input_size" in data:
        update_record(model, trained_size=True)


def rebuild(base: dict[str, Any], recorded: Sequence[Edit]) -> nn.Module:
    """Create the base and apply the edits that its constructor has not made itself."""
    complete = {**arguments_before(base["name"]), **base}
    arguments = {key: value for key, value in complete.items() if key not in ("name", "pretrained")}
    model = create(base["name"], **arguments)
    for edit in recorded[len(edits(model)) :]:
        model = apply_edit(model, edit)
    return model


def _why_not_rebuilt(
    model: nn.Module, base: dict[str, Any], all_edits: tuple[Edit, ...]
) -> str | None:
    """Return what differs in the network that a base and edits build, or why they build none, or None."""
    try:
        with torch.device("meta"):
            return find_difference(model, rebuild(base, all_edits))
    except UserError as error:
        return str(error)


def _check_rebuilds(model: nn.Module, base: dict[str, Any], all_edits: tuple[Edit, ...]) -> None:
    """Raise UserError unless base and edits rebuild the model."""
    difference = _why_not_rebuilt(model, base, all_edits)
    if difference:
        raise _not_rebuilt(base, difference)


def _not_rebuilt(base: dict[str, Any], difference: str) -> UserError:
    return UserError(
        f"timm.create_model({base}) and the recorded edits do not rebuild this model: {difference}; "
        "give save() base={'name': ..., and all other arguments}, or the module before its edits as base"
    )


def _rebuild_record(model: nn.Module) -> tuple[dict[str, Any], tuple[Edit, ...]] | None:
    """Return the base and the edits that rebuild the model; of a fused one those of the plain network, if it is that.

    None if there are none and the user's function builds its base.
    """
    base = describe_base(model)
    all_edits = edits(model)
    remaining = _drop_fused_edits(all_edits)
    if remaining != all_edits:
        plain = {**base, **getattr(model, "fused_arguments", {})}
        if not _why_not_rebuilt(model, plain, remaining):
            return plain, remaining
    difference = _why_not_rebuilt(model, base, all_edits)
    if not difference:
        return base, all_edits
    remaining = _drop_classifier_edits(model, all_edits)
    if remaining != all_edits and not _why_not_rebuilt(model, base, remaining):
        return base, remaining
    if record(model).is_of_function:
        return None
    _check_tables(model)
    raise _not_rebuilt(base, difference)


def _check_tables(model: nn.Module) -> None:
    """Raise UserError if timm's `set_input_size` has left tables of relative positions at their size."""
    owner = only_embedding_model(model)
    if owner is None:
        return
    grid = owner.patch_embed.grid_size
    for name, layer in model.named_modules():
        if isinstance(layer, ViTRelativeAttention) and layer.table_grid != grid:
            raise UserError(
                f"the table of {name} is for a grid of {layer.table_grid}, the model now has {grid}; call its "
                f"set_grid_size({grid}), and that of each such layer: they then compute the same, and can be saved"
            )


def _drop_classifier_edits(model: nn.Module, all_edits: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """Return the edits without those of the classifier, which timm's `reset_classifier` replaces by a plain layer."""
    classifiers = spec_of(model).classifiers
    return _drop_names(all_edits, lambda name: lies_within(name, classifiers))


def _drop_fused_edits(all_edits: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """Return the edits without those of modules that were fused later, and without the fusing itself."""
    fused: set[str] = set()
    for edit in all_edits:
        if isinstance(edit.rule, Fuse):
            fused.update(edit.names)
    without_fusing = [edit for edit in all_edits if not isinstance(edit.rule, Fuse)]
    return _drop_names(
        without_fusing, lambda name: not fused.isdisjoint([name, *joint_candidates(name)])
    )


def _drop_names(all_edits: Iterable[Edit], is_dropped: Callable[[str], bool]) -> tuple[Edit, ...]:
    """Return the edits without some of their names, and without those that have no other."""
    remaining = []
    for edit in all_edits:
        names = tuple(itertools.filterfalse(is_dropped, edit.names))
        if names:
            remaining.append(Edit(edit.rule, names))
    return tuple(remaining)


def describe_model(model: nn.Module, base: Base | None = None) -> dict[str, str]:
    """Return the header from which the model can be rebuilt. Raises: UserError when none rebuilds it."""
    all_edits = edits(model)
    _warn_of_temporary_blocks(all_edits)
    base_and_edits = None
    if isinstance(base, dict):
        base_and_edits = {**arguments_to_record(model), **base}, all_edits
        _check_rebuilds(model, *base_and_edits)
    elif base is not None:
        _check_edits_on(base, model)
    elif record(model).base or spec_of(model).name:
        base_and_edits = _rebuild_record(model)
    if base_and_edits is not None:
        parts: dict[str, Any] = {"base": base_and_edits[0]}
        all_edits = base_and_edits[1]
    else:
        kind = type(base or model)
        parts = {"module": {"class": f"{kind.__module__}.{kind.__qualname__}"}}
    parts["edits"] = describe_edits(all_edits)
    parts["data"] = describe_data(model)
    header = {"format": FORMAT}
    for key, part in parts.items():
        header[key] = json.dumps(part)
    parse_header(header, type(model).__name__, "correct the model's pretrained_cfg, or base")
    return header


def _warn_of_temporary_blocks(all_edits: tuple[Edit, ...]) -> None:
    """Warn of an inserted block that `load` cannot rebuild in another process."""
    for path, name in temporary_blocks(all_edits).items():
        warnings.warn(
            f"the block after {path} is a module, lambda or local function, which iso.load cannot find; give "
            "iso.insert a class or function that can be imported, or before iso.load call "
            f'iso.surgery.register_block(make, name="{name}") with the function of channels that makes it',
            stacklevel=4,
        )
        return


def _copy_on_meta(base: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, whose tied parameters are still tied."""
    twin = copy_module(base).to("meta")
    for _ in Ties(base).restore(twin):  # `to` makes a parameter of each name of a tied one
        pass
    return twin


def _check_edits_on(base: nn.Module, model: nn.Module) -> None:
    """Raise UserError unless the model's edits make it from the base."""
    with torch.device("meta"):
        twin = _copy_on_meta(base)
        for edit in edits(model)[len(edits(base)) :]:
            twin = apply_edit(twin, edit)
    difference = find_difference(model, twin)
    if difference is not None:
        problem = f"the edits of this model do not make it from base {type(base).__name__}"
        raise UserError(f"{problem}: {difference}; give another base")


def rebuild_from_header(contents: Contents) -> nn.Module:
    """Return the model that the header of a file describes, without its tensors. Raises: UserError as `load`."""
    parts = read_parts(contents)
    if parts.module:
        kind = parts.module["class"]
        raise UserError(
            f"{contents.path} holds a {kind}, which timm cannot build; give "
            f"base={kind.rpartition('.')[2]}() of your code, or base=NAME of a timm model with the same tensors"
        )
    model = build_checked(contents, lambda: rebuild(parts.base, parts.edits))
    update_record(model, edits=parts.edits)
    record_data(model, parts.data)
    return model


def read_parts(contents: Contents) -> Header:
    """Return the checked parts of a file's header. Raises: UserError when isomorph of this version did not write it."""
    if contents.header.get("format") != FORMAT:
        raise UserError(
            f"{contents.path} is from another version of isomorph; create the model and use load_weights"
        )
    return parse_header(contents.header, contents.path)


def build_checked(contents: Contents, build: Callable[[], T], plan: str = "its header") -> T:
    """Return the model that `build` makes, after checking on the meta device that it is not larger than its file.

    `plan` names in messages what says how large the model is.

    Raises: UserError when it is, before memory is allocated, or when it cannot be built.
    """
    try:
        with torch.device("meta"):
            num_built = count_numbers(build().state_dict())
        _check_number(contents, num_built, plan)
        return build()
    except UserError:
        raise
    except Exception as error:  # modules raise many types for arguments of other modules
        raise UserError(
            f"cannot rebuild {contents.path}: {type(error).__name__}: {first_line(error)}"
        ) from error


def check_size_of_edits(contents: Contents, base: nn.Module, all_edits: Sequence[Edit]) -> None:
    """Check on the meta device that a file's edits do not make a base much larger than the file.

    Raises: UserError if they do.
    """
    num_built = 0
    # an edit that needs values cannot be tried, and says itself what is wrong
    with suppress(Exception), torch.device("meta"):
        twin = _copy_on_meta(base)
        for edit in all_edits:
            twin = apply_edit(twin, edit)
            num_built = max(num_built, count_numbers(twin.state_dict()))
    _check_number(contents, num_built, "its header")


def _check_number(contents: Contents, num_built: int, plan: str) -> None:
    """Raise UserError for a model of many more numbers than its file has."""
    num_stored = count_numbers(contents.tensors)
    if num_built > max(5 * num_stored, _ALWAYS_ALLOWED_NUMEL):
        raise UserError(
            f"cannot rebuild {contents.path}: {plan} asks for {num_built:,} numbers, it holds "
            f"{num_stored:,}: give another architecture"
        )


def save(model: nn.Module, path: str | Path, base: Base | None = None) -> None:
    """Save a model as a safetensors file from which `load` rebuilds it, recast modules included.

    The file holds the weights and, in its header, the arguments of timm.create_model, the edits made on the model, and
    the images it expects. It is written completely or not at all. A module that timm cannot build (torchvision's, or
    your own) is saved with its edits and comes back with `iso.load(path, base=MyModel())`.

    Args:
        base: Name and arguments of timm.create_model, like {"name": "convit_ti", "img_size": [32, 32]}. Needed only if
            timm has not recorded them, or JSON cannot hold them. Or the module before its edits, for a timm model that
            was changed in your own code.

    Raises: UserError when base and edits do not rebuild the model, or the file cannot be written.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.0.conv1")
    >>> iso.save(tcnn, "tcnn.safetensors")
    >>> iso.load("tcnn.safetensors").layer3[0].conv1.__class__.__name__
    'GPSA2d'
    """
    model = check_model(model)
    if Path(path).suffix != ".safetensors":
        raise UserError(f"{path} must end in .safetensors")
    if not (
        base is None or isinstance(base, nn.Module) or (isinstance(base, dict) and "name" in base)
    ):
        raise UserError(
            f"base {base!r} must be a dictionary like {{'name': 'convit_ti', 'img_size': [32, 32]}}, or a module"
        )
    _check_state_names(model)
    tensors = model.state_dict()
    _check_storable(tensors)
    header = describe_model(model, base)
    warn_of_nan(tensors, "saved")
    write_model(header, tensors, Path(path))


def _check_storable(state: Mapping[str, Any]) -> None:
    """Raise UserError for what a state dict has and a safetensors file cannot hold."""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise UserError(
                f"{name} is a {kind}, and a safetensors file holds tensors alone; let get_extra_state() return a tensor"
            )
        if tensor.is_meta:
            raise UserError(
                f"{name} has no values (device meta); load weights into the model first"
            )
        if tensor.layout != torch.strided:
            raise UserError(
                f"{name} is sparse, which a safetensors file cannot hold; make it dense with to_dense()"
            )
        if tensor.is_quantized or tensor.dtype == torch.complex128:
            raise UserError(
                f"{name} has dtype {dtype_name(tensor)}, which a safetensors file cannot hold; convert it first, "
                "complex numbers to complex64 and quantised ones with dequantize()"
            )


def _check_state_names(model: nn.Module) -> None:
    """Check that a model loads the names that it saves. Raises: UserError if only its `state_dict` is overridden."""
    if type(model).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(
        model
    ):
        return
    plain_names = set(nn.Module.state_dict(model))
    names = set(model.state_dict())
    if plain_names != names:
        different = sorted(plain_names ^ names)[0]
        raise UserError(
            f"state_dict() of {type(model).__name__} is overridden and has other names than load_state_dict() takes "
            f"(first {different}); override load_state_dict() too, or neither"
        )


def warn_of_nan(tensors: Mapping[str, Tensor], action: str) -> None:
    """Warn if a tensor has NaN or infinity (but -inf, of masks), which is saved or loaded (`action`)."""
    for name, tensor in tensors.items():
        if not _is_real(tensor) or tensor.is_meta or (tensor < torch.inf).all():
            continue
        warnings.warn(
            f"{name} is not finite (NaN or infinite), and is {action} as it is",
            DataWarning,
            stacklevel=3,
        )
        return


def write_model(header: dict[str, str], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a checkpoint from its header and tensors. Raises: UserError when it cannot be written."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(path, lambda file: file.write_bytes(serialize(copies, metadata=header)))


def load_weights(
    model: nn.Module, path: str | Path, fresh_head: bool = False, ema: bool = True
) -> list[str]:
    """Load the weights of a checkpoint into a model, strictly, and return the names of tensors it does not contain.

    The file is safetensors or PyTorch. Prefixes of DistributedDataParallel and torch.compile are removed, and other
    layouts of the same architecture are converted by the model's own filter (timm's checkpoint_filter_fn). The returned
    tensors keep the model's values: a new head, and tensors that the filter fills in.

    Args:
        fresh_head: Keep the model's own classifier if the checkpoint has none, or one for other classes.
        ema: Take the averaged weights of a training checkpoint, where it has any, else the last ones;
            `iso.surgery.notes(model)` says which.

    Raises: UserError naming tensors that are missing, unexpected or of another shape; the model is then unchanged.

    >>> iso.save(timm.create_model("cifar_resnet20"), "ten.safetensors")
    >>> model = timm.create_model("cifar_resnet20", num_classes=3)
    >>> iso.load_weights(model, "ten.safetensors", fresh_head=True)
    ['linear.weight', 'linear.bias']
    """
    model = unwrap(model, to_copy=False)
    contents = read_contents(Path(path), ema)
    new = load_state(model, contents.tensors, path, fresh_head)
    add_notes(model, *contents.notes)
    return new


def load_state(
    model: nn.Module, state: dict[str, Any], path: str | Path, fresh_head: bool = False
) -> list[str]:
    """Load the tensors of the checkpoint at `path` into a model as `load_weights` does. Raises: as it does."""
    path = Path(path)
    model_state = model.state_dict()
    for name, tensor in model_state.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise UserError(
                f"{name} of the model has no memory for values (device meta); create the model outside of "
                "torch.device('meta')"
            )
    state = add_tied(model, strip_wrappers(state, model_state))
    fits = model_state.keys() == state.keys() and not any(
        _shape_differs(model_state, state, name) for name in model_state
    )
    interpolated: list[str] = []
    if not fits:  # timm's filters take a fused network for one of another layout
        given = state
        state = _filtered(model, given, path)
        interpolated = [name for name in state if _is_interpolated(given.get(name), state[name])]
    if fresh_head:
        state = _keep_own_head(model, state)
    check_state_fits(model, state, path)
    _check_tied(model_state, state, path)
    new = []
    for name, tensor in model_state.items():
        if not isinstance(tensor, Tensor):
            continue
        if state[name].data_ptr() == tensor.data_ptr() and not name.endswith(
            ".num_batches_tracked"
        ):
            new.append(name)
    model.load_state_dict(state)
    if interpolated:
        add_notes(
            model,
            f"{path.name} is for other sizes of images, patches or windows; interpolated: {list_names(interpolated)}; "
            "outputs are not exactly those of the model that was saved",
        )
    return new


def _is_interpolated(given: Any, made: Any) -> bool:
    """True for a tensor with other numbers than the one that a filter made it of: not if it was cut or reshaped."""
    if (
        not isinstance(given, Tensor)
        or not isinstance(made, Tensor)
        or given.numel() == made.numel()
    ):
        return False
    return not torch.isin(made.flatten()[-64:], given).all()


def _filtered(model: nn.Module, state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a state in the model's layout, by timm's filter for its class. Raises: UserError if it does not fit."""
    module = import_module(type(model).__module__)
    convert = getattr(module, "checkpoint_filter_fn", None)
    if convert is None:
        return state
    try:
        # timm warns when it interpolates relative positions
        with warnings.catch_warnings(action="ignore"):
            return convert(dict(state), model)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # timm's filters raise many types for a checkpoint of another architecture
        check_state_fits(model, state, path)
        raise UserError(
            f"{path} does not fit {type(model).__name__}: {short_reason(error)}"
        ) from None


def add_tied(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with each tensor under all names that the model has for it.

    Files of transformers' `save_pretrained` and safetensors' `save_model` hold a tied tensor once.
    """
    names_of: dict[Any, list[str]] = {}
    for name, tensor in tensors_by_name(model).items():
        names_of.setdefault(id(tensor), []).append(name)
    full = dict(state)
    for names in names_of.values():
        stored = [name for name in names if name in state]
        if stored:
            full |= {name: state[stored[0]] for name in names if name not in state}
    return full


def _check_tied(model_state: dict[str, Any], state: dict[str, Any], path: Path) -> None:
    """Raise UserError if tensors that the model ties differ in a state."""
    names: dict[Any, str] = {}
    for name, tensor in model_state.items():
        if not isinstance(tensor, Tensor):
            continue
        first = names.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if tensor.data_ptr() and first != name and not torch.equal(state[first], state[name]):
            raise UserError(
                f"{path} has different tensors {first} and {name}, where the model has one; untie them"
            )


def _keep_own_head(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the model's own classifier if it has none, or one for other classes."""
    model_state = model.state_dict()
    classifiers = tuple(f"{name}." for name in spec_of(model).classifiers)
    heads = [name for name in model_state if name.startswith(classifiers)]
    if not heads:  # a model without a classifier
        return {name: tensor for name, tensor in state.items() if not name.startswith(classifiers)}
    if all(name in state and not _shape_differs(model_state, state, name) for name in heads):
        return state
    new_state = dict(state)
    for name in heads:
        new_state[name] = model_state[name]
    return new_state


def cast_like(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Give the floating-point tensors of a model the dtypes of those in a state, or all of them its only dtype.

    A model that has these dtypes stays as it is, with buffers that are not saved.
    """
    stored = {name: tensor for name, tensor in state.items() if _is_real(tensor)}
    own = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored and tensor.is_floating_point():
            own.append((name, tensor))
    if own and all(tensor.dtype == stored[name].dtype for name, tensor in own):
        return model
    dtypes = {tensor.dtype for tensor in stored.values()}
    if len(dtypes) == 1:
        return cast_model(model, dtypes.pop())
    for name, tensor in own:
        tensor.data = tensor.data.to(stored[name].dtype)
    return model


_HINTS = {
    "fc_norm.": "comes from a model that averages tokens: create the model with global_pool='avg'",
    "decoder_blocks.": "has a decoder: load_autoencoder (isomorph.checkpoints.autoencoder) reads it; save its encoder",
}


def check_state_fits(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Raise UserError unless the state has exactly the model's tensors and shapes, and real numbers for real ones."""
    model_state = model.state_dict()
    unexpected = [name for name in state if name not in model_state]
    missing = []
    shapes = []
    not_real = []
    for name, tensor in model_state.items():
        if name not in state:
            missing.append(name)
            continue
        if not isinstance(tensor, Tensor):
            # what get_extra_state gives
            continue
        if _shape_differs(model_state, state, name):
            given = tuple(getattr(state[name], "shape", ()))
            shapes.append(f"{name} {given} for {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not _is_real(state[name]):
            not_real.append(name)
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": shapes,
        "not of real numbers": not_real,
    }
    descriptions = [
        f"{len(names)} {problem} ({list_names(names)})"
        for problem, names in problems.items()
        if names
    ]
    if not descriptions:
        return
    text = "; ".join(descriptions)
    for prefix, hint in _HINTS.items():
        if any(name.startswith(prefix) for name in unexpected):
            text += f"; it {hint}"
    raise UserError(
        f"{path} does not fit {type(model).__name__}: tensors {text}{_norm_hint(missing, unexpected)}"
    )


def _norm_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return what to do where only the file or only the model has its norms merged; else nothing."""
    if _are_of_norms(unexpected) and not missing:
        return "; it has norms, which are merged in the model: load it before iso.fuse"
    if _are_of_norms(missing) and not unexpected:
        return "; its norms are merged, and the model has them: merge these first, with iso.fuse"
    return ""


def _are_of_norms(names: Sequence[str]) -> bool:
    norms = {parent_name(name) for name in names if name.endswith(".running_var")}
    return bool(norms) and all(parent_name(name) in norms for name in names)


def _is_real(tensor: Any) -> bool:
    """True for a dense tensor of floating-point numbers, as integers, complex numbers and quantised ones are not."""
    return (
        isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided
    )


def _shape_differs(model_state: dict[str, Any], state: dict[str, Any], name: str) -> bool:
    own = model_state[name]
    if name not in state or not isinstance(own, Tensor):
        return False
    return not isinstance(state[name], Tensor) or state[name].shape != own.shape
