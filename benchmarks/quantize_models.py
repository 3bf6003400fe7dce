"""The networks of quantize.py, trained on CIFAR-10; a call continues what was interrupted.

    python benchmarks/quantize_models.py [--out runs/quantize] [--only vit]

Needs ISOMORPH_DATA with cifar10 and weights. Each network takes 2 to 15 minutes on one core.
"""

import argparse
from pathlib import Path
from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.byobnet import ByobNet, ByoModelCfg, MobileOneBlock, _mobileone_bcfg
from torch import nn

import isomorph as iso
from isomorph.lab.recipes import RECIPES

WARM_UP = dict(warmup_epochs=0.5, schedule_from="start", min_lr=1e-5)

default_cfgs = generate_default_cfgs(
    {"mobileone_cifar": dict(input_size=(3, 32, 32), crop_pct=1.0)}
)


@register_model
def mobileone_cifar(
    pretrained: bool = False, plain: bool = False, branches: int = 1, **kwargs: Any
) -> nn.Module:
    """MobileOne with 3 stages, for images of 32 x 32; `plain`: one convolution in every block, no other branch."""
    blocks = tuple(_mobileone_bcfg(d=(2, 3, 1), wf=(1, 1, 1), num_conv_branches=branches))
    shape = ByoModelCfg(blocks=blocks, stem_type="one", stem_chs=64, stem_pool="")
    model = build_model_with_cfg(ByobNet, "mobileone_cifar", False, model_cfg=shape, **kwargs)
    for block in model.modules():
        if plain and isinstance(block, MobileOneBlock):
            block.identity = block.conv_scale = None
    return model


def _run(name: str, epochs: int, lr: float, fraction: float = 0.4, **model: Any) -> dict[str, Any]:
    return dict(
        model=dict(name=name, **model),
        data=dict(
            source="cifar10", fraction=fraction, size=[32, 32], batch_size=128, test_crop="whole"
        ),
        augment=dict(crop_padding=4),
        optim=dict(lr=lr, weight_decay=0.05, **WARM_UP),
        epochs=epochs,
        evaluate_every=4,
        source="benchmarks/quantize.py",
    )


MOBILEONE_BLOCKS = dict(
    rule="LinearToPyramid", layout="P-W2S", init="paper", where=["stem", "stages.?.?"]
)
TCNN = dict(rule="ConvToGPSA", init="exact", locality=5.0, gate=6.0, where="layer3.*.conv?")
VIT = RECIPES["cifar_tdrl_scratch"]["model"]["kwargs"] | dict(patch_size=8)
RUNS = {
    "tcnn": _run("cifar_resnet20", 2, 1e-3, 0.2, pretrained=True, recast=TCNN),
    "mobileone_pyramids": _run("mobileone_cifar", 6, 2e-3, recast=MOBILEONE_BLOCKS),
    "vit_pyramids": _run("tdrl_vit_ti", 5, 1e-3, 0.2, kwargs=VIT),
    "mobileone_plain": _run("mobileone_cifar", 4, 2e-3, kwargs=dict(plain=True)),
    "vit_plain": _run("tdrl_vit_ti", 5, 2e-3, 0.2, kwargs=VIT | dict(layout="plain")),
}
"""Recipes by name; the CNN is the public ResNet-20."""
RUNS["tcnn"]["optim"] |= dict(gate_lr="100x", position_lr="20x")


def trained(name: str, out: Path) -> nn.Module:
    """Return a network in eval mode, with its branches; train it if it is not trained yet."""
    if name == "cnn":
        return timm.create_model("cifar_resnet20", pretrained=True).eval()
    return iso.train(iso.training.Recipe(**RUNS[name], out=out / name, name=name)).model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quantize"))
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    for name in RUNS:
        if options.only in name:
            trained(name, options.out)


if __name__ == "__main__":
    main()
