"""Small runs on real data: the T-CNN study of docs/methods/tcnn.md, and the digits of the demo.

The study fine-tunes the public CIFAR-10 ResNet-20 on JPEG CIFAR-10, the same budget for all: alone, and with the six
convolutions of layer3 as attention, born exact, near the verge of locality, or annealed towards it. Schedules begin at
the first step, as they did when the figures of the docs were made.
"""

from typing import Any

LAYER3 = "layer3.*.conv?"

SURGERIES: dict[str, dict[str, Any]] = {
    "cnn": {},
    "exact": dict(recast=dict(where=LAYER3, init="exact", locality=5.0, gate=6.0)),
    "paper": dict(recast=dict(where=LAYER3, init="paper")),
    "annealed": dict(recast=dict(where=LAYER3, init="exact")),
}
"""Surgery before fine-tuning."""


def _cifar_recipe(birth: str) -> dict[str, Any]:
    """One column of the study."""
    anneal = dict(anneal=dict(epochs=2, start=[20.0, 15.0], stop=[3.0, 1.0])) if birth == "annealed" else {}
    return dict(
        model=dict(name="cifar_resnet20", pretrained=True, **SURGERIES[birth]),
        data=dict(source="cifar10", batch_size=128),
        augment=dict(crop_padding=4),
        optim=dict(lr=1e-3, gate_lr="100x", position_lr="20x", warmup_epochs=0.5, schedule_from="start"),
        epochs=10,
        source="T-CNN at CIFAR scale, docs/methods/tcnn.md",
        **anneal,
    )


def _digits_recipe(birth: str) -> dict[str, Any]:
    """One run of the demo: three epochs on the digits at 24 x 24, from the CNN of `digits_cnn`."""
    recipe = _cifar_recipe(birth)
    recipe["model"] |= dict(pretrained=False, start="weights")
    anneal = {"anneal": recipe["anneal"] | dict(epochs=1.5)} if "anneal" in recipe else {}
    return (
        recipe
        | anneal
        | dict(
            data=dict(source="digits", size=[24, 24], batch_size=64),
            augment=dict(crop_padding=2, hflip=0.0),
            epochs=3,
            source="isomorph demo",
        )
    )


def _late_recast(epoch: int) -> dict[str, Any]:
    """T-CNN Table 3 at CIFAR scale: trained from nothing by SGD, layer3 becoming attention after so many epochs."""
    return dict(
        model=dict(name="cifar_resnet20", recast=dict(where=LAYER3, init="paper"), recast_epoch=epoch),
        data=dict(source="cifar10", fraction=0.2, size=[32, 32], batch_size=128, test_crop="whole"),
        augment=dict(crop_padding=4),
        optim=dict(name="sgd", lr=0.1, gate_lr="1x", weight_decay=1e-4, warmup_epochs=0.5, schedule_from="start"),
        epochs=10,
        evaluate_every=5,
        source="T-CNN Table 3 at CIFAR scale, docs/methods/tcnn.md",
    )


RECIPES: dict[str, dict[str, Any]] = {f"cifar_{birth}": _cifar_recipe(birth) for birth in SURGERIES}
RECIPES |= {f"digits_{birth}": _digits_recipe(birth) for birth in SURGERIES if birth != "cnn"}
RECIPES["digits_finetune"] = _digits_recipe("cnn")
RECIPES["digits_cnn"] = _digits_recipe("cnn") | dict(
    epochs=6, optim=dict(lr=3e-3, warmup_epochs=1, schedule_from="start")
)
RECIPES["digits_cnn"]["model"] |= dict(start="random")
RECIPES |= {f"cifar_late_{epoch}": _late_recast(epoch) for epoch in (0, 2, 5, 10)}
