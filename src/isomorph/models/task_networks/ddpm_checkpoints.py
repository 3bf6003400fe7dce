"""Checkpoints of diffusion U-Nets of other programs, for `DDPMUNet`: of the code that TDRL names, and of diffusers."""

from typing import Any

from torch import Tensor, nn

_RESIDUAL_NAMES = {
    "block1.0": "norm1",
    "block1.2": "conv1",
    "temb_proj.1": "time_emb_proj",
    "block2.0": "norm2",
    "block2.3": "conv2",
    "shortcut": "conv_shortcut",
}
"""Names of layers in the released residual block, and in diffusers'."""
_ATTENTION_NAMES = {
    "attn.group_norm": "group_norm",
    "attn.proj_q": "to_q",
    "attn.proj_k": "to_k",
    "attn.proj_v": "to_v",
    "attn.proj": "to_out.0",
}
"""Names of layers in the released attention block, and in diffusers'."""
_OUTER_NAMES = {
    "time_embedding.timembedding.0": "time_proj",
    "time_embedding.timembedding.1": "time_embedding.linear_1",
    "time_embedding.timembedding.3": "time_embedding.linear_2",
    "head": "conv_in",
    "tail.0": "conv_norm_out",
    "tail.2": "conv_out",
}
"""Names of the layers outside the blocks in the released code, and in diffusers'."""


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert a checkpoint of the code that TDRL names, whose blocks are numbered through, or of diffusers."""
    state = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    if "conv_in.weight" in state:
        return {f"unet.{name}": tensor for name, tensor in state.items()}
    if "head.weight" not in state:
        return state
    unet: Any = model.unet
    names = dict(_OUTER_NAMES)
    for level, block in enumerate(unet.down_blocks):
        names |= _released_names(block, "downblocks", f"down_blocks.{level}", len(_count(names, "downblocks")))
    names |= _released_names(unet.mid_block, "middleblocks", "mid_block", 0)
    for level, block in enumerate(unet.up_blocks):
        names |= _released_names(block, "upblocks", f"up_blocks.{level}", len(_count(names, "upblocks")))
    return _renamed(state, names, model)


def _count(names: dict[str, str], part: str) -> set[str]:
    """Return the numbers of the released blocks of a part that have names already."""
    return {name.split(".")[1] for name in names if name.startswith(f"{part}.")}


def _released_names(block: Any, part: str, own: str, first: int) -> dict[str, str]:
    """Return the released names of the layers of one of diffusers' blocks, whose first is number `first` of a part."""
    names: dict[str, str] = {}
    for number in range(len(block.resnets)):
        released = f"{part}.{first + number}"
        names |= {f"{released}.{old}": f"{own}.resnets.{number}.{new}" for old, new in _RESIDUAL_NAMES.items()}
        names |= {f"{released}.{old}": f"{own}.attentions.{number}.{new}" for old, new in _ATTENTION_NAMES.items()}
    for sampler in ("downsamplers", "upsamplers"):
        if getattr(block, sampler, None):
            names[f"{part}.{first + len(block.resnets)}.main"] = f"{own}.{sampler}.0.conv"
    return names


def _renamed(state: dict[str, Tensor], names: dict[str, str], model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors under the model's names, 1x1 convolutions as the matrices of linear layers."""
    own, renamed = model.state_dict(), {}
    for old, tensor in state.items():
        layer, _, kind = old.rpartition(".")
        name = f"unet.{names[layer]}.{kind}" if layer in names else old
        is_linear = name in own and own[name].ndim == 2 and tensor.shape[2:] == (1, 1)
        renamed[name] = tensor.flatten(1) if is_linear else tensor
    return renamed
