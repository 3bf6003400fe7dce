"""The networks that isomorph adds to timm's registry when it is imported."""

from contextlib import nullcontext
from difflib import get_close_matches
from typing import Any
from urllib.error import URLError

import timm
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import nn

from isomorph.errors import UserError
from isomorph.models import cifar_resnet, coatnet, convit, refined_vit, refined_vit_released, tcnn, tdrl_vit, vanillanet
from isomorph.models.download import impatient_downloads

_MODULES = (cifar_resnet, coatnet, convit, refined_vit, refined_vit_released, tcnn, tdrl_vit, vanillanet)


def names() -> list[str]:
    """Return the names of the models that isomorph adds to timm's registry, sorted.

    >>> "t_cifar_resnet20.cnn_cifar10" in iso.models.names()
    True
    """
    return sorted(name for module in _MODULES for name in module.default_cfgs)


def require_registered(name: str) -> None:
    """Check that timm's registry, which includes isomorph's models, has this model.

    Raises: UserError with the closest names when it does not.
    """
    if not timm.is_model(name.split(".")[0]):
        close = timm.list_models(f"*{name}*")[:3] or get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see `isomorph models` and timm.list_models()"
        raise UserError(f"there is no model {name!r}; {hint}")


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
    try:
        with impatient_downloads(_is_on_hub(name)) if pretrained else nullcontext():
            return timm.create_model(name, **arguments)
    except UserError:
        raise
    except Exception as error:
        if pretrained and _is_connection_error(error):
            raise UserError(
                f"cannot download the weights of {name}: its server does not answer; give --weights FILE, "
                "or --no-pretrained for random weights"
            ) from error
        raise UserError(f"timm cannot create {name}: {' '.join(str(error).split())[:300]}") from error


def _is_on_hub(name: str) -> bool:
    """Return True if timm loads the public weights of a model from the Hugging Face hub."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return bool(config and config.hf_hub_id and not config.file)


def _is_connection_error(error: BaseException | None) -> bool:
    """Return True if an error, or one that it follows from, says that a server could not be reached."""
    while error is not None:
        if isinstance(
            error, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError | TimeoutError | URLError
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


__all__ = ["create", "names"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
