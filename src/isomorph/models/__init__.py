"""The networks that isomorph adds to timm's registry when it is imported."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import timm
from torch import nn

from isomorph.errors import UserError, one_line, unknown_model
from isomorph.models import cifar_resnet, coatnet, convit, refined_vit, tcnn, tdrl_vit, vanillanet
from isomorph.models.download import build_pretrained, is_connection_error
from isomorph.models.task_networks import ddpm_unet, mask_rcnn, text_transformer, upernet
from isomorph.spec import is_plain
from isomorph.surgery.rule import update_record

_MODULES = (cifar_resnet, coatnet, convit, refined_vit, tcnn, tdrl_vit, vanillanet)
_NETWORKS = (ddpm_unet, mask_rcnn, text_transformer, upernet)


def names() -> list[str]:
    """Return the names of the models that isomorph adds to timm's registry, sorted.

    >>> "t_cifar_resnet20.cnn_cifar10" in iso.models.names()
    True
    """
    return _registered(_MODULES)


def networks() -> list[str]:
    """Return the names of the networks for other tasks than classification that isomorph adds to timm, sorted.

    >>> "ddpm_unet" in iso.models.networks()
    True
    """
    return _registered(_NETWORKS)


def _registered(modules: Iterable[Any]) -> list[str]:
    return sorted(itertools.chain.from_iterable(module.default_cfgs for module in modules))


def require_registered(name: str) -> None:
    """Raises: UserError, with the closest names, if timm's registry does not have this model."""
    if not timm.is_model(name.partition(".")[0]):
        raise UserError(unknown_model(name, timm.list_models()))


def create(name: str, **arguments: Any) -> nn.Module:
    """Create a registered model with `timm.create_model`, turning every failure into a one-line error.

    `arguments` are those of `timm.create_model`.

    Raises: UserError for an unknown model, or arguments that timm cannot create it with.

    >>> model = iso.models.create("cifar_resnet20", num_classes=5)
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """
    require_registered(name)
    pretrained = bool(arguments.get("pretrained"))
    build = partial(timm.create_model, name, **arguments)
    try:
        if pretrained:
            model = build_pretrained(build, timm.get_pretrained_cfg(name, allow_unregistered=True))
        else:
            model = build()
    except UserError:
        raise
    except Exception as error:
        if pretrained and is_connection_error(error):
            raise UserError(
                f"cannot download the weights of {name}: its server does not answer; give checkpoint_path=FILE, "
                "or pretrained=False for random weights"
            ) from error
        message = f"timm cannot create {name}: {one_line(error)[:300]}"
        shown_arguments = ", ".join(
            f"{key}={str(value)[:40]}" for key, value in arguments.items() if key != "pretrained"
        )
        if shown_arguments:
            message += f" (with {shown_arguments})"
        raise UserError(message) from error
    recorded = {
        key: value for key, value in arguments.items() if key not in _OF_WEIGHTS and is_plain(value)
    }
    update_record(model, base={**arguments_to_record(model), "name": name, **recorded})
    return model


# Arguments of timm.create_model that say where weights come from, and not what the model is.
_OF_WEIGHTS = ("pretrained", "checkpoint_path", "cache_dir", "pretrained_filter_fn")


def arguments_to_record(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that a record spells out, because older records leave them out for another value."""
    arguments = getattr(model, "arguments_to_record", None)
    return arguments() if callable(arguments) else {}


def arguments_before(name: str) -> dict[str, Any]:
    """Return the arguments that a model's older records leave out, with the values that they had then."""
    if name.partition(".")[0] in coatnet.VARIANTS:
        return dict(coatnet.ARGUMENTS_BEFORE)
    return {}


__all__ = ["create", "names", "networks"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
