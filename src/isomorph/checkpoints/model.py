"""Saving models, and loading weights into a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save as serialize
from torch import Tensor, nn

from isomorph.checkpoints.files import read_contents, short_reason, strip_wrappers, write_atomically
from isomorph.checkpoints.rebuild import describe_model
from isomorph.errors import UserError
from isomorph.surgery.recast import check_model
from isomorph.surgery.record import add_notes, unwrap_compiled


def save(model: nn.Module, path: str | Path, base: dict[str, Any] | nn.Module | None = None) -> None:
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
    check_model(model)
    model = unwrap_compiled(model)
    if Path(path).suffix != ".safetensors":
        raise UserError(f"{path} must end in .safetensors")
    if not (base is None or isinstance(base, nn.Module) or (isinstance(base, dict) and "name" in base)):
        raise UserError(
            f"base {base!r} must be a dictionary like {{'name': 'convit_ti', 'img_size': [32, 32]}}, or a module"
        )
    write_model(describe_model(model, base), model.state_dict(), Path(path))


def write_model(header: dict[str, str], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a checkpoint from its header and tensors. Raises: UserError when it cannot be written."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(path, lambda file: file.write_bytes(serialize(copies, metadata=header)))


def load_weights(model: nn.Module, path: str | Path, fresh_head: bool = False, ema: bool = True) -> list[str]:
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
    contents = read_contents(Path(path), ema)
    new = load_state(model, contents.tensors, path, fresh_head)
    add_notes(model, *contents.notes)
    return new


def load_state(model: nn.Module, state: dict[str, Any], path: str | Path, fresh_head: bool = False) -> list[str]:
    """Load the tensors of the checkpoint at `path` into a model as `load_weights` does. Raises: as it does."""
    path, state = Path(path), strip_wrappers(state, model.state_dict())
    module = __import__(type(model).__module__, fromlist=["checkpoint_filter_fn"])
    try:
        state = module.checkpoint_filter_fn(state, model) if hasattr(module, "checkpoint_filter_fn") else state
    except UserError:
        raise
    except Exception as error:  # timm's filters raise many types for a checkpoint of another architecture
        raise UserError(f"{path} does not fit {type(model).__name__}: {short_reason(error)}") from None
    state = _keep_own_head(model, state) if fresh_head else state
    check_state_fits(model, state, path)
    unchanged = [name for name, own in model.state_dict().items() if state[name].data_ptr() == own.data_ptr()]
    model.load_state_dict(state)
    return [name for name in unchanged if not name.endswith(".num_batches_tracked")]


def _keep_own_head(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the model's own classifier if it has none, or one for other classes."""
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    own = model.state_dict()
    heads = [
        n for c in ([classifier] if isinstance(classifier, str) else classifier) for n in own if n.startswith(f"{c}.")
    ]
    if all(name in state and not _shape_differs(own, state, name) for name in heads):
        return state
    return {**state, **{name: own[name] for name in heads}}


def cast_like(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Give the floating-point tensors of a model the dtypes of those in a state, or all of them its only dtype."""
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        return model.to(dtypes.pop())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in state and tensor.is_floating_point():
            tensor.data = tensor.data.to(state[name].dtype)
    return model


def check_state_fits(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Raise UserError unless the state has exactly the model's tensors and shapes."""
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
        hint = "; it comes from a model that averages tokens: create the model with global_pool='avg'" if pooled else ""
        raise UserError(f"{path} does not fit {type(model).__name__}: tensors {'; '.join(parts)}{hint}")


def _shape_differs(own: dict[str, Any], state: dict[str, Any], name: str) -> bool:
    """True if the state has a tensor of this name with another shape."""
    return name in state and getattr(state[name], "shape", None) != own[name].shape
