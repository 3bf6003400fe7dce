"""Small runs: the T-CNN study of docs/methods/tcnn.md, a hybrid at 32 px, and networks on digits, as in the demo.

Schedules of the study and of the CNNs on digits begin at the first step, as when the figures of the docs were made.
"""

from collections.abc import Mapping
from typing import Any

LAYER3 = "layer3.*.conv?"

SURGERIES: dict[str, dict[str, Any]] = {
    "cnn": {},
    "exact": dict(recast=dict(where=LAYER3, init="exact", locality=5.0, gate=6.0)),
    "paper": dict(recast=dict(where=LAYER3, init="paper")),
    "annealed": dict(recast=dict(where=LAYER3, init="exact")),
}


def _cifar_recipe(surgery: str) -> dict[str, Any]:
    recipe: dict[str, Any] = dict(
        model=dict(name="cifar_resnet20", pretrained=True, **SURGERIES[surgery]),
        data=dict(source="cifar10", batch_size=128),
        augment=dict(crop_padding=4),
        optim=dict(
            lr=1e-3, gate_lr="100x", position_lr="20x", warmup_epochs=0.5, schedule_from="start"
        ),
        epochs=10,
        source="T-CNN at CIFAR scale, docs/methods/tcnn.md",
    )
    if surgery == "annealed":
        recipe["anneal"] = dict(epochs=2, start=[20.0, 15.0], stop=[3.0, 1.0])
    return recipe


def _digits_recipe(surgery: str) -> dict[str, Any]:
    recipe = _cifar_recipe(surgery)
    recipe["model"] |= dict(pretrained=False, start="weights")
    if "anneal" in recipe:
        recipe["anneal"]["epochs"] = 1.5
    recipe["data"] = dict(source="digits", size=[24, 24], batch_size=64)
    recipe["augment"] = dict(crop_padding=2, hflip=0.0)
    recipe["epochs"] = 3
    recipe["source"] = "isomorph demo"
    return recipe


# ConViT's initialisation in two of three blocks: with nine heads, each starts at one of the 3 x 3 neighbours.
CONVIT_SURGERY: dict[str, Any] = dict(
    recast=dict(rule="AttentionToGPSA", init="paper", where="blocks.[01].attn")
)


def _digits_vit(surgery: Mapping[str, Any] | None = None) -> dict[str, Any]:
    shape = dict(
        img_size=24,
        patch_size=4,
        embed_dim=54,
        depth=3,
        num_heads=9,
        class_token=False,
        global_pool="avg",
    )
    return dict(
        model=dict(name="vit_tiny_patch16_224", kwargs=shape, **(surgery or {})),
        data=dict(source="digits", size=[24, 24], batch_size=32),
        augment=dict(crop_padding=2, hflip=0.0),
        optim=dict(lr=2e-3, gate_lr="10x", position_lr="10x", warmup_epochs=1),
        epochs=8,
        source="isomorph demo; ConViT section 3",
    )


RECIPES: dict[str, dict[str, Any]] = {
    f"cifar_{surgery}": _cifar_recipe(surgery) for surgery in SURGERIES
}
RECIPES |= {
    f"digits_{surgery}": _digits_recipe(surgery) for surgery in SURGERIES if surgery != "cnn"
}
RECIPES["digits_finetune"] = _digits_recipe("cnn")
_FROM_SCRATCH = dict(lr=3e-3, warmup_epochs=1, schedule_from="start")
RECIPES["digits_cnn"] = _digits_recipe("cnn") | dict(epochs=6, optim=_FROM_SCRATCH)
RECIPES["digits_cnn"]["model"] |= dict(start="random")
# CoAtNet of 0.36M parameters for 32 px: its two stages of attention are on maps of 8 x 8 and 4 x 4. Without a hidden
# layer before the classifier, as when the figures of the docs were made.
HYBRID = dict(
    img_size=32,
    head_hidden=False,
    stem_stride=1,
    head_dim=16,
    depths=[2, 1, 2, 3, 1],
    widths=[16, 16, 32, 64, 128],
)
RECIPES["cifar_coatnet"] = dict(
    model=dict(name="coatnet_0", kwargs=HYBRID),
    data=dict(source="cifar10"),
    augment=dict(crop_padding=4),
    optim=dict(lr=2e-3, warmup_epochs=1),
    epochs=30,
    source="isomorph: a hybrid from scratch at 32 px, as in docs/evidence.md",
)
RECIPES |= {"digits_vit": _digits_vit(), "digits_convit": _digits_vit(CONVIT_SURGERY)}
