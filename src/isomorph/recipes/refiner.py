"""Refiner."""

from typing import Any

NARROW = dict(img_size=32, patch_size=4, embed_dim=64, depth=6, num_heads=4, mlp_ratio=4, weight_init="jax")
"""The study's network: 8 x 8 patches of a CIFAR image, linear layers at Xavier's scale."""
FORMS: dict[str, dict[str, Any]] = {
    "plain": dict(ratio=0, kernel=0),
    "dla": dict(ratio=0),
    "expansion": dict(kernel=1),
    "both": {},
}
"""Arguments of a Refined-ViT: neither, local attention alone, expansion alone, both (Refiner section 4.2)."""


def cifar_study(form: str, **more: Any) -> dict[str, Any]:
    """One run of docs/methods/refiner.md."""
    return dict(
        model=dict(name="refined_vit_b", kwargs=NARROW | FORMS[form] | more),
        data=dict(source="cifar10", fraction=0.2, size=[32, 32], batch_size=128),
        augment=dict(crop_padding=4),
        optim=dict(lr=3e-3, weight_decay=0.05, warmup_epochs=0.5, min_lr=1e-5),
        epochs=7,
        source="Refiner at CIFAR scale, docs/methods/refiner.md",
    )


RECIPES: dict[str, dict[str, Any]] = {f"cifar_refined_{form}": cifar_study(form) for form in FORMS}
