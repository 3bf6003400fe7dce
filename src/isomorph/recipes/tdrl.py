"""TDRL: fine-tuning, from scratch, and other networks (Tables 1, 3, 5, 7, 9, 10, B.4, B.5; Fig. 3 to 5).

Fine-tuning has the settings of Table 4: AdamW, base learning rate 1e-3 for 256 images (as MAE counts: 4e-3 for batch
size 1024), weight decay .05, cosine schedule, RandAugment(10, .5), mixup .2, no cutmix, no label smoothing, no drop
path. Layer decay is .65 with pyramids and .85 without (.75 with a teacher). Runs after pre-training need its checkpoint
as `--model.weights`, which may also be a plain ViT's. Distilled runs have a distillation token, whose head is trained
on the classes that MAE's fine-tuned ViT-B predicts (`--distill.weights`). Schedules begin at the peak, as in MAE, G2SD
and Swin; DeiT's begins at the first step.

Every point of Figures 3, 4 and 5 (pyramids in a part of the network, rectified in several ways, or not at all) is two
runs: pre-training (`_g2sd`), then fine-tuning from its checkpoint. The figures show no numbers, so the expected results
are those that the text describes. It does not say which N Figs. 4 and 5 have.
"""

from typing import Any

from isomorph.recipes.imagenet import DEIT, Fields, images, top1

