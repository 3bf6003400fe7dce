"""TDRL: fine-tuning, from scratch, and other networks (Tables 1, 3, 5, 7, 9, 10, B.4, B.5, B.8; Fig. 2 to 5).

Fine-tuning has the settings of Table 4: AdamW, base learning rate 1e-3 for 256 images (as MAE counts: 4e-3 for batch
size 1024), weight decay .05, cosine schedule, RandAugment(10, .5), mixup .2, no cutmix, no label smoothing, no drop
path. Layer decay is .65 with pyramids and .85 without (.75 with a teacher). Runs after pre-training need its checkpoint
as `--model.weights`, which may also be a plain ViT's. Distilled runs have a distillation token, whose head is trained
on the classes that MAE's fine-tuned ViT-B predicts (`--distill.weights`). All others average over the patches, as MAE
and G2SD do in fine-tuning (`--model.kwargs.global_pool token` takes the class token). Schedules begin at the peak, as
in MAE, G2SD and Swin; DeiT's begins at the first step. With and without pyramids the networks start by one rule, MAE's
(A.1): Xavier weights in every matrix as it stands.

Every point of Figures 2 to 5 (pyramids in a part of the network, of several forms, rectified in several ways, or not at
all) is two runs: pre-training (`_g2sd`), then fine-tuning from its checkpoint, in Figures 2 and 5 from the fused one
(`tdrl_fused_100ep`). The figures show no numbers, so the expected results are those that the text describes. What the
paper leaves open: docs/guides/readings.md.
"""

from typing import Any

from isomorph.lab.recipes.deit import DEIT, Fields, images, top1

PLAIN: Fields = dict(layout="plain")
QK_LAYERS = ["blocks.*.attn.q", "blocks.*.attn.k"]
FUSED = "after isomorph fuse and tdrl_fused_100ep"
AUGMENT = dict(auto_augment="rand-m10-mstd0.5-inc1", color_jitter=0.3, mixup=0.2)
# Augmentation of ViT-Small, "the same as Huang et al."; RandAugment and smoothing are MAE's, as in their code.
G2SD_AUGMENT = dict(
    auto_augment="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0, erasing=0.25, smoothing=0.1
)
G2SD_OPTIM = dict(
    lr=2.4e-3, betas=[0.9, 0.95], weight_decay=0.05, warmup_epochs=10, min_lr=2.5e-6, clip_grad=3.0
)
MAE_TEACHER = dict(
    teacher="mae_pretrain_vit_base_full.pth", teacher_model="vit_base_patch16_224.mae"
)
# MAE's fine-tuned ViT-B, which has average pooling and 83.6 top-1; distilled as in G2SD (section 4.1).
TEACHER: Fields = dict(
    teacher="vit_base_patch16_224.mae",
    weights="mae_finetuned_vit_base.pth",
    kind="hard",
    kwargs=dict(global_pool="avg", num_classes=1000),
    share=0.5,
    token=True,
)


def _mlp(layout: str, **more: Any) -> Fields:
    return dict(layout=layout, where=["blocks.*.mlp.fc?"], **more)


def _model(kwargs: Fields, name: str = "tdrl_vit_ti", **more: Any) -> Fields:
    return dict(name=name, kwargs=dict(weight_init="mae", **kwargs), **more)


# Fine-tuning of MAE, which G2SD and so TDRL follow: tokens are averaged, the classifier starts near zero. A distilled
# network has a class and a distillation token instead, as in G2SD.
AVERAGED: Fields = dict(global_pool="avg")
HEAD_STD = 2e-5


def _fine_tune(
    kwargs: Fields, epochs: int, source: str, expected: str, distilled: bool = False
) -> Fields:
    if distilled:
        model = _model(kwargs, "tdrl_vit_ti_distilled", head_std=HEAD_STD, start="weights")
    else:
        model = _model(kwargs | AVERAGED, head_std=HEAD_STD, start="weights")
    recipe: Fields = dict(
        model=model,
        data=images(1024),
        augment=AUGMENT,
        optim=dict(
            lr=4e-3,
            weight_decay=0.05,
            layer_decay=_layer_decay(kwargs == PLAIN, distilled),
            warmup_epochs=10 if epochs >= 300 else 5,
            schedule="cosine",
            min_lr=1e-6,
        ),
        epochs=epochs,
        amp="bf16",
        source=f"TDRL {source}",
        expected=f"{expected}; from pre-trained --model.weights",
    )
    if distilled:
        recipe["distill"] = TEACHER
    return recipe


