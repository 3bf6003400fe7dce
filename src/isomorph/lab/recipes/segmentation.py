"""TDRL on ADE20K: UperNet around a ViT-Tiny with pyramids, and its baselines (Table 2 and appendix B.9).

160,000 steps of 16 crops, AdamW
at 1e-4, a linear decay after 1500 steps of warm-up, drop path .1. Layer decay is .75 with pyramids, .80 with a teacher,
.65 without pyramids. The weights are those of masked pre-training (`tdrl_vit_ti_g2sd`), as `--model.weights`; those
with a dagger learn the logits of a ViT-B that was trained on the same task (`--task.teacher`). B.9's two numbers are of
BatchNorm alone, 37.8, and of the plain network, 41.4: the baseline of Table 2. Another pre-training gives Table 2's
other baselines: MAE-Ti 36.9 (dagger 42.0), MAE-Lite 37.6, D-MAE-Lite 42.0.
What the paper leaves open: docs/guides/readings.md. `--data.root` is the folder with images/ and annotations/.
"""

from typing import Any

# LayerScale and relative positions, as BEiT has them.
PYRAMIDS: dict[str, Any] = dict(init_values=1.0, relative_bias=True)
PLAIN = PYRAMIDS | dict(layout="plain")
DISTILLED = dict(distill_weight=10.0)
_OPTIM: dict[str, Any] = dict(
    name="adamw", lr=1e-4, betas=[0.9, 0.999], weight_decay=0.05, schedule="linear"
)
_OPTIM |= dict(schedule_from="start", warmup_iterations=1500, warmup_start=1e-6)


def _ade20k(
    arguments: dict[str, Any],
    layer_decay: float,
    source: str,
    expected: str,
    distilled: bool = False,
    **model: Any,
) -> dict[str, Any]:
    kwargs = {"backbone": "tdrl_vit_ti", "backbone_kwargs": arguments, **model}
    return dict(
        model=dict(name="upernet", kwargs=kwargs, start="weights"),
        task=dict(name="segmentation", crop=[512, 512], resize=[2048, 512])
        | (DISTILLED if distilled else {}),
        data=dict(source="ade20k", batch_size=16, workers=4),
        optim=_OPTIM | dict(layer_decay=layer_decay),
        iterations=160_000,
        evaluate_every=13,  # 16,420 steps of 16 images, where G2SD's code tests after 16,000
        drop_path=0.1,
        amp="bf16",
        source=f"TDRL {source}",
        expected=f"{expected} mIoU on ADE20K, from pre-trained --model.weights"
        + (" and a trained --task.teacher" if distilled else ""),
    )


_TEACHER: dict[str, Any] = dict(backbone="vit_base_patch16_224", channels=768)
RECIPES: dict[str, dict[str, Any]] = {
    "upernet_tdrl_ti": _ade20k(PYRAMIDS, 0.75, "Table 2", "42.5"),
    "upernet_tdrl_ti_distilled": _ade20k(PYRAMIDS, 0.80, "Table 2, dagger", "45.2", distilled=True),
    "upernet_plain_ti": _ade20k(PLAIN, 0.65, "Table 2, G2SD-Ti; appendix B.9, baseline", "41.4"),
    "upernet_plain_ti_distilled": _ade20k(
        PLAIN, 0.65, "Table 2, G2SD-Ti, dagger", "44.5", distilled=True
    ),
    "upernet_batchnorm_ti": _ade20k(
        PYRAMIDS | dict(layout="naive-W1", rectify="none"),
        0.75,
        "appendix B.9, BatchNorm alone",
        "37.8",
    ),
    "upernet_teacher_b": _ade20k(
        dict(init_values=1.0), 0.65, "Table 2, the teacher", "48.1", **_TEACHER
    ),
}

_SMALL = dict(
    backbone="tdrl_vit_ti", channels=64, auxiliary_channels=32, backbone_kwargs=dict(depth=6)
)
RECIPES["upernet_camvid"] = dict(
    model=dict(name="upernet", kwargs=_SMALL),
    task=dict(name="segmentation", crop=[192, 192], resize=None, ratio=[0.5, 1.5]),
    data=dict(source="camvid", batch_size=8),
    optim=dict(
        lr=1e-3, schedule="linear", schedule_from="start", warmup_iterations=20, clip_grad=1.0
    ),
    iterations=400,
    evaluate_every=10,
    source="isomorph: a small network on the images of CamVid",
)
