"""CoAtNet: Tables 4 and 5 and the ablations (Fig. 1, Tables 2, 6 to 9), with the settings of Table 10.

Pre-training is at 224 on ImageNet-1k (300 epochs), ImageNet-21k (90) or JFT (14) with batch size 4096. Fine-tuning is
on ImageNet-1k at 384 or 512 for 30 epochs with a constant learning rate of 5e-5 and weights averaged with .9999, from
the weights of the run before (`--model.weights`). Warm-up is given in epochs instead of steps: an epoch has 312 steps
on ImageNet-1k and 73,242 on JFT-300M. JFT is not public; its recipes are for those who have it (`--data.root`).
What the paper leaves open: docs/guides/readings.md.
"""

from typing import Any

from isomorph.lab.recipes.deit import Fields, images

IN1K = "ImageNet-1k"
IN21K = "ImageNet-21k"
JFT_300M = "JFT-300M (not public)"
JFT_3B = "JFT-3B (not public)"
# Stochastic depth by size: trained on ImageNet-1k, on ImageNet-21k, and on JFT, in pre-training and in fine-tuning.
DROP_PATH = {0: 0.2, 1: 0.3, 2: 0.5, 3: 0.7}
DROP_PATH_IN21K = {2: 0.3, 3: 0.5, 4: 0.7}
DROP_PATH_JFT = {3: 0.0, 4: 0.1, 5: 0.0, 6: 0.0, 7: 0.0}
DROP_PATH_AFTER_JFT = {3: 0.1, 4: 0.3, 5: 0.2, 6: 0.2, 7: 0.2}
DROP_PATH_FINE_TUNED = {IN1K: DROP_PATH, IN21K: DROP_PATH_IN21K}
# 20,000 steps in epochs.
JFT_WARMUP_EPOCHS = {JFT_300M: 0.273, JFT_3B: 0.0273}
JFT_LEARNING_RATES = {3: 1e-3, 4: 5e-4, 5: 5e-4, 6: 5e-4, 7: 5e-4}

PRETRAINING_DATA = images(4096, 224, test_crop="center")


def _recipe(size: int, kwargs: Fields, source: str, expected: str, **more: Any) -> Fields:
    recipe: Fields = dict(
        model=dict(name=f"coatnet_{size}", kwargs=kwargs),
        amp="bf16",
        source=f"CoAtNet {source}",
        expected=expected,
    )
    return recipe | more


def _adamw(lr: float, decay: float, schedule: str, **more: Any) -> Fields:
    return dict(name="adamw", lr=lr, weight_decay=decay, schedule=schedule, clip_grad=1.0, **more)


def _randaugment(magnitude: int | None) -> Fields:
    """Return RandAugment 2, M as in Google's code: operations always apply, levels are linear in M beyond 10."""
    if magnitude is None:
        return {}
    return dict(auto_augment=f"rand-m{magnitude}-n2-p1.0-mmax30")


def _from_scratch(size: int, source: str, top1: str, **kwargs: Any) -> Fields:
    return _recipe(
        size,
        kwargs,
        source,
        expected=f"{top1} top-1 on {IN1K}",
        data=PRETRAINING_DATA,
        augment=_randaugment(15) | dict(mixup=0.8, smoothing=0.1),
        optim=_adamw(1e-3, 0.05, "cosine", min_lr=1e-5, warmup_epochs=32),
        epochs=300,
        drop_path=DROP_PATH[size],
    )


def _pretrain_in21k(
    size: int,
    source: str,
    precision: str = "",
    magnitude: int | None = None,
    epochs: int = 90,
    **kwargs: Any,
) -> Fields:
    return _recipe(
        size,
        kwargs,
        source,
        expected=f"{precision} precision@1 on {IN21K}" if precision else "",
        augment=_randaugment(magnitude) | dict(smoothing=0.0001),
        dataset=IN21K,
        data=PRETRAINING_DATA,
        optim=_adamw(1e-3, 0.01, "linear", min_lr=1e-5, warmup_epochs=5),
        epochs=epochs,
        drop_path=DROP_PATH_IN21K[size],
        loss="sigmoid",
    )


