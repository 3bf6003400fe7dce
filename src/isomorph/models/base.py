"""What isomorph's networks share as models of timm: variants, stages, foreign checkpoints, gradient checkpointing."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from isomorph.errors import UserError
from isomorph.spec import ImageSize

# The tensors of a checkpoint by name.
State = dict[str, Tensor]

# Base class typed as Any: the mixin is combined with timm's models, whose attributes mypy does not
# know.
Mixin: Any = object


def image_cfg(**overrides: Any) -> dict[str, Any]:
    """Return the pretrained_cfg of a network for ImageNet at 224 or any other size; `overrides` replace its entries."""
    images = dict(
        input_size=(3, 224, 224), crop_pct=0.875, interpolation="bicubic", fixed_input_size=False
    )
    colours = dict(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    layers = dict(
        num_classes=1000, pool_size=None, first_conv="patch_embed.proj", classifier="head"
    )
    return images | colours | layers | overrides


class Variant(NamedTuple):
    """A variant of a network: its arguments, and a line that describes it."""

    arguments: dict[str, Any]
    description: str


def register_variants(
    module: str,
    create: Callable[..., nn.Module],
    variants: Mapping[str, Variant],
) -> None:
    """Add variants to timm's registry as functions of a module, built by `create(name, pretrained, **arguments)`."""
    for name, variant in variants.items():
        build = _entrypoint(module, create, name, variant)
        setattr(sys.modules[module], name, register_model(build))


def _entrypoint(
    module: str,
    create: Callable[..., nn.Module],
    name: str,
    variant: Variant,
) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(name, pretrained, **{**variant.arguments, **kwargs})

    build.__module__ = module
    build.__name__ = name
    build.__qualname__ = name
    build.__doc__ = variant.description
    return build


def build_variant(
    kind: type,
    name: str,
    pretrained: bool,
    /,
    feature_cfg: Any = None,
    own_cfg: Any = (),
    **arguments: Any,
) -> Any:
    """Build a variant through timm; the module of the class `kind` has its `checkpoint_filter_fn`.

    `feature_cfg` is timm's, by default that of a ViT. `own_cfg` are entries of the `pretrained_cfg` that depend on the
    arguments; the user's `pretrained_cfg_overlay` overrides them.
    """
    overlay = arguments.pop("pretrained_cfg_overlay", None) or {}
    if feature_cfg is None:
        feature_cfg = dict(out_indices=3, feature_cls="getter")
    return build_model_with_cfg(
        kind,
        name,
        pretrained,
        pretrained_filter_fn=own_filter(kind),
        pretrained_cfg_overlay={**dict(own_cfg), **overlay},
        feature_cfg=feature_cfg,
        **arguments,
    )


def own_filter(kind: type) -> Callable[[dict[str, Any], Any], State]:
    """Return the `checkpoint_filter_fn` of the module of a class, or of a base class; else one that changes nothing."""
    for base in kind.__mro__:
        convert = vars(sys.modules[base.__module__]).get("checkpoint_filter_fn")
        if convert is not None:
            return convert
    return lambda state, _: state


def unwrap_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors in a training checkpoint's `state_dict` or `model`, without DataParallel's prefix."""
    tensors = state_dict.get("state_dict", state_dict.get("model", state_dict))
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def renamed_in_order(state: Mapping[str, Tensor], names: Sequence[str]) -> State | None:
    """Return tensors under new names, given in the same order; None if the numbers or the last names do not agree."""
    last = [name.rpartition(".")[2] for name in names]
    if last != [name.rpartition(".")[2] for name in state]:
        return None
    return dict(zip(names, state.values(), strict=True))


class ForeignCheckpoints(Mixin):
    """Mixin for a model whose `load_state_dict` also takes the layouts that `iso.load_weights` converts.

    A position embedding of another image size is resized; unknown layouts are loaded unchanged and strictly. The
    conversion is the `checkpoint_filter_fn` of the model's module.
    """

    def is_foreign(self, state: State) -> bool:
        """Return True if the tensors have another code base's layout that the model can convert."""
        raise NotImplementedError

    def convert_foreign(self, state: State) -> State:
        """Return the tensors of another layout under the model's own names."""
        return own_filter(type(self))(state, self)

    # torch calls this hook for the module and its children, so it also works when the model is part
    # of another one
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        tensors = {
            name.removeprefix(prefix): t
            for name, t in state_dict.items()
            if name.startswith(prefix)
        }
        model_positions = getattr(self, "pos_embed", None)
        positions = tensors.get("pos_embed")
        resized = (
            model_positions is not None
            and positions is not None
            and model_positions.shape[1:-1] != positions.shape[1:-1]
        )
        if resized or self.is_foreign(tensors):
            for name in tensors:
                del state_dict[prefix + name]
            for name, tensor in self.convert_foreign(tensors).items():
                state_dict[prefix + name] = tensor
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def require_images(x: Tensor, patch: ImageSize | None = None, padded: bool = False) -> Tensor:
    """Return a batch of images unchanged, after checking it; under `torch.fx.wrap` any size can be traced.

    Shape: x (B, in_chans, height, width) -> as x
    Raises: UserError for another number of axes, an image without pixels, or a size that is not in whole patches.
    """
    if x.ndim != 4 or x.shape[2] < 1 or x.shape[3] < 1:
        raise UserError(
            f"images must have shape (B, in_chans, height, width), not {tuple(x.shape)}",
        )
    if patch:
        check_whole_patches((x.shape[2], x.shape[3]), patch, padded)
    return x