def _layer_decay(plain: bool, distilled: bool) -> float:
    if not plain:
        return 0.65
    return 0.75 if distilled else 0.85


def _pretrain(
    kwargs: Fields, source: str, expected: str, model: str = "tdrl_vit_ti", **more: Any
) -> Fields:
    """Return generic distillation from MAE's ViT-B, whose full checkpoint is --mask.teacher (section 4.1)."""
    recipe: Fields = dict(
        model=_model(kwargs, model),
        data=images(4096),
        augment=dict(scale=[0.2, 1.0]),
        epochs=300,
        evaluate_every=10,
        amp="bf16",
        optim=G2SD_OPTIM,
        mask=MAE_TEACHER,
        source=f"TDRL {source}",
        expected=expected,
    )
    return recipe | more


# A Linear and a BatchNorm in place of each linear layer of MHSA and FFN.
BATCH_NORM_ALONE: Fields = dict(layout="naive-W1", rectify="none")

# Arguments, source, expected result and, for another network, its name.
PRETRAININGS: dict[str, tuple[Any, ...]] = {
    "vit_ti": ({}, "section 4.1, Table 1", "78.7 top-1 after tdrl_vit_ti_300ep"),
    "plain": (PLAIN, "Table 9, baseline", "76.24 top-1 after tdrl_plain_100ep"),
    "naive": (_mlp("naive-W8"), "Table 10, naive", "76.26 top-1 after tdrl_naive_100ep"),
    "regular": (_mlp("R-D2W1S"), "Table 10", "76.90 top-1 after tdrl_regular_100ep"),
    "batchnorm": (
        BATCH_NORM_ALONE,
        "appendix B.9, BatchNorm alone",
        "37.8 mIoU after upernet_batchnorm_ti",
    ),
    "vit_s": ({}, "Table 3", "81.3 top-1 after tdrl_vit_s_100ep", "tdrl_vit_s"),
    "plain_s": (PLAIN, "Table 3", "80.8 top-1 after tdrl_plain_s_100ep", "tdrl_vit_s"),
}

# Arguments, epochs, table, top-1.
FINE_TUNINGS: dict[str, tuple[Any, ...]] = {
    "vit_ti_100ep": ({}, 100, "Table 5", "77.39"),
    "vit_ti_100ep_distilled": ({}, 100, "Table 5, Table 7", "77.74"),
    "vit_ti_200ep": ({}, 200, "Table 1", "78.3"),
    "vit_ti_200ep_distilled": ({}, 200, "Table 1, Table 7", "78.6"),
    "vit_ti_300ep": ({}, 300, "Table 1", "78.7"),
    "vit_ti_300ep_distilled": ({}, 300, "Table 1", "79.1"),
    "vit_ti_1000ep_distilled": ({}, 1000, "Table 7", "79.9"),
    "plain_100ep": (PLAIN, 100, "Table 5, Table 9, Table 10, baseline", "76.24"),
    "plain_100ep_distilled": (PLAIN, 100, "Table 5, baseline", "76.77"),
    "fused_100ep": (PLAIN, 100, "Table 9, P-W1S in the MLP, fused after pre-training", "76.73"),
    "naive_100ep": (_mlp("naive-W8"), 100, "Table 10, naive", "76.26"),
    "regular_100ep": (_mlp("R-D2W1S"), 100, "Table 10", "76.90"),
}


def _tables() -> dict[str, Fields]:
    recipes = {f"tdrl_{name}_g2sd": _pretrain(*row) for name, row in PRETRAININGS.items()}
    fused = f"76.73 top-1 {FUSED}"
    recipes["tdrl_plain_g2sd"]["monitor_every"] = 100  # the baseline of Fig. 3c
    recipes["tdrl_fused_g2sd"] = _pretrain(_mlp("P-W1S"), "Table 9", fused, epochs=220)
    for name, (kwargs, epochs, source, result) in FINE_TUNINGS.items():
        distilled = name.endswith("_distilled")
        recipes[f"tdrl_{name}"] = _fine_tune(kwargs, epochs, source, top1(result), distilled)
    recipes["tdrl_vit_s_100ep"] = _small_100ep({}, "81.3")
    recipes["tdrl_vit_ti_scratch"] = _scratch({}, "65.9")
    recipes["tdrl_cifar10"] = _cifar10({}, "70.9")
    recipes["tdrl_plain_s_100ep"] = _small_100ep(PLAIN, "80.8")
    recipes["tdrl_plain_scratch"] = _scratch(PLAIN, "63.5")
    recipes["tdrl_plain_cifar10"] = _cifar10(PLAIN, "69.9")
    return recipes