def _pretrain_jft(size: int, source: str, data: str = JFT_300M, **kwargs: Any) -> Fields:
    lr = JFT_LEARNING_RATES[size]
    warmup_epochs = JFT_WARMUP_EPOCHS[data]
    return _recipe(
        size,
        kwargs,
        source,
        expected=f"needs {data}",
        data=PRETRAINING_DATA,
        augment=_randaugment(5) | dict(smoothing=0.0001),
        optim=_adamw(lr, 0.01, "linear", min_lr=1e-5, warmup_epochs=warmup_epochs),
        epochs=14,
        loss="sigmoid",
        dataset=data.partition(" ")[0],
        drop_path=DROP_PATH_JFT[size],
    )


def _fine_tune(
    size: int,
    pixels: int,
    before: str,
    source: str,
    top1: str,
    magnitude: int | None = None,
    **kwargs: Any,
) -> Fields:
    batch = 1024 if before == IN21K else 512
    drop = DROP_PATH_FINE_TUNED.get(before, DROP_PATH_AFTER_JFT)[size]
    augment = _randaugment(magnitude) | dict(smoothing=0.1)
    if before == IN1K:
        augment["mixup"] = 0.8
    recipe = _recipe(
        size,
        dict(img_size=pixels) | kwargs,
        source,
        expected=f"{top1} top-1 on {IN1K}, from --model.weights trained on {before}",
        data=images(batch, pixels, test_crop="whole"),
        augment=augment,
        optim=_adamw(5e-5, 1e-8, "constant"),
        epochs=30,
        drop_path=drop,
        ema=0.9999,
    )
    recipe["model"]["start"] = "weights"
    return recipe


def _table_4() -> dict[str, Fields]:
    """Return Table 4: ImageNet-1k alone and after ImageNet-21k; `_ra`: pre-trained with RandAugment."""
    recipes = {}
    rows = {
        0: ("81.6", "83.9", ""),
        1: ("83.3", "85.1", ""),
        2: ("84.1", "85.7", "85.9"),
        3: ("84.5", "85.8", "86.0"),
    }
    for size, (small, larger, largest) in rows.items():
        magnitude = 20 if size == 3 else 15
        name = f"coatnet_{size}"
        recipes[name] = _from_scratch(size, "Table 4", small)
        recipes[f"{name}_384"] = _fine_tune(size, 384, IN1K, "Table 4", larger, magnitude)
        if largest:
            recipes[f"{name}_512"] = _fine_tune(size, 512, IN1K, "Table 4", largest, magnitude)
    many: dict[str, tuple[int, int | None, int, str, str]] = {
        "coatnet_2_in21k": (2, None, 90, "87.1", "87.3"),
        "coatnet_3_in21k": (3, None, 90, "87.6", "87.9"),
        "coatnet_4_in21k": (4, None, 90, "87.9", "88.1"),
        "coatnet_4_in21k_ra": (4, 5, 90, "88.3", "88.4"),
        "coatnet_4_in21k_ra_150ep": (4, 5, 150, "88.4", "88.56"),
    }
    for name, (size, rand, epochs, larger, largest) in many.items():
        precision = "53.0" if size == 3 else ""
        recipes[name] = _pretrain_in21k(size, "Table 4, pre-training", precision, rand, epochs)
        recipes[f"{name}_384"] = _fine_tune(size, 384, IN21K, "Table 4", larger, rand)
        recipes[f"{name}_512"] = _fine_tune(size, 512, IN21K, "Table 4", largest, rand)
    return recipes


def _table_5() -> dict[str, Fields]:
    """Return Table 5: after JFT. Its CoAtNet-3 has the stride in the depthwise convolution."""
    recipes = {}
    dagger = dict(stride_on="depthwise")
    rows: dict[int, tuple[str, dict[int, str], Fields]] = {
        3: (JFT_300M, {384: "88.52", 512: "88.81"}, dagger),
        4: (JFT_300M, {512: "89.11"}, {}),
        5: (JFT_300M, {512: "89.77"}, {}),
        6: (JFT_3B, {512: "90.45"}, {}),
        7: (JFT_3B, {512: "90.88"}, {}),
    }
    for size, (data, results, kwargs) in rows.items():
        images_of = "jft" if data == JFT_300M else "jft3b"
        name = f"coatnet_{size}_{images_of}"
        recipes[name] = _pretrain_jft(size, "Table 5, pre-training", data, **kwargs)
        for pixels, top1 in results.items():
            recipes[f"{name}_{pixels}"] = _fine_tune(
                size, pixels, data, "Table 5", top1, 5, **kwargs
            )
    return recipes


