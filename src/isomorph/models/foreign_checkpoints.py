"""Mixin that lets `load_state_dict` load checkpoints of other code bases."""

from typing import Any

from torch import Tensor

Mixin: Any = object
"""Base class typed as Any: the mixin is combined with timm's models, whose attributes mypy does not know."""


class ForeignCheckpoints(Mixin):
    """Mixin for a model whose `load_state_dict` also takes the layouts that `iso.load_weights` converts.

    It therefore works wherever torch or timm loads weights, as with timm's `checkpoint_path`. A position embedding of
    another image size is resized. A state dict of the model's own layout and size, or of a layout that it does not
    know, is loaded unchanged and strictly.
    """

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """Return True if the tensors have another code base's layout that the model can convert."""
        raise NotImplementedError

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the same tensors in the model's own layout."""
        raise NotImplementedError

    # torch calls this hook for the module and its children, so it also works when the model is part of another one
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        if self.is_foreign(given) or self._has_other_positions(given):
            for name in given:
                del state_dict[prefix + name]
            state_dict |= {prefix + name: tensor for name, tensor in self.convert_foreign(given).items()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _has_other_positions(self, state: dict[str, Tensor]) -> bool:
        """Return True if the tensors have a position embedding of another number of patches."""
        own, given = getattr(self, "pos_embed", None), state.get("pos_embed")
        return own is not None and given is not None and own.shape[1:-1] != given.shape[1:-1]
