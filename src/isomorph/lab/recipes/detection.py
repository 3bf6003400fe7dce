"""TDRL on COCO: Mask R-CNN around a ViT-Tiny with pyramids, as in ViTDet, and its baselines (Table 2).

184,375 steps of 64 images of 1024 x 1024 pixels (100 epochs), AdamW, layer decay .7, drop path .1, large-scale jitter,
a tenth of the rate after 163,889 and 177,546 steps. The rate is 3e-4, and 1e-4 with a teacher. The weights are those of
masked pre-training (`tdrl_vit_ti_g2sd`), as `--model.weights`; those with a dagger learn the proposals of a ViT-B that
was trained on the same task (`--task.teacher`). `--data.root` is the folder with annotations/, train2017/ and val2017/.
What the paper leaves open: docs/guides/readings.md.
"""

from typing import Any

_PLAIN: dict[str, Any] = dict(layout="plain")
_OPTIM: dict[str, Any] = dict(
    name="adamw", betas=[0.9, 0.999], layer_decay=0.7, warmup_iterations=250
)
_OPTIM |= dict(schedule="step", milestones=[163_889, 177_546], warmup_start=0.001)


def _coco(
    source: str,
    expected: str,
    backbone: dict[str, Any],
    distilled: bool = False,
    size: int = 1024,
    network: str = "tdrl_vit_ti",
) -> dict[str, Any]:
    return dict(
        model=dict(
            name="mask_rcnn",
            kwargs={"backbone": network, "backbone_kwargs": backbone},
            start="weights",
        ),
        task=dict(name="detection", skip_annotations=10),  # a few have no area
        data=dict(source="coco", batch_size=64, workers=8, size=[size, size]),
        optim=_OPTIM
        | (dict(lr=1e-4, weight_decay=0.05) if distilled else dict(lr=3e-4, weight_decay=0.1)),
        iterations=184_375,
        evaluate_every=10,
        drop_path=0.1,
        amp="bf16",
        source=f"TDRL {source}",
        expected=f"{expected} on COCO val2017, from pre-trained --model.weights"
        + (" and a trained --task.teacher" if distilled else ""),
    )


RECIPES: dict[str, dict[str, Any]] = {
    "vitdet_tdrl_ti": _coco("Table 2", "box AP 46.5, mask AP 41.5", {}),
    "vitdet_tdrl_ti_distilled": _coco(
        "Table 2, dagger", "box AP 47.4, mask AP 42.1", {}, distilled=True
    ),
    "vitdet_plain_ti": _coco("Table 2, G2SD-Ti", "box AP 44.0, mask AP 39.6", _PLAIN),
    "vitdet_plain_ti_distilled": _coco(
        "Table 2, G2SD-Ti, dagger", "box AP 46.3, mask AP 41.3", _PLAIN, distilled=True
    ),
    "vitdet_plain_ti_640": _coco(
        "Table 2, D-MAE-Lite", "box AP 42.3, mask AP 37.4", _PLAIN, size=640
    ),
    "vitdet_teacher_b": _coco(
        "Table 2, the teacher", "box AP 51.6", {}, network="vit_base_patch16_224"
    ),
}

_NARROW: dict[str, Any] = dict(
    backbone="resnet18", backbone_kwargs=dict(channels=[16, 32, 64, 128]), channels=32
)
_NARROW |= dict(features=128, proposals=150, samples=64, anchor_scale=4)
RECIPES["mask_rcnn_bccd"] = dict(
    model=dict(name="mask_rcnn", kwargs=_NARROW),
    task=dict(name="detection", masks=False, scales=[0.8, 1.25]),
    data=dict(source="coco", batch_size=4, size=[192, 256]),
    dataset="BCCD",
    optim=dict(lr=2e-3, warmup_epochs=1, clip_grad=5.0),
    epochs=14,
    evaluate_every=2,
    source="isomorph: boxes of blood cells, a narrow network for a CPU",
    expected="box AP 54.9, AP50 87.8",
)
