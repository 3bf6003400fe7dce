"""CoAtNet: layouts compared without augmentation (Fig. 1)."""

from typing import Any

SMALL = dict(img_size=32, stem_stride=1, patch_size=4, head_dim=16)
WIDTHS = [16, 16, 32, 64, 128]
LAYOUTS: dict[str, dict[str, Any]] = {
    "c_c_c_c": dict(layout="SC-C-C-C", depths=[2, 1, 3, 4, 1], widths=WIDTHS),
    "c_c_c_t": dict(layout="SC-C-C-T", depths=[2, 1, 4, 3, 1], widths=WIDTHS),
    "c_c_t_t": dict(layout="SC-C-T-T", depths=[2, 1, 2, 3, 1], widths=WIDTHS),
    "c_t_t_t": dict(layout="SC-T-T-T", depths=[2, 1, 1, 3, 1], widths=WIDTHS),
    "vit_rel": dict(layout="PT", depths=[1, 7], widths=[64, 64]),
}
"""The study's networks, stages at 32, 16, 8, 4 places a side: 360,000 parameters within 3%, 23.6M MACs within 12%."""


def cifar_study(layout: str, **more: Any) -> dict[str, Any]:
    """One run of docs/methods/coatnet.md: nothing but images and labels."""
    return dict(
        model=dict(name="coatnet_0", kwargs=SMALL | LAYOUTS[layout] | more),
        data=dict(source="cifar10", fraction=0.1, size=[32, 32], batch_size=128),
        augment=dict(scale=[1.0, 1.0], hflip=0.0),
        optim=dict(lr=2e-3, weight_decay=0.0, warmup_epochs=1, min_lr=1e-5),
        epochs=20,
        evaluate_every=5,
        source="CoAtNet at CIFAR scale, docs/methods/coatnet.md",
    )


RECIPES: dict[str, dict[str, Any]] = {
    **{f"cifar_coatnet_{layout}": cifar_study(layout) for layout in LAYOUTS},
    **{f"cifar_coatnet_{layout}_placeblind": cifar_study(layout, relative="none") for layout in ("c_c_t_t", "vit_rel")},
}
