"""TDRL's Figures 3, 4 and 5: pyramids in a part of the network, rectified in several ways, or not at all.

Every point is two runs: pre-training (`_g2sd`), then fine-tuning from its checkpoint (`--model.weights`). The figures
show no numbers, so the expected results are those that the text describes. It does not say which N Figs. 4 and 5 have.
"""

from typing import Any

from isomorph.recipes.tdrl import MLP_LAYERS, fine_tune, pretrain

QK_LAYERS = ["blocks.*.attn.q", "blocks.*.attn.k"]
AFTER = "after its fine-tuning"


def _figure_3() -> dict[str, dict[str, Any]]:
    """Return Fig. 3: four branches in queries and keys, their sum unchanged, rescaled or normalised; monitored."""
    expectations = {
        "none": "attention logits above 1,000 in every block, then no number after a few thousand steps",
        "rescale": "attention logits like the baseline's, tdrl_plain_g2sd",
        "batchnorm": f"attention logits like the baseline's, and the best top-1 {AFTER}",
    }
    recipes: dict[str, dict[str, Any]] = {}
    for rectify, expected in expectations.items():
        kwargs = dict(layout="R-D1W4", rectify=rectify, where=QK_LAYERS)
        recipes[f"tdrl_fig3_{rectify}_g2sd"] = pretrain(kwargs, "Fig. 3 a-c", expected) | dict(monitor_every=100)
        if rectify != "none":
            recipes[f"tdrl_fig3_{rectify}_100ep"] = _fine_tune_100_epochs(
                kwargs, "Fig. 3 d", "batchnorm's above rescale's"
            )
    return recipes


def _figure_4() -> dict[str, dict[str, Any]]:
    """Return Fig. 4: with and without rectification, 1 to 3 branches in the MLP, and P-W2S in all pyramids.

    Queries and keys are always normalised. P-W2S with rectification is tdrl_vit_ti_g2sd, then tdrl_vit_ti_100ep.
    """
    rectify_none = {"v": "none", "fc1": "none", "fc2": "none"}
    kwargs: dict[str, Any] = dict(rectify=rectify_none)
    points = {"all_none": (kwargs, "0.21 below tdrl_vit_ti_100ep's")}
    for width in (1, 2, 3):
        kwargs = dict(layout=f"P-W{width}S", where=MLP_LAYERS)
        below = {1: "about that of", 2: "0.13 below that of", 3: "at most 0.18 below that of"}[width]
        points[f"ffn_w{width}"] = (kwargs, "an unpublished one")
        points[f"ffn_w{width}_none"] = (kwargs | dict(rectify="none"), f"{below} tdrl_fig4_ffn_w{width}_100ep")
    recipes: dict[str, dict[str, Any]] = {}
    for name, (kwargs, expected) in points.items():
        recipes[f"tdrl_fig4_{name}_g2sd"] = pretrain(kwargs, "Fig. 4", f"top-1 {AFTER}: {expected}")
        recipes[f"tdrl_fig4_{name}_100ep"] = _fine_tune_100_epochs(kwargs, "Fig. 4", expected)
    return recipes


def _figure_5() -> dict[str, dict[str, Any]]:
    """Return Fig. 5: pyramids in the values of the first blocks, fused after pre-training.

    Fine-tuning is tdrl_fused_100ep.
    """
    return {
        f"tdrl_fig5_v_{blocks}_g2sd": pretrain(
            dict(where=[f"blocks.{i}.attn.v" for i in range(blocks)]),
            f"Fig. 5, -V-{blocks}",
            "more than 76.24 top-1 after isomorph fuse and tdrl_fused_100ep, and the more the more blocks",
        )
        for blocks in (4, 8, 12)
    }


def _fine_tune_100_epochs(kwargs: dict[str, Any], source: str, expected: str) -> dict[str, Any]:
    """Return fine-tuning for 100 epochs with pyramids, whose top-1 is known only in comparison with other runs."""
    recipe = fine_tune(kwargs, 100, source, "")
    return recipe | dict(expected=f"top-1 on ImageNet-1k: {expected}; from pre-trained --model.weights")


RECIPES: dict[str, dict[str, Any]] = {**_figure_3(), **_figure_4(), **_figure_5()}
