"""The U-Net of denoising diffusion models (Ho et al., 2020), built on diffusers' `UNet2DModel`, as TDRL trains it.

It predicts the noise in an image at a time step. Attention is on one of its resolutions and in the middle; its 1x1
convolutions are linear layers here, `to_q`, `to_k`, `to_v` and `to_out.0`, which `LinearToPyramid` recasts.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from isomorph.errors import UserError, optional_module
from isomorph.models.base import (
    State,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    renamed_in_order,
)
from isomorph.spec import ImageSize

if TYPE_CHECKING:
    from diffusers import UNet2DModel


class DDPMUNet(nn.Module):
    """Predict the noise in images at a time step of a diffusion, with a U-Net of residual blocks and some attention.

    `channels` are the widths from the full resolution down, each level at half the resolution of the one before;
    `blocks` residual blocks lead down each level and one more leads up; `attention` are the levels with self-attention
    of one head after each block. The middle always has one attention layer. Time steps are 0 to `time_steps` - 1.

    Shape: x (B, in_chans, H, W), t (B,) or one number for all -> (B, in_chans, H, W)
    Source: Ho et al. (2020), appendix B, in the widths of the code that TDRL names; on diffusers' UNet2DModel
    Raises: UserError without diffusers, for classes, and for images whose sides the levels cannot halve.

    >>> net = timm.create_model("ddpm_unet", channels=(32, 32), blocks=1, attention=(1,))
    >>> net(torch.randn(2, 3, 16, 24), torch.tensor([0, 999])).shape
    torch.Size([2, 3, 16, 24])
    """

    def __init__(
        self,
        channels: Sequence[int] = (128, 256, 384, 512),
        blocks: int = 2,
        attention: Sequence[int] = (2,),
        drop_rate: float = 0.15,
        groups: int = 32,
        time_steps: int = 1000,
        in_chans: int = 3,
        num_classes: int = 0,
    ) -> None:
        super().__init__()
        if num_classes:
            raise UserError(
                f"num_classes {num_classes} does not fit: ddpm_unet has no classes; leave it out or give 0",
            )
        self.channels = tuple(channels)
        self.time_steps = time_steps
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        self.num_features = channels[0]
        unets = optional_module(
            "diffusers.models.unets.unet_2d", "ddpm_unet needs diffusers", "diffusion"
        )
        kinds = ["Attn" if level in attention else "" for level in range(len(channels))]
        self.unet: UNet2DModel = unets.UNet2DModel(
            in_channels=in_chans,
            out_channels=in_chans,
            # a table, which reset_parameters fills with sinusoids and freezes
            time_embedding_type="learned",
            num_train_timesteps=time_steps,
            down_block_types=tuple(f"{kind}DownBlock2D" for kind in kinds),
            up_block_types=tuple(f"{kind}UpBlock2D" for kind in reversed(kinds)),
            block_out_channels=tuple(channels),
            layers_per_block=blocks,
            attention_head_dim=None,  # one head as wide as the level
            norm_num_groups=groups,
            dropout=drop_rate,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew: Xavier, nearly zero at the end of residual branches; and set the table of times."""
        for name, layer in self.unet.named_modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                ends_branch = name.endswith((".conv2", "to_out.0", "conv_out"))
                nn.init.xavier_uniform_(layer.weight, 1e-5 if ends_branch else 1.0)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        table = self.unet.time_proj.weight
        table.copy_(sinusoids(*table.shape)).requires_grad_(False)

    def forward(self, x: Tensor, t: Tensor | int) -> Tensor:
        """Predict the noise in images x at time steps t. Shape: (B, C, H, W), (B,) -> (B, C, H, W)"""
        H, W = x.shape[-2:]
        step = 2 ** (len(self.channels) - 1)
        if H % step or W % step:
            raise UserError(
                f"images of {H} x {W} do not fit this U-Net; its sides must be multiples of {step}",
            )
        return self.unet(x, t, return_dict=False)[0]

    def example_inputs(self, batch: int, size: ImageSize | None = None) -> dict[str, Tensor]:
        """Return random images with time steps spread over the diffusion. Shape: -> x (batch, C, H, W), t (batch,)"""
        height, width = size or self.pretrained_cfg["input_size"][-2:]  # type: ignore[index]
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch, self.in_chans, height, width, generator=generator)
        spread = torch.linspace(0, self.time_steps - 1, batch + 2)
        steps = spread[1:-1].round().long()
        return {"x": images, "t": steps}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of storing their activations."""
        if enable:
            self.unet.enable_gradient_checkpointing()
        else:
            self.unet.disable_gradient_checkpointing()

    def get_classifier(self) -> None:
        """Return None: the network does not classify."""


def sinusoids(steps: int, width: int) -> Tensor:
    """Return sin and cos, alternating, at `width` / 2 frequencies from 1 to 1 / 10,000. Shape: -> (steps, width)"""
    times = torch.arange(steps, dtype=torch.float64)[:, None]
    channels = torch.arange(0, width, 2, dtype=torch.float64)
    frequencies = torch.exp(-math.log(10_000) * channels / width)  # (width / 2,)
    angles = times * frequencies
    waves = torch.stack([angles.sin(), angles.cos()], -1)
    return waves.flatten(1)  # (steps, width)


def checkpoint_filter_fn(state_dict: State, model: nn.Module) -> State:
    """Convert a checkpoint of diffusers, or of the code that TDRL names: same order, 1x1 convolutions for matrices."""
    state = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    if "conv_in.weight" in state:
        return {f"unet.{name}": tensor for name, tensor in state.items()}
    if "head.weight" not in state:
        return state
    model_state = model.state_dict()
    names: list[str] = []
    for part in _released_order(model.unet):
        names += [name for name in model_state if name.startswith(f"unet.{part}.")]
    parts = ("time_embedding", "head", "downblocks", "middleblocks", "upblocks", "tail")
    order = sorted(state, key=lambda name: parts.index(name.partition(".")[0]))
    renamed = renamed_in_order({name: state[name] for name in order}, names) or state
    converted = {}
    for name, tensor in renamed.items():
        if name in model_state and model_state[name].ndim == 2 and tensor.shape[2:] == (1, 1):
            tensor = tensor.flatten(1)
        converted[name] = tensor
    return converted


def _released_order(unet: Any) -> Iterator[str]:
    """Yield the parts of a network in the order of the released code: times, first convolution, blocks, last one."""
    yield from ("time_proj", "time_embedding", "conv_in")
    for i, block in enumerate(unet.down_blocks):
        yield from _parts_of(f"down_blocks.{i}", block)
    yield from _parts_of("mid_block", unet.mid_block)
    for i, block in enumerate(unet.up_blocks):
        yield from _parts_of(f"up_blocks.{i}", block)
    yield from ("conv_norm_out", "conv_out")


def _parts_of(name: str, block: Any) -> Iterator[str]:
    for i in range(len(block.resnets)):
        yield from (f"{name}.resnets.{i}", f"{name}.attentions.{i}")
    yield from (f"{name}.downsamplers", f"{name}.upsamplers")


_PIXELS = dict(
    input_size=(3, 32, 32), crop_pct=1.0, interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3
)
_CFG = image_cfg(url="", num_classes=0, first_conv="unet.conv_in", classifier=None, **_PIXELS)
default_cfgs = generate_default_cfgs({"ddpm_unet": _CFG})
_DESCRIPTION = "DDPM U-Net: 83.1M parameters, 103.2M with pyramids in training; FID 10.4, 9.2 with them (TDRL Table 3)."
register_variants(
    __name__, partial(build_variant, DDPMUNet), {"ddpm_unet": Variant({}, _DESCRIPTION)}
)