AUGMENT = dict(auto_augment="rand-m10-mstd0.5-inc1", color_jitter=0.3, mixup=0.2)
G2SD_AUGMENT = dict(auto_augment="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0, erasing=0.25, smoothing=0.1)
"""Augmentation of ViT-Small, "the same as Huang et al."; RandAugment and smoothing are MAE's, as in their code."""
TEACHER = dict(
    teacher="vit_base_patch16_224.mae",
    weights="mae_finetuned_vit_base.pth",
    kwargs=dict(global_pool="avg", num_classes=1000),
    kind="hard",
    share=0.5,
    token=True,
)
"""MAE's fine-tuned ViT-B, which has average pooling and 83.6 top-1; distilled as in G2SD (section 4.1)."""
PLAIN_LAYOUT = dict(layout="plain")
MLP_LAYERS = ["blocks.*.mlp.fc?"]
QK_LAYERS = ["blocks.*.attn.q", "blocks.*.attn.k"]
AFTER = "after its fine-tuning"


def _fine_tune(
    kwargs: Fields, epochs: int, source: str, result: str, distilled: bool = False, decay: float | None = None
) -> Fields:
    """Return one row of ViT-Tiny after pre-training, or from scratch if `decay` is 1."""
    plain = kwargs == PLAIN_LAYOUT
    recipe = dict(
        model=dict(
            name="tdrl_vit_ti_distilled" if distilled else "tdrl_vit_ti",
            kwargs=kwargs,
            **({} if decay == 1 else dict(start="weights")),
        ),
        data=images(1024),
        augment=AUGMENT,
        optim=dict(
            name="adamw",
            lr=4e-3,
            weight_decay=0.05,
            layer_decay=decay or ((0.75 if distilled else 0.85) if plain else 0.65),
            warmup_epochs=10 if epochs >= 300 else 5,
            schedule="cosine",
            min_lr=1e-6,
        ),
        epochs=epochs,
        amp="bf16",
        source=f"TDRL {source}",
        expected=top1(result, "" if decay == 1 else ", from pre-trained --model.weights"),
    )
    return recipe | (dict(distill=TEACHER) if distilled else {})


def _tables() -> dict[str, Fields]:
    """Return every row of ViT-Tiny and ViT-Small; Tables 5 and 7 share their 100 and 200 epochs with Table 1."""
    recipes = {
        "tdrl_vit_ti_100ep": _fine_tune({}, 100, "Table 5", "77.39"),
        "tdrl_vit_ti_100ep_distilled": _fine_tune({}, 100, "Table 5, Table 7", "77.74", distilled=True),
        "tdrl_vit_ti_200ep": _fine_tune({}, 200, "Table 1", "78.3"),
        "tdrl_vit_ti_200ep_distilled": _fine_tune({}, 200, "Table 1, Table 7", "78.6", distilled=True),
        "tdrl_vit_ti_300ep": _fine_tune({}, 300, "Table 1", "78.7"),
        "tdrl_vit_ti_300ep_distilled": _fine_tune({}, 300, "Table 1", "79.1", distilled=True),
        "tdrl_vit_ti_1000ep_distilled": _fine_tune({}, 1000, "Table 7", "79.9", distilled=True),
        "tdrl_plain_100ep": _fine_tune(PLAIN_LAYOUT, 100, "Tables 5, 9, 10, baseline", "76.24"),
        "tdrl_plain_100ep_distilled": _fine_tune(PLAIN_LAYOUT, 100, "Table 5, baseline", "76.77", distilled=True),
        "tdrl_fused_100ep": _fine_tune(
            PLAIN_LAYOUT, 100, "Table 9, P-W1S in the MLP, fused after pre-training", "76.73"
        ),
        "tdrl_naive_100ep": _fine_tune(dict(layout="naive-W8", where=MLP_LAYERS), 100, "Table 10, naive", "76.26"),
        "tdrl_regular_100ep": _fine_tune(dict(layout="R-D2W1S", where=MLP_LAYERS), 100, "Table 10", "76.90"),
        "tdrl_vit_ti_scratch": _fine_tune({}, 100, "B.4, without pre-training", "65.9", decay=1),
        "tdrl_plain_scratch": _fine_tune(PLAIN_LAYOUT, 100, "B.4, without pre-training, baseline", "63.5", decay=1),
    }
    for name, kwargs, result in (("tdrl_vit_s_100ep", {}, "81.3"), ("tdrl_plain_s_100ep", PLAIN_LAYOUT, "80.8")):
        recipe = _fine_tune(kwargs, 100, "Table 3", result)
        optim = recipe["optim"] | dict(lr=2e-3, layer_decay=0.65)  # MAE's: 5e-4 at 256 images
        model = recipe["model"] | dict(name="tdrl_vit_s")
        recipes[name] = recipe | dict(model=model, augment=G2SD_AUGMENT, optim=optim, drop_path=0.1)
    return recipes


DEIT_OPTIM: Fields = dict(lr=1e-3, weight_decay=0.05, warmup_epochs=5, schedule_from="start", min_lr=1e-5)
SWIN_OPTIM = DEIT_OPTIM | dict(warmup_epochs=20, schedule_from="peak", clip_grad=5.0)
SWIN: Fields = dict(augment=DEIT | dict(repeats=1), optim=SWIN_OPTIM, drop_path=0.2)
G2SD_OPTIM = dict(lr=2.4e-3, betas=[0.9, 0.95], weight_decay=0.05, warmup_epochs=10, min_lr=2.5e-6, clip_grad=3.0)
"""Optimisers of DeiT, of Swin, and of G2SD's pre-training."""


def _application(model: str, where: list[str] | None, result: str, source: str, **more: Any) -> Fields:
    """Return 100 epochs from scratch as in DeiT of another network, with pyramids or (`where` None) without."""
    recast = dict(rule="LinearToPyramid", layout="P-W2S", init="paper", where=where) if where else None
    return (
        dict(
            model=dict(name=model, recast=recast),
            data=images(1024),
            augment=DEIT,
            optim=DEIT_OPTIM,
            epochs=100,
            drop_path=0.1,
            amp="bf16",
            source=f"TDRL {source}",
            expected=top1(result),
        )
        | more
    )


MOBILE = dict(
    data=images(256),
    augment=dict(smoothing=0.1),
    optim=dict(name="sgd", lr=0.1, weight_decay=1e-4, warmup_epochs=5, schedule="cosine"),
    epochs=300,
    ema=0.9995,
    drop_path=0.0,
)
"""MobileOne's own training, except that the image size does not grow and the weight decay does not fall."""


VANILLA: Fields = dict(
    data=images(512),
    augment=DEIT | dict(auto_augment="rand-m7-mstd0.5-inc1", mixup=0.1, repeats=1),
    optim=dict(name="lamb", lr=3.5e-3, weight_decay=0.35, warmup_epochs=5, schedule="cosine", min_lr=1e-6),
    anneal=dict(epochs=100),
    loss="sigmoid",
    epochs=300,
    ema=0.99996,
    drop_path=0.0,
)
"""VanillaNet-5's own training, with the batch size of TDRL A.4. Its loss is a mean over classes, here a sum, which
makes no difference with LAMB; its annealing advances every epoch, here every step."""


def _applications() -> dict[str, Fields]:
    """Return Table 3 and B.5; the paper trains each network with its authors' own code."""
    swin, blocks = "swin_tiny_patch4_window7_224", ["stem", "stages.?.?", "stages.?.??"]
    deit = "deit_base_patch16_224"
    return {
        "tdrl_deit_b": _application(deit, ["blocks.*.attn.qkv"], "0.6 above its baseline,", "B.5"),
        "tdrl_plain_deit_b": _application(deit, None, "an unpublished", "B.5, baseline"),
        "tdrl_swin_t": _application(swin, ["layers.*.mlp.fc?"], "78.2", "Table 3", **SWIN),
        "tdrl_plain_swin_t": _application(swin, None, "76.2", "Table 3, baseline", **SWIN),
        "tdrl_mobileone_s0": _application("mobileone_s0", blocks, "75.1", "Table 3", **MOBILE),
        "tdrl_plain_mobileone_s0": _application("mobileone_s0", None, "71.3", "Table 3, baseline", **MOBILE),
        "tdrl_vanillanet_5": _vanillanet(["stages.*.pair"], "71.5", "Table 3"),
        "tdrl_plain_vanillanet_5": _vanillanet(None, "71.1", "Table 3, baseline"),
    }


def _vanillanet(where: list[str] | None, result: str, source: str) -> Fields:
    """Return VanillaNet-5 with a pyramid for the two 1x1 convolutions of every block, or (`where` None) without."""
    recipe = _application("vanillanet_5", where, result, source, **VANILLA)
    return recipe | dict(model=recipe["model"] | dict(kwargs=dict(drop_rate=0.05)))


CIFAR_MODEL = dict(img_size=32, patch_size=4, embed_dim=64, depth=6, num_heads=4, weight_init="jax")
"""Arguments of the CIFAR study's network: a grid of 8 x 8 patches, linear layers with Xavier's initialisation."""


def _cifar_recipe(layout: str, **more: Any) -> Fields:
    return dict(
        model=dict(name="tdrl_vit_ti", kwargs=CIFAR_MODEL | dict(layout=layout, **more)),
        data=dict(source="cifar10", fraction=0.2, size=[32, 32], batch_size=128),
        augment=dict(crop_padding=4),
        optim=dict(lr=3e-3, weight_decay=0.05, warmup_epochs=0.5, schedule_from="start", min_lr=1e-5),
        epochs=7,
        source="TDRL at CIFAR scale, docs/methods/tdrl.md",
    )


def _pretrain(kwargs: Fields, source: str, expected: str, epochs: int = 300, model: str = "tdrl_vit_ti") -> Fields:
    """Return generic distillation from MAE's ViT-B, whose full checkpoint is --mask.teacher (section 4.1)."""
    return dict(
        model=dict(name=model, kwargs=kwargs),
        data=images(4096),
        augment=dict(scale=[0.2, 1.0]),
        optim=G2SD_OPTIM,
        mask=dict(teacher="mae_pretrain_vit_base_full.pth", teacher_model="vit_base_patch16_224.mae"),
        epochs=epochs,
        evaluate_every=10,
        amp="bf16",
        source=f"TDRL {source}",
        expected=expected,
    )


def _cifar_pretrain(kwargs: Fields, mask: Fields, epochs: int) -> Fields:
    """Return pre-training on half of CIFAR-10 without its labels (docs/training.md)."""
    return dict(
        model=dict(name="tdrl_vit_ti", kwargs=CIFAR_MODEL | kwargs),
        data=dict(source="cifar10", fraction=0.5, size=[32, 32], batch_size=128, test_crop="whole"),
        augment=dict(scale=[0.5, 1.0]),
        optim=dict(lr=2e-3, weight_decay=0.05, warmup_epochs=0.5, schedule_from="start", min_lr=1e-5),
        mask=mask,
        epochs=epochs,
        evaluate_every=2,
        source="TDRL section 4.1 at CIFAR scale, docs/training.md",
    )


def _cifar_fine_tune(weights: str | None, layout: str = "P-W2S") -> Fields:
    """Return five epochs on a fifth of the labels, from scratch or, with a lower learning rate, from `weights`."""
    recipe = _cifar_recipe(layout)
    if weights:
        recipe["model"] |= dict(weights=weights)
        recipe["optim"] |= dict(lr=1e-3, layer_decay=0.8)
    recipe["data"] |= dict(test_crop="whole")
    return recipe | dict(epochs=5, source="TDRL section 4.1 at CIFAR scale, docs/training.md")


def _cifar_student(layout: str) -> Fields:
    """Return generic distillation from `cifar_mae_teacher`, for four epochs."""
    teacher = "runs/cifar_mae_teacher/autoencoder.safetensors"
    return _cifar_pretrain(dict(layout=layout), dict(teacher=teacher, depth=2, width=64, heads=4), epochs=4)


def _figure_3() -> dict[str, Fields]:
    """Return Fig. 3: four branches in queries and keys, their sum unchanged, rescaled or normalised; monitored."""
    expectations = {
        "none": "attention logits above 1,000 in every block, then no number after a few thousand steps",
        "rescale": "attention logits like the baseline's, tdrl_plain_g2sd",
        "batchnorm": f"attention logits like the baseline's, and the best top-1 {AFTER}",
    }
    recipes: dict[str, Fields] = {}
    for rectify, expected in expectations.items():
        kwargs = dict(layout="R-D1W4", rectify=rectify, where=QK_LAYERS)
        recipes[f"tdrl_fig3_{rectify}_g2sd"] = _pretrain(kwargs, "Fig. 3 a-c", expected) | dict(monitor_every=100)
        if rectify != "none":
            recipes[f"tdrl_fig3_{rectify}_100ep"] = _fine_tune_100_epochs(
                kwargs, "Fig. 3 d", "batchnorm's above rescale's"
            )
    return recipes


def _figure_4() -> dict[str, Fields]:
    """Return Fig. 4: with and without rectification, 1 to 3 branches in the MLP, and P-W2S in all pyramids.

    Queries and keys are always normalised. P-W2S with rectification is tdrl_vit_ti_g2sd, then tdrl_vit_ti_100ep.
    """
    rectify_none = {"v": "none", "fc1": "none", "fc2": "none"}
    kwargs: Fields = dict(rectify=rectify_none)
    points = {"all_none": (kwargs, "0.21 below tdrl_vit_ti_100ep's")}
    for width in (1, 2, 3):
        kwargs = dict(layout=f"P-W{width}S", where=MLP_LAYERS)
        below = {1: "about that of", 2: "0.13 below that of", 3: "at most 0.18 below that of"}[width]
        points[f"ffn_w{width}"] = (kwargs, "an unpublished one")
        points[f"ffn_w{width}_none"] = (kwargs | dict(rectify="none"), f"{below} tdrl_fig4_ffn_w{width}_100ep")
    recipes: dict[str, Fields] = {}
    for name, (kwargs, expected) in points.items():
        recipes[f"tdrl_fig4_{name}_g2sd"] = _pretrain(kwargs, "Fig. 4", f"top-1 {AFTER}: {expected}")
        recipes[f"tdrl_fig4_{name}_100ep"] = _fine_tune_100_epochs(kwargs, "Fig. 4", expected)
    return recipes


def _figure_5() -> dict[str, Fields]:
    """Return Fig. 5: pyramids in the values of the first blocks, fused after pre-training.

    Fine-tuning is tdrl_fused_100ep.
    """
    return {
        f"tdrl_fig5_v_{blocks}_g2sd": _pretrain(
            dict(where=[f"blocks.{i}.attn.v" for i in range(blocks)]),
            f"Fig. 5, -V-{blocks}",
            "more than 76.24 top-1 after isomorph fuse and tdrl_fused_100ep, and the more the more blocks",
        )
        for blocks in (4, 8, 12)
    }


def _fine_tune_100_epochs(kwargs: Fields, source: str, expected: str) -> Fields:
    """Return fine-tuning for 100 epochs with pyramids, whose top-1 is known only in comparison with other runs."""
    recipe = _fine_tune(kwargs, 100, source, "")
    return recipe | dict(expected=f"top-1 on ImageNet-1k: {expected}; from pre-trained --model.weights")


RECIPES: dict[str, Fields] = {
    **_tables(),
    **_applications(),
    "tdrl_vit_ti_g2sd": _pretrain({}, "section 4.1, Table 1", "78.7 top-1 after tdrl_vit_ti_300ep"),
    "tdrl_plain_g2sd": _pretrain(PLAIN_LAYOUT, "Table 9, baseline", "76.24 top-1 after tdrl_plain_100ep"),
    "tdrl_vit_s_g2sd": _pretrain({}, "Table 3", "81.3 top-1 after tdrl_vit_s_100ep", model="tdrl_vit_s"),
    "tdrl_plain_s_g2sd": _pretrain(
        PLAIN_LAYOUT, "Table 3, baseline", "80.8 top-1 after tdrl_plain_s_100ep", model="tdrl_vit_s"
    ),
    "tdrl_fused_g2sd": _pretrain(
        dict(layout="P-W1S", where=MLP_LAYERS),
        "Table 9",
        "76.73 top-1 after isomorph fuse and tdrl_fused_100ep",
        epochs=220,
    ),
    "tdrl_naive_g2sd": _pretrain(
        dict(layout="naive-W8", where=MLP_LAYERS), "Table 10, naive", "76.26 top-1 after tdrl_naive_100ep"
    ),
    "tdrl_regular_g2sd": _pretrain(
        dict(layout="R-D2W1S", where=MLP_LAYERS), "Table 10", "76.90 top-1 after tdrl_regular_100ep"
    ),
    "cifar_mae_teacher": _cifar_pretrain(
        PLAIN_LAYOUT | dict(embed_dim=128), dict(depth=4, width=64, heads=4), epochs=6
    ),
    "cifar_tdrl_g2sd": _cifar_student("P-W2S"),
    "cifar_tdrl_plain_g2sd": _cifar_student("plain"),
    "cifar_tdrl_scratch": _cifar_fine_tune(None),
    "cifar_tdrl_finetuned": _cifar_fine_tune("runs/cifar_tdrl_g2sd/model.safetensors"),
    "cifar_tdrl_plain_finetuned": _cifar_fine_tune("runs/cifar_tdrl_plain_g2sd/model.safetensors", "plain"),
    "cifar_tdrl": _cifar_recipe("P-W2S"),
    "cifar_tdrl_plain": _cifar_recipe("plain"),
    **_figure_3(),
    **_figure_4(),
    **_figure_5(),
}