def _small_100ep(kwargs: Fields, result: str) -> Fields:
    recipe = _fine_tune(kwargs, 100, "Table 3", top1(result))
    recipe["model"]["name"] = "tdrl_vit_s"
    recipe["augment"] = G2SD_AUGMENT
    recipe["optim"] |= dict(lr=2e-3, layer_decay=0.65)  # MAE's: 5e-4 at 256 images
    recipe["drop_path"] = 0.1
    return recipe


def _scratch(kwargs: Fields, result: str) -> Fields:
    recipe = _fine_tune(kwargs, 100, "", "")
    recipe["model"] = _model(kwargs | AVERAGED)
    recipe["optim"]["layer_decay"] = 1
    recipe["source"] = "TDRL B.4, without pre-training"
    recipe["expected"] = top1(result)
    return recipe


def _cifar10(kwargs: Fields, result: str) -> Fields:
    recipe = _scratch(kwargs, "")
    recipe["data"] = dict(source="cifar10", batch_size=1024, workers=8, size=[224, 224])
    recipe["source"] = "TDRL B.8"
    recipe["expected"] = f"{result} top-1 on CIFAR-10"
    return recipe


DEIT_OPTIM: Fields = dict(
    lr=1e-3, weight_decay=0.05, warmup_epochs=5, schedule_from="start", min_lr=1e-5
)
SWIN_OPTIM = DEIT_OPTIM | dict(warmup_epochs=20, schedule_from="peak", clip_grad=5.0)
SWIN: Fields = dict(augment=DEIT | dict(repeats=1), optim=SWIN_OPTIM, drop_path=0.2)
# MobileOne's own training, in the code that TDRL names: images grow from 160 to 192 and 224 pixels, weight decay falls,
# momentum is the plain one.
MOBILE: Fields = dict(
    data=images(256),
    augment=dict(smoothing=0.1, small_sizes=[160, 192], small_epochs=[37, 112]),
    optim=dict(
        name="momentum",
        lr=0.1,
        min_lr=1e-6,
        weight_decay=1e-4,
        min_weight_decay=1e-5,
        warmup_epochs=5,
    ),
    epochs=300,
    ema=0.9995,
    drop_path=0.0,
)
# VanillaNet-5's training at the batch size of TDRL A.4; its loss sums over classes, and annealing advances by step. A
# pyramid replaces both convolutions of a pair with the BatchNorms and the annealed ReLU between them, so the plain arm
# anneals the ReLUs of stem, stages and classifier, the arm with pyramids those of stem and classifier alone.
VANILLA: Fields = dict(
    data=images(512),
    augment=DEIT | dict(auto_augment="rand-m7-mstd0.5-inc1", mixup=0.1, repeats=1),
    optim=dict(
        name="lamb", lr=3.5e-3, weight_decay=0.35, warmup_epochs=5, schedule="cosine", min_lr=1e-6
    ),
    anneal=dict(epochs=100),
    loss="sigmoid",
    epochs=300,
    ema=0.99996,
    drop_path=0.0,
)

DEIT_B = (
    "deit_base_patch16_224",
    ["blocks.*.attn.qkv"],
    "0.6 above its baseline,",
    "an unpublished",
    "B.5",
)
# Network, layers that become pyramids (in VanillaNet-5 one for two convolutions), top-1 with and without, source;
# the network's arguments; settings.
APPLICATIONS: dict[str, tuple[tuple[Any, ...], Fields, Fields]] = {
    "deit_b": (DEIT_B, {}, {}),
    "swin_t": (
        ("swin_tiny_patch4_window7_224", ["layers.*.mlp.fc?"], "78.2", "76.2", "Table 3"),
        {},
        SWIN,
    ),
    "mobileone_s0": (
        ("mobileone_s0", ["stem", "stages.?.?", "stages.?.??"], "75.1", "71.3", "Table 3"),
        {},
        MOBILE,
    ),
    "vanillanet_5": (
        ("vanillanet_5", ["stages.*.pair"], "71.5", "71.1", "Table 3"),
        dict(drop_rate=0.05),
        VANILLA,
    ),
}


