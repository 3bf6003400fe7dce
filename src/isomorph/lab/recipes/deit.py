"""DeiT, the plain networks that ConViT is compared with (ConViT Tables 1 and 2), and what runs on ImageNet-1k share.

The numbers are those that ConViT's tables print. Settings are DeiT's, of which ConViT keeps all but the batch size and
learning rate of its "+" models. Test crops are ConViT's .875; timm has .9 for DeiT.
"""

from typing import Any

# Fields of a recipe, or of a group in it, that differ from their defaults.
Fields = dict[str, Any]

# DeiT's augmentation, with every image three times in an epoch, which its paper calls a key ingredient.
DEIT: Fields = dict(
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=0.4,
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    smoothing=0.1,
    repeats=3,
)

# Epochs whose models are saved (ConViT Figs. 5 and 10, SM. D): denser at the start, where nonlocality falls.
KEEP_EPOCHS = [1, 2, 5, 10, *range(20, 301, 20)]


def images(batch: int, size: int | None = None, **more: Any) -> Fields:
    """Return the data fields of a folder of images: the batch over all processes, and the size if it is not usual."""
    fields: Fields = dict(source="imagefolder", batch_size=batch, workers=8)
    if size:
        fields["size"] = [size, size]
    return fields | more


def top1(value: str, condition: str = "", top5: str = "") -> str:
    """Return the text of a published top-1, and top-5 if it is given; empty without a top-1."""
    if not value:
        return ""
    more = f", {top5} top-5" if top5 else ""
    return f"{value} top-1{more} on ImageNet-1k{condition}"


def from_scratch(
    model: Fields, batch: int, lr: float, source: str, expected: str, fraction: float = 1.0
) -> Fields:
    """Return DeiT's 300 epochs, or as many more on a fraction of the data that as many images are shown."""
    return dict(
        model=model,
        data=images(batch, fraction=fraction, draw="first"),
        augment=DEIT,
        optim=dict(
            lr=lr,
            gate_lr="1x",
            weight_decay=0.05,
            warmup_epochs=5,
            schedule_from="start",
            min_lr=1e-5,
        ),
        epochs=round(300 / fraction),
        evaluate_every=round(1 / fraction),
        drop_path=0.1,
        amp="bf16",
        source=source,
        expected=expected,
    )


def _deit(name: str, source: str, expected: str, fraction: float = 1.0, **more: Any) -> Fields:
    recipe = from_scratch(dict(name=name), 1024, 1e-3, f"ConViT {source}", expected, fraction)
    recipe["data"]["crop_pct"] = 0.875
    return recipe | more


TEACHER = dict(teacher="regnety_160.deit_in1k", kind="hard")

# fraction of the images of each class: top-1 and top-5 of DeiT-S (Table 2)
SMALL = {
    0.05: ("34.8", "57.8"),
    0.1: ("48.0", "71.5"),
    0.3: ("66.1", "86.0"),
    0.5: ("74.6", "91.8"),
    1.0: ("79.9", "95.0"),
}

RECIPES: dict[str, Fields] = {}
for _fraction, (_first, _five) in SMALL.items():
    _expected = top1(_first, top5=_five)
    RECIPES[f"deit_s_{round(100 * _fraction)}pct"] = _deit(
        "deit_small_patch16_224", "Table 2, DeiT-S", _expected, _fraction
    )
RECIPES["deit_s_100pct"]["keep_every"] = KEEP_EPOCHS
RECIPES |= {
    "deit_ti": _deit(
        "deit_tiny_patch16_224", "Table 1, DeiT", top1("72.2"), keep_every=KEEP_EPOCHS
    ),
    "deit_s": _deit("deit_small_patch16_224", "Table 1, DeiT", top1("79.8")),
    "deit_b": _deit("deit_base_patch16_224", "Table 1, DeiT", top1("81.8"), keep_every=KEEP_EPOCHS),
    "deit_s_distilled": _deit(
        "deit_small_distilled_patch16_224",
        "Fig. 10 of the SM, distilled",
        "nonlocality below that of deit_s_100pct",
        distill=TEACHER | dict(token=True),
        keep_every=KEEP_EPOCHS,
    ),
}