def check_whole_patches(size: tuple[int, ...], patch: tuple[int, ...], padded: bool) -> None:
    """Check an image size. Raises: UserError if it is below the patch size, or not a multiple of it unless `padded`."""
    if padded:
        return
    height, width = size
    ph, pw = patch
    if height < ph or width < pw:
        raise UserError(
            f"the {height} x {width} image is smaller than the {ph} x {pw} patch; give a larger one",
        )
    if height % ph or width % pw:
        raise UserError(
            f"the {height} x {width} image is not a multiple of the {ph} x {pw} patch; "
            "resize it, or create the model with dynamic_img_pad=True"
        )


def recompute(block: nn.Module, *arguments: Any) -> Any:
    """Return a block's output, and compute its activations again in the backward pass instead of storing them.

    That pass leaves the running statistics of BatchNorms as they are, except in a compiled model.
    """
    if torch.compiler.is_compiling():  # which takes no contexts of Python
        return checkpoint(block, *arguments, use_reentrant=False)

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), _keep_statistics(block)

    return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts)


@contextmanager
def _keep_statistics(module: nn.Module) -> Iterator[None]:
    """Keep BatchNorms from updating their statistics; they run the same operators, which checkpointing compares."""
    saved: list[tuple[_BatchNorm, float | None, dict[str, Tensor | None]]] = []
    for norm in module.modules():
        if not isinstance(norm, _BatchNorm) or norm.num_batches_tracked is None:
            continue
        saved.append((norm, norm.momentum, dict(norm._buffers)))
        norm.num_batches_tracked = norm.num_batches_tracked.clone()
        if norm.momentum is not None:
            norm.momentum = 0.0
        elif norm.running_mean is not None and norm.running_var is not None:
            # of a cumulative average, which no momentum keeps
            norm.running_mean = norm.running_mean.clone()
            norm.running_var = norm.running_var.clone()
    try:
        yield
    finally:
        for norm, momentum, buffers in saved:
            norm.momentum = momentum
            norm._buffers.update(buffers)


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Return the full names of the parameters that layers of the model exempt by a `no_weight_decay()` method."""
    exempt: set[str] = set()
    for prefix, module in model.named_modules():
        exempt_names = getattr(module, "no_weight_decay", None)
        if module is not model and callable(exempt_names):
            exempt |= {f"{prefix}.{name}" for name in exempt_names()}
    return exempt


class StagedNet(nn.Module):
    """A network that applies its `levels` to the image one after another, then pools and classifies.

    The levels are `embed` and the `stages`; `head_name` is the attribute with the classifier.

    Shape: x (B, in_chans, height, width) -> (B, num_classes)
    """

    grad_checkpointing = False
    head_name = "head"
    stages: Any
    global_pool: Any
    drop_rate: float

    def embed(self, x: Tensor) -> Tensor:
        """Return the first feature map of images. Shape: x (B, in_chans, height, width) -> (B, C, H, W)"""
        raise NotImplementedError

    def levels(self) -> list[Callable[[Tensor], Tensor]]:
        """Return the functions from each feature map (first the image) to the next."""
        return [self.embed, *(partial(self.run_stage, stage) for stage in self.stages)]

    def run_stage(self, stage: nn.Module, x: Tensor) -> Tensor:
        """Run the blocks of a stage, recomputing them in the backward pass if gradient checkpointing is on."""
        if self.grad_checkpointing:
            for block in stage.children():
                x = recompute(block, x)
            return x
        return stage(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map. Shape: x (B, in_chans, height, width) -> (B, C, H, W)"""
        for level in self.levels():
            x = level(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits, or the pooled features with `pre_logits`. Shape: x (B, C, H, W) -> (B, num_classes)"""
        x = F.dropout(self.global_pool(x), self.drop_rate, self.training)
        return x if pre_logits else getattr(self, self.head_name)(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the last feature map and those of chosen levels, as timm's models do; `norm` has no effect.

        Raises: ValueError for another format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt {output_fmt!r} is not available; use 'NCHW'")
        levels = self.levels()
        take, last = feature_take_indices(len(levels), indices)
        intermediates = []
        if stop_early:
            levels = levels[: last + 1]
        for i, level in enumerate(levels):
            x = level(x)
            if i in take:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def keep_stages(self, count: int) -> None:
        """Drop all stages after the first `count`."""
        self.stages = self.stages[:count]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last index and, with `prune_head`, the classifier; return the indices."""
        take, last = feature_take_indices(len(self.levels()), indices)
        self.keep_stages(last)
        if prune_head:
            self.reset_classifier(0, "")  # type: ignore[operator]
        return take

    def get_classifier(self) -> nn.Module:
        """Return the last layer, which gives the logits."""
        return getattr(self, self.head_name)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay besides biases and norms: those of attention."""
        return parameters_without_decay(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of storing their activations."""
        self.grad_checkpointing = enable