def _applications() -> dict[str, Fields]:
    """Return Table 3 and B.5, from scratch; the paper trains each network with its authors' own code."""
    recipes: dict[str, Fields] = {}
    for name, (
        (network, where, result, baseline, source),
        kwargs,
        settings,
    ) in APPLICATIONS.items():
        model = dict(name=network, kwargs=kwargs, weight_init="mae")
        pyramids = dict(rule="LinearToPyramid", layout="P-W2S", init="paper", where=where)
        recast = _from_scratch(model | dict(recast=pyramids), source, result)
        recipes[f"tdrl_{name}"] = recast | settings
        plain = _from_scratch(model | dict(recast=None), f"{source}, baseline", baseline)
        recipes[f"tdrl_plain_{name}"] = plain | settings
    return recipes


def _from_scratch(model: Fields, source: str, result: str) -> Fields:
    return dict(
        model=model,
        data=images(1024),
        augment=DEIT,
        optim=DEIT_OPTIM,
        epochs=100,
        drop_path=0.1,
        amp="bf16",
        source=f"TDRL {source}",
        expected=top1(result),
    )


def _figure_2() -> dict[str, Fields]:
    """Return Fig. 2: forms of pyramids in the MLP with and without a skip (a, b), and parts of the network (d).

    P-WNS in the MLP is tdrl_fig4_ffn_wN_g2sd (marked * in Fig. 2b: tdrl_fig4_ffn_wN_100ep), R-D2W1S tdrl_regular_g2sd,
    the values alone tdrl_fig5_v_12_g2sd and all layers tdrl_vit_ti_g2sd. Fig. 2c is `iso.analysis.branch_similarity`.
    """
    with_skip = {
        "P-W2": "tdrl_fig4_ffn_w2",
        "R-D1W2": "tdrl_fig2_ffn_r_d1w2s",
        "R-D2W1": "tdrl_regular",
    }
    recipes = {}
    for layout, other in with_skip.items():
        expected = f"below {other}_g2sd's {FUSED}"
        recipes[_figure_2_name(layout)] = _pretrain(_mlp(layout), "Fig. 2a, no skip", expected)
    for layout in ("R-D1W2S", "R-D1W4S", "R-D3W1S"):
        expected = f"below that of P-WNS of the same size {FUSED}"
        recipes[_figure_2_name(layout)] = _pretrain(_mlp(layout), "Fig. 2b", expected)
    parts = {"patch_embed": ["patch_embed.proj"], "qk": QK_LAYERS, "mhsa": ["blocks.*.attn.qkv"]}
    for part, where in parts.items():
        relation = "about" if part == "patch_embed" else "above"
        expected = f"{relation} 76.24 top-1 {FUSED}"
        recipes[f"tdrl_fig2_{part}_g2sd"] = _pretrain(dict(where=where), "Fig. 2d", expected)
    return recipes


def _figure_2_name(layout: str) -> str:
    return f"tdrl_fig2_ffn_{layout.lower().replace('-', '_')}_g2sd"


def _figure_3() -> dict[str, Fields]:
    """Return Fig. 3: four branches in queries and keys, their sum unchanged, rescaled or normalised; monitored."""
    expectations = {
        "none": "attention logits above 1,000 in every block, then no number after a few thousand steps",
        "rescale": "attention logits like the baseline's, tdrl_plain_g2sd",
        "batchnorm": "attention logits like the baseline's, and the best top-1 after its fine-tuning",
    }
    recipes: dict[str, Fields] = {}
    for rectify, expected in expectations.items():
        kwargs = dict(layout="R-D1W4", rectify=rectify, where=QK_LAYERS)
        recipes[f"tdrl_fig3_{rectify}_g2sd"] = _pretrain(
            kwargs, "Fig. 3 a-c", expected, monitor_every=100
        )
        if rectify != "none":
            recipes[f"tdrl_fig3_{rectify}_100ep"] = _fine_tune(
                kwargs, 100, "Fig. 3 d", "batchnorm's above rescale's"
            )
    return recipes