def _tables_6_to_9() -> dict[str, Fields]:
    """Return Tables 6 to 9."""
    recipes = {}
    blind: Fields = dict(source="Table 6, without relative attention", relative="none")
    recipes["coatnet_2_placeblind"] = _from_scratch(2, top1="83.8", **blind)
    recipes["coatnet_2_placeblind_384"] = _fine_tune(
        2, 384, IN1K, top1="85.3", magnitude=15, **blind
    )
    recipes["coatnet_3_placeblind_in21k"] = _pretrain_in21k(3, precision="52.8", **blind)
    recipes["coatnet_3_placeblind_in21k_384"] = _fine_tune(3, 384, IN21K, top1="87.4", **blind)

    v1: Fields = dict(depths=[2, 2, 2, 18, 2])
    recipes["coatnet_2_v1"] = _from_scratch(2, "Table 7, V1", "83.4", **v1)
    recipes["coatnet_2_v2"] = _from_scratch(2, "Table 7, V2", "84.0", depths=[2, 2, 8, 12, 2])
    recipes["coatnet_3_v1_in21k"] = _pretrain_in21k(3, "Table 7, V1", "53.0", **v1)
    recipes["coatnet_3_v1_in21k_384"] = _fine_tune(3, 384, IN21K, "Table 7, V1", "87.4", **v1)

    norm: Fields = dict(source="Table 8, LayerNorm", norm="layer")
    recipes["coatnet_2_head64"] = _from_scratch(2, "Table 8, head size 64", "83.9", head_dim=64)
    recipes["coatnet_2_layernorm"] = _from_scratch(2, top1="84.1", **norm)
    recipes["coatnet_3_layernorm_in21k"] = _pretrain_in21k(3, **norm)
    recipes["coatnet_3_layernorm_in21k_384"] = _fine_tune(3, 384, IN21K, top1="87.8", **norm)

    for size, top1 in ((0, "82.0"), (1, "83.5"), (2, "84.1")):
        name = f"coatnet_{size}_strided_depthwise"
        recipes[name] = _from_scratch(size, "Table 9", top1, stride_on="depthwise")
    return recipes


# Parameters and MACs within 5% of CoAtNet-0's, but ViT_REL has 20% more MACs.
FIGURE_1_LAYOUTS: dict[str, Fields] = {
    "c_c_c_c": dict(layout="C-C-C-C", depths=[2, 1, 6, 7, 2]),
    "c_c_c_t": dict(layout="C-C-C-T", depths=[2, 2, 6, 5, 2]),
    "c_c_t_t": dict(),
    "c_t_t_t": dict(layout="C-T-T-T", depths=[2, 2, 3, 1, 3]),
    "vit_rel": dict(layout="PT", depths=[1, 13], widths=[384, 384]),
}


def _figure_1() -> dict[str, Fields]:
    """Return Fig. 1, without regularisation and augmentation, and Table 2: after JFT."""
    recipes = {}
    whole = images(4096, 224, test_crop="whole")
    bare = dict(augment=dict(scale=[1.0, 1.0], hflip=0.0), data=whole, drop_path=0.0)
    transfer = {"c_c_t_t": ("82.39", "84.23"), "c_t_t_t": ("81.78", "84.02")}
    precision = {"c_c_t_t": "34.40", "c_t_t_t": "34.36"}
    for layout, kwargs in FIGURE_1_LAYOUTS.items():
        name = f"coatnet_layout_{layout}"
        in1k = _from_scratch(0, "Fig. 1, ImageNet-1k", "", **kwargs) | bare
        in1k["expected"] = ""
        in1k["optim"]["weight_decay"] = 0.0
        recipes[name] = in1k
        jft = _pretrain_jft(3, "Fig. 1, JFT", **kwargs) | bare
        jft["epochs"] = 3
        jft["model"] = in1k["model"]
        jft["optim"]["weight_decay"] = 0.0
        if layout in precision:
            jft["expected"] = f"{precision[layout]} precision@1, {jft['expected']}"
        recipes[f"{name}_jft"] = jft
        for pixels, top1 in zip((224, 384), transfer.get(layout, ()), strict=False):
            tuned = _fine_tune(3, pixels, JFT_300M, "Table 2", top1, 5, **kwargs)
            shape = kwargs | dict(img_size=pixels)
            tuned["model"] = dict(name="coatnet_0", start="weights", kwargs=shape)
            recipes[f"{name}_jft_{pixels}"] = tuned
    return recipes


RECIPES: dict[str, Fields] = {**_table_4(), **_table_5(), **_tables_6_to_9(), **_figure_1()}
