"""Put the normalisation of images into the first layer, so that a model takes pixels as they are."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.modes import eval_mode
from isomorph.operations import ModuleCall, copy_module, in_eval_mode, observing
from isomorph.spec import record_config, spec_of
from isomorph.surgery.calls import run_model
from isomorph.surgery.comparison import relative_difference
from isomorph.surgery.modules import list_names
from isomorph.surgery.plain_layers import conv_like, layer_mismatch, plain_layer, same_padding
from isomorph.surgery.recast import apply_edit, check_model
from isomorph.surgery.reference_calls import own_example
from isomorph.surgery.rule import Edit, Rule, add_notes, check_number, copy_model
from isomorph.surgery.site import Site

_COLOURS = "rgb"
_GREY = ("grey", "gray")
# Largest relative difference in float64 of the model on raw and on normalised images.
_EQUAL = 1e-9


class SubtractMean(nn.Module):
    """Subtract a number from every channel; of a grey image make one of as many channels as there are numbers.

    Shape: x (B, C, H, W) or (B, 1, H, W) -> (B, C, H, W)
    """

    mean: Tensor

    def __init__(self, mean: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64).reshape(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


@dataclass(frozen=True)
class Absorb(Rule):
    """Rule that lets a convolution of normalised images read raw ones; see `absorb`.

    >>> rule = iso.surgery.Absorb((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    >>> rule.build(iso.surgery.Site(torch.nn.Conv2d(3, 4, 3, bias=False))).bias.shape
    torch.Size([4])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    channels: str = _COLOURS

    atol = 1e-5
    is_reverted = False
    keeps_output = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(map(float, self.mean)))
        object.__setattr__(self, "std", tuple(map(float, self.std)))
        check_number("scale", self.scale, (1e-6, 1e6))
        if len(self.mean) != len(self.std) or not self.std or min(self.std) <= 0:
            raise UserError("mean and std need a number for each channel, and std positive ones")
        colours = sorted(letter for letter in self.channels if letter in _COLOURS)
        is_order = colours == sorted(_COLOURS)
        if self.channels != _COLOURS and len(self.mean) != len(_COLOURS):
            raise UserError(
                f"channels {self.channels!r} is for models of colour images; this mean has {len(self.mean)}"
            )
        if not self.is_grey and not is_order:
            raise UserError(
                f"channels {self.channels!r} must be grey, or name r, g and b once each and further channels by other "
                "letters, like bgr or rgbx"
            )

    @property
    def order(self) -> list[int]:
        """The channel of the normalised image that each raw channel is, -1 for a further one."""
        if self.channels == _COLOURS or self.is_grey:
            return list(range(len(self.mean)))
        return [_COLOURS.find(letter) for letter in self.channels]

    @property
    def is_grey(self) -> bool:
        return self.channels in _GREY

    @property
    def raw_channels(self) -> int:
        """Number of channels of a raw image."""
        return 1 if self.is_grey else len(self.order)

    def normalise(self, raw: Tensor) -> Tensor:
        """Return the normalised image of a raw one. Shape: (B, C', H, W) -> (B, C, H, W)"""
        options: dict[str, Any] = {"dtype": raw.dtype, "device": raw.device}
        mean = torch.tensor(self.mean, **options).reshape(-1, 1, 1)
        std = torch.tensor(self.std, **options).reshape(-1, 1, 1)
        if not self.is_grey:
            raw = raw[:, [self.order.index(channel) for channel in range(len(self.mean))]]
        return (raw / self.scale - mean) / std

    def reason(self, site: Site) -> str | None:
        module = site.module
        plain = plain_layer(module)
        if not isinstance(plain, nn.Conv2d):
            return f"it is a {type(module).__name__}, not a convolution"
        if plain.in_channels != len(self.mean):
            return f"it reads {plain.in_channels} channels, and mean has {len(self.mean)}"
        is_same = not self.is_grey and self.order == list(range(len(self.mean)))
        if plain.groups != 1 and not is_same:
            return "it has groups, so that channels cannot be exchanged"
        return layer_mismatch(plain, nn.Conv2d)

    @torch.no_grad()
    def build(self, site: Site) -> nn.Module:
        self.check(site)
        module = site.module
        plain: Any = plain_layer(module)
        filters = plain.weight.double().unflatten(0, (plain.groups, -1))  # (G, out, in, k, k)
        sides = (plain.groups, 1, -1, 1, 1)
        raw_std = self.scale * filters.new_tensor(self.std).view(sides)
        raw_mean = self.scale * filters.new_tensor(self.mean).view(sides)
        filters = filters / raw_std
        weight = filters.flatten(0, 1)
        if plain.groups == 1:  # further channels read the zeros behind the others
            weight = F.pad(weight, (0, 0, 0, 0, 0, 1))[:, self.order]
        if pads_with_zeros(module):
            # The border is 0 of normalised images, which is the mean of raw ones.
            means = [*(self.scale * number for number in self.mean), 0.0]
            parts: dict[str, nn.Module] = {"shift": SubtractMean([means[i] for i in self.order])}
            padding = same_padding(module)
            if padding is not None:
                parts["pad"] = padding
            parts["conv"] = _with_filters(plain, weight, plain.bias)
            return nn.Sequential(OrderedDict(parts)).to(plain.weight)
        bias = -(filters * raw_mean).sum((2, 3, 4)).flatten()  # (G out,)
        if plain.bias is not None:
            bias += plain.bias.double()
        if self.is_grey:
            weight = weight.sum(1, keepdim=True)
        return _with_filters(plain, weight, bias)


def pads_with_zeros(module: nn.Module) -> bool:
    """True for a convolution that reads zeros around the image."""
    if same_padding(module) is not None:
        return True
    plain = plain_layer(module)
    assert isinstance(plain, nn.Conv2d)
    if plain.padding_mode != "zeros":
        return False
    return plain.padding not in ("valid", 0, (0, 0)) and plain.kernel_size != (1, 1)


def _with_filters(conv: nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """Return a convolution with other filters, in the precision of the first."""
    is_trained = conv.weight.requires_grad
    filters = nn.Parameter(weight.to(conv.weight), is_trained)
    if bias is None:
        return conv_like(conv, filters, None)
    return conv_like(conv, filters, nn.Parameter(bias.to(conv.weight), is_trained))


def absorb(
    model: nn.Module,
    mean: Sequence[float],
    std: Sequence[float],
    scale: float = 255.0,
    channels: str = _COLOURS,
    images: Tensor | None = None,
) -> nn.Module:
    """Return a copy of the model that takes raw images and computes the same of them as the model of normalised ones.

    The model reads (raw / scale - mean) / std. Its first convolution gets other filters and a bias; where it pads with
    zeros, the border must be the mean of raw images: then `mean * scale` is subtracted in front, which a note says, and
    scale and std go into the filters. Its `pretrained_cfg` then says mean 0 and std 1 / scale, so that `iso.evaluate`
    and exported files prepare images accordingly.

    Args:
        mean, std: numbers for each channel of the normalised image, as in timm's data config.
        scale: the largest value of a raw image, 1 where the images are between 0 and 1 already.
        channels: the order of the raw channels: "rgb", "bgr", "grey" (one channel, which stands for all), or with
            further channels, which are ignored, as other letters: "rgba", "bgrx".
        images: normalised images (B, C, H, W) to find the layer with, where the model does not say its size.

    Raises: UserError if no convolution reads the image, if another operation reads it too, or for a mean, std, scale or
        channels that do not fit.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> raw = iso.absorb(cnn, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> pixels = torch.randint(0, 256, (1, 3, 31, 33)).float()
        >>> torch.allclose(raw(pixels), cnn((pixels / 255 - 0.5) / 0.25), atol=1e-4)
        True
    """
    rule = Absorb(tuple(mean), tuple(std), scale, channels)
    check_model(model)
    new = copy_model(model)
    example = own_example(new) if images is None else images[:1]
    if not isinstance(example, Tensor):
        raise UserError("the model does not say which images it takes; give some as images=")
    names = tuple(layers_that_read(new, example))
    if not names:
        raise UserError(
            "no layer reads the images as they are; normalise them in front of the model"
        )
    for name in names:
        reason = rule.reason(Site(new, name))
        if reason:
            raise UserError(
                f"{name} reads the images, and cannot absorb their normalisation: {reason}"
            )
    padded = [name for name in names if pads_with_zeros(new.get_submodule(name))]
    edit = Edit(rule, names)
    _check_equal(new, edit, rule, example)
    new = apply_edit(new, edit)
    if padded:
        add_notes(
            new,
            f"{list_names(padded)}: it pads with zeros, so the mean is subtracted in front of it",
        )
    _record_raw_images(new, rule)
    return new


@torch.no_grad()
def layers_that_read(model: nn.Module, images: Tensor) -> list[str]:
    """Return the names of the layers whose input is the image itself."""
    leaves = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()) and not isinstance(module, nn.Identity):
            leaves.append(name)
    names: dict[str, None] = {}

    def note(call: ModuleCall) -> None:
        layer_input = call.input
        if (
            isinstance(layer_input, Tensor)
            and layer_input.shape == images.shape
            and torch.equal(layer_input, images)
        ):
            names[call.name] = None

    with eval_mode(model), observing(model, before=note, names=leaves):
        run_model(model, images)
    return list(names)


@torch.no_grad()
def _check_equal(model: nn.Module, edit: Edit, rule: Absorb, example: Tensor) -> None:
    """Raise UserError if the models differ in float64, on images of the example's size."""
    exact = in_eval_mode(copy_module(model).cpu().double())
    generator = torch.Generator().manual_seed(0)
    shape = (2, rule.raw_channels, *example.shape[2:])
    raw = rule.scale * torch.rand(shape, generator=generator, dtype=torch.float64)
    expected = run_model(exact, rule.normalise(raw))
    difference = relative_difference(expected, run_model(apply_edit(exact, edit), raw))
    if not difference <= _EQUAL:
        raise UserError(
            f"the outputs differ by {difference:.1g} on raw images: something else reads the image too; normalise "
            "images in front of the model"
        )


def _record_raw_images(model: nn.Module, rule: Absorb) -> None:
    """Let the model's data config say that images are raw."""
    config = dict(spec_of(model).config)
    count = rule.raw_channels
    config |= dict(mean=(0.0,) * count, std=(1 / rule.scale,) * count)
    if config.get("input_size"):
        config["input_size"] = (count, *config["input_size"][1:])
    record_config(model, config)