def _figure_4() -> dict[str, Fields]:
    """Return Fig. 4: with and without rectification, which queries and keys always have, and in all pyramids."""
    without: Fields = dict(rectify=dict.fromkeys(("v", "fc1", "fc2"), "none"))
    points = {"all_none": (without, "0.21 below tdrl_vit_ti_100ep's")}
    differences = {1: "about that of", 2: "0.13 below that of", 3: "at most 0.18 below that of"}
    for width, below in differences.items():
        layout = f"P-W{width}S"
        points[f"ffn_w{width}"] = (_mlp(layout), "an unpublished one")
        expected = f"{below} tdrl_fig4_ffn_w{width}_100ep"
        points[f"ffn_w{width}_none"] = (_mlp(layout, rectify="none"), expected)
    recipes: dict[str, Fields] = {}
    for name, (kwargs, expected) in points.items():
        recipes[f"tdrl_fig4_{name}_g2sd"] = _pretrain(
            kwargs, "Fig. 4", f"top-1 after its fine-tuning: {expected}"
        )
        recipes[f"tdrl_fig4_{name}_100ep"] = _fine_tune(
            kwargs, 100, "Fig. 4", f"top-1 on ImageNet-1k: {expected}"
        )
    return recipes


def _figure_5() -> dict[str, Fields]:
    """Return Fig. 5: pyramids in the values of the first blocks, fused after pre-training."""
    expected = f"more than 76.24 top-1 {FUSED}, and the more the more blocks"
    recipes = {}
    for blocks in (4, 8, 12):
        values = [f"blocks.{i}.attn.v" for i in range(blocks)]
        source = f"Fig. 5, -V-{blocks}"
        recipes[f"tdrl_fig5_v_{blocks}_g2sd"] = _pretrain(dict(where=values), source, expected)
    return recipes


# Arguments of the CIFAR study's network: a grid of 8 x 8 patches, linear layers with Xavier's initialisation.
CIFAR_MODEL = dict(img_size=32, patch_size=4, embed_dim=64, depth=6, num_heads=4, weight_init="jax")


def _cifar(kwargs: Fields, data: Fields, lr: float, epochs: int, **more: Any) -> Fields:
    return dict(
        model=dict(name="tdrl_vit_ti", kwargs=CIFAR_MODEL | kwargs),
        data=dict(source="cifar10", size=[32, 32], batch_size=128) | data,
        optim=dict(lr=lr, weight_decay=0.05, warmup_epochs=0.5, schedule_from="start", min_lr=1e-5),
        epochs=epochs,
        source="TDRL section 4.1 at CIFAR scale, docs/training.md",
        **more,
    )


def _cifar_labels(layout: str, weights: str | None = None) -> Fields:
    data = dict(fraction=0.2, test_crop="whole")
    recipe = _cifar(dict(layout=layout), data, 3e-3, 5, augment=dict(crop_padding=4))
    if weights:
        recipe["model"]["weights"] = weights
        recipe["optim"] |= dict(lr=1e-3, layer_decay=0.8)
    return recipe


def _cifar_pretrain(kwargs: Fields, mask: Fields, epochs: int) -> Fields:
    data = dict(fraction=0.5, test_crop="whole")
    augment = dict(scale=[0.5, 1.0])
    return _cifar(kwargs, data, 2e-3, epochs, augment=augment, mask=mask, evaluate_every=2)


def _cifar_recipes() -> dict[str, Fields]:
    student: Fields = dict(
        depth=2, width=64, heads=4, teacher="runs/cifar_mae_teacher/autoencoder.safetensors"
    )
    teacher = dict(depth=4, width=64, heads=4)
    recipes = {
        "cifar_mae_teacher": _cifar_pretrain(PLAIN | dict(embed_dim=128), teacher, 6),
        "cifar_tdrl_scratch": _cifar_labels("P-W2S"),
    }
    for name, layout in (("cifar_tdrl", "P-W2S"), ("cifar_tdrl_plain", "plain")):
        recipes[f"{name}_g2sd"] = _cifar_pretrain(dict(layout=layout), student, 4)
        recipes[f"{name}_finetuned"] = _cifar_labels(layout, f"runs/{name}_g2sd/model.safetensors")
    return recipes


RECIPES: dict[str, Fields] = (
    _tables()
    | _applications()
    | _cifar_recipes()
    | _figure_2()
    | _figure_3()
    | _figure_4()
    | _figure_5()
)
