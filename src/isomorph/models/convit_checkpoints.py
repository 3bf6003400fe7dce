"""ConViT checkpoints: the authors' layout, timm's (the same), and our own, each into the other."""

from typing import Any

from timm.layers import resample_abs_pos_embed
from timm.models import vision_transformer
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import PSA
from isomorph.models.vit_cfg import unwrap_state_dict

PUBLIC_PARAMETER_NAMES = {"gate": "gating_param", "position": "pos_proj.weight"}
"""Our names of GPSA parameters, and the public ones; `pos_proj.bias`, constant along the softmax, has no effect."""


def has_public_layout(state: dict[str, Any]) -> bool:
    """Whether a checkpoint has the layout of the authors and of timm's convit_*."""
    return any(name.endswith(".attn.pos_proj.weight") for name in state)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Checkpoints of the authors, of timm's convit_* and our own, their position embedding resized to the model's grid.

    A checkpoint says how many patches it has, not in which rectangle: a public one with a square number is square; any
    other is taken to have the model's own grid where the number agrees.

    Raises: UserError when the checkpoint is of another family, or its grid cannot be known.
    """
    state_dict = unwrap_state_dict(state_dict)
    if "patch_embed.proj.weight" not in state_dict:
        raise UserError("the checkpoint is not of a ConViT: it has no patch_embed.proj.weight")
    state = {}
    for name, tensor in state_dict.items():
        stem, _, last = name.partition(".attn.")
        ours = next((own for own, public in PUBLIC_PARAMETER_NAMES.items() if public == last), last)
        if last != "pos_proj.bias":
            state[f"{stem}.attn.{ours}" if last else name] = tensor
    _require_same_gpsa_blocks(state, model)
    given = state.pop("pos_embed", None)
    state = vision_transformer.checkpoint_filter_fn(state, model)  # a patch of another size is resized
    if given is not None and model.pos_embed is not None:
        grid_size = model.patch_embed.grid_size
        state["pos_embed"] = _resize_positions(given, model.pos_embed, grid_size, has_public_layout(state_dict))
    return state


def _resize_positions(given: Tensor, own: Tensor, grid_size: tuple[int, int], square: bool) -> Tensor:
    """A position embedding for the grid. Shape: given (1, N, C) -> (1, H W, C)"""
    patches = given.shape[1]
    side = round(patches**0.5)
    if patches == own.shape[1] and not (square and side**2 == patches):
        return given
    if side**2 != patches:
        raise UserError(
            f"the checkpoint has positions for {patches} patches, no square, so their grid is unknown; "
            "load it into a model of its own img_size, then call set_input_size"
        )
    return resample_abs_pos_embed(given, list(grid_size), [side, side], num_prefix_tokens=0)


def _require_same_gpsa_blocks(state: dict[str, Any], model: nn.Module) -> None:
    """Raises: UserError when the checkpoint has its GPSA in other blocks than the model."""
    theirs, ours = ([n for n in names if n.endswith(".attn.gate")] for names in (state, model.state_dict()))
    if set(theirs) != set(ours):
        raise UserError(
            f"the checkpoint has GPSA in {len(theirs)} blocks, the model in {len(ours)} or in others: it is of another "
            f"family, or the model wants another local_up_to_layer"
        )


def public_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights in the layout of the authors' and timm's checkpoints, for their code.

    Raises: UserError for another model.
    """
    if not hasattr(model, "local_up_to_layer"):
        raise UserError(f"{type(model).__name__} is not a ConViT: it has no layout of theirs")
    if any(isinstance(module, PSA) for module in model.modules()):
        raise UserError("a ConViT with local_attention psa has no public layout: theirs all have gates")
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, _, last = name.partition(".attn.")
        state[f"{stem}.attn.{PUBLIC_PARAMETER_NAMES.get(last, last)}" if last else name] = tensor
        if last == "position":
            state[f"{stem}.attn.pos_proj.bias"] = tensor.new_zeros(len(tensor))
    return state
