"""Models inside wrappers of torch, timm and compilers, their hooks, and copies of them."""

import copy
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeVar

import torch
from timm.utils.model_ema import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

from isomorph.errors import UserError, first_line

Model = TypeVar("Model", bound=nn.Module)
Wrappers = tuple[type[nn.Module], ...]

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Classes that keep their model as `module`; a compiled model is the `_orig_mod` of its wrapper.
_WRAPPERS = (*_PARALLEL, AveragedModel, ModelEmaV2, ModelEmaV3)

_PERMANENT_HINT = (
    "make pruning and weight norms permanent first (prune.remove, remove_weight_norm); if a layer keeps a result of "
    "its last call, as timm's LeViT does, call model.train(), and call it under torch.no_grad()"
)


def hooks_on(module: nn.Module) -> list[str]:
    """Return the names of a module's hooks of all kinds, but for surgery's own and transformers' records."""
    # torch has no public list of hooks: each kind is a dict in a private attribute that ends in _hooks
    names = []
    for kind, hooks in vars(module).items():
        if not kind.endswith("_hooks") or not isinstance(hooks, dict):
            continue
        for registered in hooks.values():
            hook = getattr(registered, "hook", None) or registered
            is_reattached = getattr(getattr(hook, "__self__", hook), "reattached", False)
            if not is_reattached and not records_outputs(hook):
                names.append(getattr(hook, "__name__", type(hook).__name__))
    return names


def records_outputs(hook: Any) -> bool:
    """True for a hook by which transformers records the outputs of layers."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def unwrap(model: Any, to_copy: bool = True) -> Any:
    """Return the model inside the wrappers of torch.compile, DataParallel, DistributedDataParallel and averages.

    To be copied or saved, submodules are unwrapped too, in a copy: they have the names that they had before.

    Raises: UserError for what is not a model, or if a wrapper has hooks, which would be lost; to be copied, also for
        weights that are divided among processes (FSDP).

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> unwrap(torch.nn.DataParallel(torch.compile(cnn))) is cnn
        True
    """
    model = _innermost(model, _WRAPPERS)
    if not to_copy:
        return model
    # both kinds of FSDP; without their module, which is slow to import, there is none
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ()
    if any(isinstance(module, kinds) for module in model.modules()):
        raise UserError(
            "the weights are divided among processes (FSDP); gather them with get_model_state_dict and "
            "StateDictOptions(full_state_dict=True) of torch.distributed.checkpoint.state_dict, and load them into a "
            "model that is not divided"
        )
    if any(len(wrappers_of(module, _PARALLEL)) > 1 for module in model.modules()):
        model = copy_module(model)
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is not None:
                    parent._modules[name] = _innermost(child, _PARALLEL)
    return model


def _not_a_model(model: Any) -> UserError:
    """Return the error for what is not a model, with the way to one: text, a path, a class, tensors."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        return UserError(f"{model.__name__} is a class, not a model; give {model.__name__}()")
    shown = type(model).__name__ if len(repr(model)) > 40 else repr(model)
    advice = "create it first, with timm.create_model"
    if isinstance(model, str | Path):
        advice = (
            "open it with iso.load, an exported file with iso.deployment.open_artefact, or "
            "create it with timm.create_model"
        )
    return UserError(f"{shown} is not a model; {advice}")


def wrappers_of(module: Any, kinds: Wrappers = _WRAPPERS) -> list[Any]:
    """Return the wrappers around a model, the outermost first, the model last. Raises: UserError without a model."""
    if not isinstance(module, nn.Module):
        raise _not_a_model(module)
    name = "module" if isinstance(module, kinds) else "_orig_mod"
    inner = dict(module.named_children()).get(name)
    return [module] if inner is None else [module, *wrappers_of(inner, kinds)]


def _innermost(module: nn.Module, kinds: Wrappers) -> nn.Module:
    """Return the model inside wrappers. Raises: UserError if a wrapper has hooks."""
    *wrappers, inner = wrappers_of(module, kinds)
    for wrapper in wrappers:
        hooks = hooks_on(wrapper)
        if hooks:
            name = type(wrapper).__name__ if isinstance(wrapper, kinds) else "compiled model"
            raise UserError(
                f"the {name} has hooks ({', '.join(hooks)}); register them on the model inside"
            )
    return inner


def is_compiled(model: Any) -> bool:
    """True if the model or a submodule is compiled."""
    # model.compile() sets a private attribute of torch's and wraps nothing
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return any(
        "_orig_mod" in part._modules or part._compiled_call_impl is not None for part in parts
    )


def _copies_of_empty_containers(model: nn.Module) -> dict[int, Any]:
    """Return a new container for every empty one in a model, by its identity; most are for hooks.

    Given them, `copy.deepcopy` does not copy each by its slow protocol.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        for attribute in vars(module).values():
            kind = type(attribute)
            if kind in (dict, OrderedDict, set) and not attribute:
                copies[id(attribute)] = kind()
    return copies


def in_eval_mode(model: Model) -> Model:
    """Put a model into eval mode and return it: the `train` of some classes returns nothing."""
    model.eval()
    return model


def match_modes(replacement: nn.Module, original: nn.Module) -> None:
    """Give each module the mode of the original's module of its name, if there is one."""
    modes = {name: module.training for name, module in original.named_modules()}
    for name, module in replacement.named_modules():
        mode = modes.get(name, module.training)
        if mode != module.training:
            module.train(mode)


@torch.inference_mode(False)  # the copy can be trained
def copy_module(model: nn.Module) -> nn.Module:
    """Return a deep copy. Raises: UserError if torch cannot copy it, as with pruned layers."""
    try:
        new = copy.deepcopy(model, _copies_of_empty_containers(model))
    except (RuntimeError, TypeError) as error:
        reason = first_line(error).partition(". ")[0]
        advice = _PERMANENT_HINT
        if isinstance(error, TypeError):
            advice = "take files, threads and locks out of its attributes first"
        raise UserError(f"the model cannot be copied ({reason}); {advice}") from None
    # a feature extractor of torchvision is copied in train mode
    match_modes(new, model)
    _copy_attributes(model, new)
    return new


def _copy_attributes(model: nn.Module, copied: nn.Module) -> None:
    """Give the parameters of a copy the attributes that torch did not copy; those that it copied stay."""
    copies = dict(copied.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in copies:
            continue
        own = vars(copies[name])
        for attribute, value in vars(parameter).items():
            own.setdefault(attribute, value)
