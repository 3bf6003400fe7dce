"""ConViT checkpoints: the authors' layout, timm's (the same), and our own, each into the other."""

from typing import Any

from timm.models import vision_transformer
from torch import Tensor, nn

from isomorph.errors import UserError

PUBLIC_NAMES = {"gate": "gating_param", "position": "pos_proj.weight"}
"""Our names of GPSA parameters, and the public ones; `pos_proj.bias`, constant along the softmax, has no effect."""


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Checkpoints of the authors, of timm's convit_* and our own, their position embedding resized to the model's grid.

    Raises: UserError when the checkpoint is of another family.
    """
    state_dict = state_dict.get("model", state_dict)
    if "patch_embed.proj.weight" not in state_dict:
        raise UserError("the checkpoint is not of a ConViT: it has no patch_embed.proj.weight")
    state = {}
    for name, tensor in state_dict.items():
        stem, _, last = name.partition(".attn.")
        ours = next((own for own, public in PUBLIC_NAMES.items() if public == last), last)
        if last != "pos_proj.bias":
            state[f"{stem}.attn.{ours}" if last else name] = tensor
    refuse_foreign(state, model)
    if model.pos_embed is None:
        state.pop("pos_embed", None)
    return vision_transformer.checkpoint_filter_fn(state, model)


def refuse_foreign(state: dict[str, Any], model: Any) -> None:
    """Raises: UserError when the checkpoint has its GPSA in other blocks, or places on a grid that cannot be known."""
    found = sum(name.endswith(".attn.gate") for name in state)
    if found != model.local_up_to_layer:
        raise UserError(
            f"the checkpoint has {found} blocks of GPSA, the model {model.local_up_to_layer}: it is of another family, "
            f"or the model wants local_up_to_layer={found}"
        )
    own, given = (getattr(places, "shape", (0, 0))[1] for places in (model.pos_embed, state.get("pos_embed")))
    if own and given not in (0, own) and round(given**0.5) ** 2 != given:
        raise UserError(
            f"the checkpoint has positions for {given} patches, no square, so their grid is unknown; "
            "load it into a model of its own img_size, then call set_input_size"
        )


def public_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights in the layout of the authors' and timm's checkpoints, for their code."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, _, last = name.partition(".attn.")
        state[f"{stem}.attn.{PUBLIC_NAMES.get(last, last)}" if last else name] = tensor
        if last == "position":
            state[f"{stem}.attn.pos_proj.bias"] = tensor.new_zeros(len(tensor))
    return state
