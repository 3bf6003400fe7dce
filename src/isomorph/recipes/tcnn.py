"""T-CNN: pretrained ResNets fine-tuned with self-attention, and the same fine-tuning without (T-CNN Tables 1, 2, 3, 5).

50 epochs of AdamW with batch size 1024 (over all processes), peak learning rate 1e-4, 5 epochs of warm-up and a cosine
schedule from the first step (timm's default, which their code uses); gates at 0.1 (1000 times the rest, whatever
`optim.lr` is); DeiT's augmentation; drop path .1 at 224 and .2 at 320. The smallest took 6 hours on 16 V100s.
"""

from typing import Any

from isomorph.recipes.deit import DEIT

OPTIM = dict(name="adamw", lr=1e-4, weight_decay=0.05, gate_lr="1000x", warmup_epochs=5, schedule_from="start")

# backbone: fine-tuning resolution, drop path, top-1 of the CNN alone and of the T-CNN, table
BACKBONES: dict[str, tuple[int, float, str, str, str]] = {
    "resnetrs50": (224, 0.1, "80.4", "81.0", "Table 1"),
    "resnetrs101": (224, 0.1, "81.9", "82.4", "Table 1"),
    "resnetrs152": (320, 0.2, "83.4", "83.7", "Table 1"),
    "resnetrs200": (320, 0.2, "83.7", "84.0", "Table 1"),
    "resnetrs270": (320, 0.2, "83.9", "84.3", "Table 1"),
    "resnetrs350": (320, 0.2, "84.1", "84.5", "Table 1"),
    "resnet50d": (320, 0.2, "", "81.6", "Table 5"),
    "resnet101d": (384, 0.2, "", "83.1", "Table 5"),
    "resnet152d": (384, 0.2, "", "83.8", "Table 5"),
    "resnet200d": (384, 0.2, "", "83.9", "Table 5"),
}


def _fine_tune(backbone: str, attention: bool) -> dict[str, Any]:
    """Return one row of the tables, with or without self-attention."""
    size, drop_path, alone, transformed, table = BACKBONES[backbone]
    surgery = dict(unstride="layer4", recast=dict(where="layer4.*.conv2", init="paper")) if attention else {}
    top1 = transformed if attention else alone
    return dict(
        model=dict(name=backbone, pretrained=True, **surgery),
        data=dict(source="imagefolder", size=[size, size], batch_size=1024, workers=8),
        augment=DEIT,
        optim=OPTIM,
        epochs=50,
        drop_path=drop_path,
        amp="bf16",
        source=f"T-CNN {table}",
        expected=f"{top1} top-1 on ImageNet-1k" if top1 else "",
    )


LATE_RECAST_TOP1 = {0: "79.95", 100: "80.44", 200: "80.28", 300: "79.28", 400: "79.04"}
"""Epoch (of 400) at which the last stage of a ResNet-50 is recast as attention, and its top-1 (Table 3)."""


def _late_recast(epoch: int) -> dict[str, Any]:
    """Return one row of Table 3: SGD with momentum .9, 5 epochs of warm-up, cosine, DeiT's augmentation.

    The paper does not give the peak learning rate; .4 is .1 for 256 images, scaled to the batch size.
    """
    return dict(
        model=dict(
            name="resnet50",
            unstride="layer4",
            recast=dict(where="layer4.*.conv2", init="paper"),
            recast_epoch=epoch,
        ),
        data=dict(source="imagefolder", size=[224, 224], batch_size=1024, workers=8),
        augment=DEIT,
        optim=dict(
            name="sgd", lr=0.4, momentum=0.9, weight_decay=1e-4, gate_lr="1x", warmup_epochs=5, schedule_from="start"
        ),
        epochs=400,
        amp="bf16",
        source="T-CNN Table 3",
        expected=f"{LATE_RECAST_TOP1[epoch]} top-1 on ImageNet-1k",
    )


SHORT_RUNS = {
    "resnetrs50": {10: "80.11", 20: "80.51"},
    "resnetrs101": {10: "81.54", 20: "81.90"},
}
"""Epochs of fine-tuning at 224 and top-1 (Table 4); the runs of 50 epochs are tcnn_resnetrs50 and tcnn_resnetrs101."""

PEAK_RATES = {"3e-5": 3e-5, "3e-4": 3e-4}
"""Peak learning rates below and above the 1e-4 of `tcnn_resnetrs50` (Fig. 6): with a lower one accuracy first drops
less and then rises more slowly. The paper does not say which three the figure has, nor whether the gates stay at 0.1:
here their rate scales too; `--optim.gate_lr 0.1` keeps it."""


def _short_run(backbone: str, epochs: int) -> dict[str, Any]:
    """Return one row of Table 4."""
    expected = f"{SHORT_RUNS[backbone][epochs]} top-1 on ImageNet-1k"
    return _fine_tune(backbone, attention=True) | dict(epochs=epochs, source="T-CNN Table 4", expected=expected)


def _at_peak_rate(lr: float) -> dict[str, Any]:
    """Return one curve of Fig. 6, for which the paper gives no number."""
    return _fine_tune("resnetrs50", attention=True) | dict(
        optim=OPTIM | dict(lr=lr), source="T-CNN Fig. 6", expected=""
    )


def _after_400(size: int, attention: bool, top1: str) -> dict[str, Any]:
    """Return a row of Table 3 that fine-tunes the ResNet-50 of 400 epochs (--model.weights) for 50 more."""
    surgery = dict(unstride="layer4", recast=dict(where="layer4.*.conv2", init="paper")) if attention else {}
    return dict(
        model=dict(name="resnet50", start="weights", **surgery),
        data=dict(source="imagefolder", size=[size, size], batch_size=1024, workers=8),
        augment=DEIT,
        optim=OPTIM,
        epochs=50,
        drop_path=0.1 if size == 224 else 0.2,
        amp="bf16",
        source="T-CNN Table 3",
        expected=f"{top1} top-1 on ImageNet-1k, from --model.weights of tcnn_late_400",
    )


RECIPES: dict[str, dict[str, Any]] = {f"tcnn_{name}": _fine_tune(name, attention=True) for name in BACKBONES}
RECIPES["tcnn_resnetrs270"]["keep_every"] = 2  # gates and spans along training (Fig. 4): 25 models of 0.5 GB
RECIPES |= {
    f"tcnn_{name}_{epochs}ep": _short_run(name, epochs) for name, results in SHORT_RUNS.items() for epochs in results
}
RECIPES |= {f"tcnn_resnetrs50_lr_{name}": _at_peak_rate(lr) for name, lr in PEAK_RATES.items()}
RECIPES |= {f"finetune_{name}": _fine_tune(name, attention=False) for name in BACKBONES if BACKBONES[name][2]}
RECIPES |= {f"tcnn_late_{epoch}": _late_recast(epoch) for epoch in LATE_RECAST_TOP1}
RECIPES |= {
    "tcnn_resnet50_224": _after_400(224, True, "79.88"),
    "tcnn_resnet50_320": _after_400(320, True, "80.84"),
    "finetune_resnet50_320": _after_400(320, False, "79.78"),
}
