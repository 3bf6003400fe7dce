"""Convert ConViT checkpoints between isomorph's layout and that of the authors and timm."""

from typing import Any

from timm.layers import resample_abs_pos_embed
from timm.models import vision_transformer
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import PSA
from isomorph.models.vit_cfg import unwrap_state_dict

PUBLIC_PARAMETER_NAMES = {"gate": "gating_param", "position": "pos_proj.weight"}
"""isomorph's and the public names of GPSA parameters; `pos_proj.bias`, constant along the softmax, has no effect."""


def has_public_layout(state: dict[str, Any]) -> bool:
    """Return True if a checkpoint has the layout of the authors and of timm's convit_*."""
    return any(name.endswith(".attn.pos_proj.weight") for name in state)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Convert a checkpoint of the authors, timm's convit_* or isomorph, resizing its position embedding.

    A checkpoint holds the number of its patches, not their grid: a public one with a square number is taken to be
    square; any other is taken to have the model's grid if the numbers agree.

    Raises: UserError if the checkpoint is not a ConViT's, has GPSA in other blocks, or its grid is unknown.
    """
    state_dict = unwrap_state_dict(state_dict)
    if "patch_embed.proj.weight" not in state_dict:
        raise UserError("the checkpoint is not a ConViT's: it has no patch_embed.proj.weight")
    state = {}
    for name, tensor in state_dict.items():
        stem, _, last = name.partition(".attn.")
        own = next((own for own, public in PUBLIC_PARAMETER_NAMES.items() if public == last), last)
        if last != "pos_proj.bias":
            state[f"{stem}.attn.{own}" if last else name] = tensor
    _require_same_gpsa_blocks(state, model)
    given = state.pop("pos_embed", None)
    state = vision_transformer.checkpoint_filter_fn(state, model)  # a patch of another size is resized
    if given is not None and model.pos_embed is not None:
        grid_size = model.patch_embed.grid_size
        state["pos_embed"] = _resize_positions(given, model.pos_embed, grid_size, has_public_layout(state_dict))
    return state


def _resize_positions(given: Tensor, own: Tensor, grid_size: tuple[int, int], square: bool) -> Tensor:
    """Resize a position embedding to the grid. Shape: given (1, N, C) -> (1, H W, C)"""
    patches = given.shape[1]
    side = round(patches**0.5)
    if patches == own.shape[1] and not (square and side**2 == patches):
        return given
    if side**2 != patches:
        raise UserError(
            f"the checkpoint has {patches} patches, not a square number, so their grid is unknown; "
            "load it into a model with its img_size, then call set_input_size"
        )
    return resample_abs_pos_embed(given, list(grid_size), [side, side], num_prefix_tokens=0)


def _require_same_gpsa_blocks(state: dict[str, Any], model: nn.Module) -> None:
    """Raises: UserError if the checkpoint does not have GPSA in the same blocks as the model."""
    theirs, own = ([n for n in names if n.endswith(".attn.gate")] for names in (state, model.state_dict()))
    if set(theirs) != set(own):
        raise UserError(
            f"the checkpoint has GPSA in {len(theirs)} blocks, which are not the model's {len(own)}; "
            "create the model with another local_up_to_layer, or give a ConViT's checkpoint"
        )


def public_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights in the layout of the authors and timm, to load with their code.

    Raises: UserError if the model is not a ConViT, or has local_attention psa.
    """
    if not hasattr(model, "local_up_to_layer"):
        raise UserError(f"{type(model).__name__} is not a ConViT and has no public layout")
    if any(isinstance(module, PSA) for module in model.modules()):
        raise UserError("a ConViT with local_attention psa has no public layout, as public ConViTs all have gates")
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, _, last = name.partition(".attn.")
        state[f"{stem}.attn.{PUBLIC_PARAMETER_NAMES.get(last, last)}" if last else name] = tensor
        if last == "position":
            state[f"{stem}.attn.pos_proj.bias"] = tensor.new_zeros(len(tensor))
    return state
