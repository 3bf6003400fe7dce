"""Save and load masked autoencoders, with the tensor names of MAE's published checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from isomorph.checkpoints.files import read_contents
from isomorph.checkpoints.model import (
    build_checked,
    cast_like,
    check_state_fits,
    describe_model,
    read_parts,
    rebuild,
    record_data,
    write_model,
)
from isomorph.errors import UserError
from isomorph.models import create
from isomorph.models.masked_autoencoder import MaskedAutoencoder
from isomorph.operations import in_eval_mode
from isomorph.surgery.rule import edits

_DECODER_PREFIXES = ("decoder_", "mask_token")


def save_autoencoder(
    model: MaskedAutoencoder,
    path: str | Path,
    encoder_header: dict[str, str] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Save encoder and decoder as one safetensors file, from which `load_autoencoder` rebuilds them.

    Tensor names are those of MAE's published checkpoints, so `load_weights` loads the file into a `tdrl_vit_*`; for any
    other ViT, save the encoder with `save(model.encoder, path)`. A run gives the encoder's header and gathered tensors.

    Raises: UserError when the encoder cannot be rebuilt, the file cannot be written, or the autoencoder was edited as a
    whole (`iso.recast(model, rule)`) and not its encoder.
    """
    if edits(model):
        raise UserError(
            "edits of a whole autoencoder are not saved; edit its encoder: iso.recast(model.encoder, ...)"
        )
    decoder = {
        "depth": len(model.decoder_blocks),
        "width": model.width,
        "heads": model.heads,
        "mask": model.ratio,
        "normalise": model.normalise,
    }
    header = dict(encoder_header or describe_model(model.encoder))
    header["autoencoder"] = json.dumps(decoder)
    state = model.state_dict() if tensors is None else tensors
    write_model(
        header,
        {name.removeprefix("encoder."): tensor for name, tensor in state.items()},
        Path(path),
    )


def load_autoencoder(
    path: str | Path,
    encoder_name: str | None = None,
    heads: int = 16,
    mask: float = 0.75,
    normalise: bool = True,
    **arguments: Any,
) -> MaskedAutoencoder:
    """Load a masked autoencoder, in eval mode, from a file of `save_autoencoder` or a published MAE checkpoint.

    A file of `save_autoencoder` needs no other argument. A published checkpoint holds tensors only, and needs the
    encoder's name in timm as `encoder_name` (vit_base_patch16_224). `arguments` are passed to timm.create_model with
    it, and `heads`, `mask` (the share of patches) and `normalise` (each patch of the target) to `MaskedAutoencoder`; a
    file of `save_autoencoder` has its own. Images are normalised with ImageNet's mean and
    standard deviation, as in MAE, unless `encoder_name` has a pretrained tag with other values.

    Raises: UserError when the file is missing or damaged, has no decoder, or has tensors that do not fit the model.
    """
    path = Path(path)
    contents = read_contents(path)
    state = contents.tensors
    if not any(name.startswith("decoder_blocks.") for name in state):
        raise UserError(
            f"{path} holds an encoder and no decoder; generic distillation (G2SD) aligns with features of the "
            "teacher's decoder: give the full pre-training checkpoint, the one that still has decoder_* tensors"
        )
    if "autoencoder" in contents.header:
        if encoder_name:
            raise UserError(
                f"{path} names its encoder itself; leave out encoder_name={encoder_name!r} (mask.teacher_model in a "
                "recipe)"
            )
        if arguments:
            raise UserError(
                f"{path} records the arguments of its encoder; leave out {', '.join(sorted(arguments))}"
            )
        header = read_parts(contents)

        def build() -> MaskedAutoencoder:
            return MaskedAutoencoder(rebuild(header.base, header.edits), **header.autoencoder)

        model = build_checked(contents, build)
        record_data(model.encoder, header.data)
    elif encoder_name:
        encoder = create(encoder_name, **{"num_classes": 0, **arguments})
        # a tag selects another pretrained_cfg, with its own mean and std
        if "." not in encoder_name:
            record_data(encoder, {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD})
        embed = state.get("decoder_embed.weight")
        if not isinstance(embed, Tensor) or embed.ndim != 2:
            raise UserError(
                f"{path} has decoder blocks but no decoder_embed.weight: it is not an MAE checkpoint"
            )
        depth = len({name.split(".")[1] for name in state if name.startswith("decoder_blocks.")})
        model = MaskedAutoencoder(encoder, depth, len(embed), heads, mask, normalise)
    else:
        raise UserError(
            f"{path} does not name its encoder; give its timm name as encoder_name (mask.teacher_model in a recipe), "
            "for example vit_base_patch16_224"
        )
    model_state: dict[str, Any] = {}
    for name, tensor in state.items():
        if name == "decoder_pos_embed":  # MAE's sine-cosine table, which the model makes itself
            continue
        is_of_decoder = name.startswith(_DECODER_PREFIXES)
        model_state[name if is_of_decoder else f"encoder.{name}"] = tensor
    check_state_fits(model, model_state, path)
    cast_like(model, model_state).load_state_dict(model_state)
    return in_eval_mode(model)
