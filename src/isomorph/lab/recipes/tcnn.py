"""T-CNN: pretrained ResNets fine-tuned with self-attention, and the same fine-tuning without (T-CNN Tables 1, 2, 3, 5).

50 epochs of AdamW with batch size 1024 (over all processes), peak learning rate 1e-4, 5 epochs of warm-up and a cosine
schedule from the first step (timm's default, which their code uses); gates at 0.1 (1000 times the rest, whatever
`optim.lr` is); DeiT's augmentation; drop path .1 at 224 and .2 at 320. The smallest took 6 hours on 16 V100s. What the
paper leaves open: docs/guides/readings.md.
"""

from isomorph.lab.recipes.deit import DEIT, Fields, images, top1

OPTIM = dict(
    name="adamw",
    lr=1e-4,
    weight_decay=0.05,
    gate_lr="1000x",
    warmup_epochs=5,
    schedule_from="start",
)
SURGERY: Fields = dict(unstride="layer4", recast=dict(where="layer4.*.conv2", init="paper"))

# backbone: fine-tuning resolution; top-1 and TTT of the CNN alone, then of the T-CNN; table. TTT is the time of the
# original training and the fine-tuning, as a multiple of ResNet50-RS's training ("" where the paper has none)
BACKBONES: dict[str, tuple[int, str, str, str, str, str]] = {
    "resnetrs50": (224, "80.4", "1.16", "81.0", "1.30", "Table 1"),
    "resnetrs101": (224, "81.9", "1.65", "82.4", "1.79", "Table 1"),
    "resnetrs152": (320, "83.4", "3.75", "83.7", "4.13", "Table 1"),
    "resnetrs200": (320, "83.7", "5.04", "84.0", "5.42", "Table 1"),
    "resnetrs270": (320, "83.9", "7.49", "84.3", "7.98", "Table 1"),
    "resnetrs350": (320, "84.1", "12.17", "84.5", "12.69", "Table 1"),
    "resnet50d": (320, "", "", "81.6", "", "Table 5"),
    "resnet101d": (384, "", "", "83.1", "", "Table 5"),
    "resnet152d": (384, "", "", "83.8", "", "Table 5"),
    "resnet200d": (384, "", "", "83.9", "", "Table 5"),
}
UNSTRIDED: Fields = dict(unstride="layer4")


def _fine_tune(model: Fields, size: int, table: str, expected: str) -> Fields:
    return dict(
        model=model,
        data=images(1024, size),
        augment=DEIT,
        optim=OPTIM,
        epochs=50,
        drop_path=0.1 if size == 224 else 0.2,
        amp="bf16",
        source=f"T-CNN {table}",
        expected=expected,
    )


def _row(backbone: str, surgery: Fields = SURGERY) -> Fields:
    size, result, time, transformed, time_transformed, table = BACKBONES[backbone]
    if "recast" in surgery:
        result = transformed
        time = time_transformed
    condition = f", {time} times ResNet50-RS's training" if time else ""
    model = dict(name=backbone, pretrained=True, **surgery)
    return _fine_tune(model, size, table, top1(result, condition))


def _unstrided_control(backbone: str) -> Fields:
    """Return the CNN at stride 1: it separates the gain of self-attention from that of the last stage's resolution."""
    recipe = _row(backbone, UNSTRIDED)
    recipe["source"] = "T-CNN Table 1, a control that it does not have"
    recipe["expected"] = ""
    return recipe


def _after_400(size: int, result: str, surgery: Fields) -> Fields:
    expected = top1(result, ", from --model.weights of tcnn_late_400")
    return _fine_tune(dict(name="resnet50", start="weights", **surgery), size, "Table 3", expected)


# Epoch (of 400) at which the last stage of a ResNet-50 is recast as attention, and its top-1 (Table 3).
LATE_RECAST_TOP1 = {0: "79.95", 100: "80.44", 200: "80.28", 300: "79.28", 400: "79.04"}


def _late_recast(epoch: int) -> Fields:
    """Return one row of Table 3: SGD with momentum .9, 5 epochs of warm-up, cosine, DeiT's augmentation.

    Peak rate, weight decay and the kind of momentum are readings (docs/guides/readings.md).
    """
    sgd = dict(name="sgd", lr=0.4, momentum=0.9, weight_decay=1e-4, gate_lr="1x")
    return dict(
        model=dict(name="resnet50", recast_epoch=epoch, **SURGERY),
        data=images(1024, 224),
        augment=DEIT,
        optim=sgd | dict(warmup_epochs=5, schedule_from="start"),
        epochs=400,
        amp="bf16",
        source="T-CNN Table 3",
        expected=top1(LATE_RECAST_TOP1[epoch]),
    )


# Epochs of fine-tuning at 224 and top-1 (Table 4); the runs of 50 epochs are tcnn_resnetrs50 and tcnn_resnetrs101.
SHORT_RUNS = {"resnetrs50": {10: "80.11", 20: "80.51"}, "resnetrs101": {10: "81.54", 20: "81.90"}}

# Peak learning rates around the 1e-4 of `tcnn_resnetrs50` (Fig. 6).
PEAK_RATES = {"3e-5": 3e-5, "3e-4": 3e-4}

CNNS = [name for name, (_, alone, *_) in BACKBONES.items() if alone]


def _short_runs() -> dict[str, Fields]:
    recipes = {}
    for name, results in SHORT_RUNS.items():
        for epochs, result in results.items():
            recipe = _row(name)
            recipe["epochs"] = epochs
            recipe["source"] = "T-CNN Table 4"
            recipe["expected"] = top1(result)
            recipes[f"tcnn_{name}_{epochs}ep"] = recipe
    return recipes


def _peak_rates() -> dict[str, Fields]:
    """Return Fig. 6, which has no numbers."""
    recipes = {}
    for name, lr in PEAK_RATES.items():
        recipe = _row("resnetrs50")
        recipe["optim"] = OPTIM | dict(lr=lr)
        recipe["source"] = "T-CNN Fig. 6"
        recipe["expected"] = ""
        recipes[f"tcnn_resnetrs50_lr_{name}"] = recipe
    return recipes


RECIPES: dict[str, Fields] = {f"tcnn_{name}": _row(name) for name in BACKBONES}
RECIPES["tcnn_resnetrs270"]["keep_every"] = (
    2  # attention maps along training (Fig. 5): 25 models of 0.5 GB
)
RECIPES |= _short_runs()
RECIPES |= _peak_rates()
for _name in CNNS:
    RECIPES[f"finetune_{_name}"] = _row(_name, {})
for _name in CNNS:
    RECIPES[f"finetune_{_name}_unstrided"] = _unstrided_control(_name)
for _epoch in LATE_RECAST_TOP1:
    RECIPES[f"tcnn_late_{_epoch}"] = _late_recast(_epoch)
RECIPES["tcnn_resnet50_224"] = _after_400(224, "79.88", SURGERY)
RECIPES["tcnn_resnet50_320"] = _after_400(320, "80.84", SURGERY)
RECIPES["finetune_resnet50_320"] = _after_400(320, "79.78", {})
