"""Loading of checkpoints that others wrote, wherever torch or timm loads: `checkpoint_path`, `load_state_dict`."""

from typing import Any

from torch import Tensor

Mixin: Any = object
"""Stands before timm's models, whose attributes a type checker does not know."""


class ForeignCheckpoints(Mixin):
    """Mixin for a model whose `load_state_dict` takes the layouts of others too, those that `iso.load_weights` knows.

    What has the model's own layout, or one that it does not know, is loaded as it is, strictly.
    """

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """Whether the tensors have a layout of others that the model knows."""
        raise NotImplementedError

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors in the model's own layout."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        if self.is_foreign(given):
            for name in given:
                del state_dict[prefix + name]
            state_dict |= {prefix + name: tensor for name, tensor in self.convert_foreign(given).items()}
        super()._load_from_state_dict(state_dict, prefix, *rest)
