"""Every run of the CoAtNet paper builds the network it names, under the column of Table 10 it belongs to."""

import pytest
import timm
import torch
import torch.nn.functional as F

import isomorph as iso
from isomorph.analysis.cost import count_macs, count_parameters
from isomorph.lab.recipes import RECIPES
from isomorph.lab.training.build import build_model, data_config
from isomorph.lab.training.objectives.supervised import build_criterion
from isomorph.lab.training.recipe.fields import AugmentPart
from isomorph.layers import LayerNormMBConv, MBConv, RelativeAttention

COATNETS = [name for name in RECIPES if name.startswith("coatnet_")]
LAYOUTS = ("c_c_c_c", "c_c_c_t", "c_c_t_t", "c_t_t_t", "vit_rel")


@pytest.mark.parametrize("name", COATNETS)
def test_is_built_as_the_table_says(name):
    recipe = iso.load_recipe(name)
    with torch.device("meta"):
        model = build_model(recipe.model, 1000, recipe.drop_path)
    kinds = [type(module) for module in model.modules()]
    assert (RelativeAttention in kinds) == ("placeblind" not in name and "c_c_c_c" not in name)
    assert (LayerNormMBConv in kinds) == ("layernorm" in name)
    assert (MBConv in kinds) == ("layernorm" not in name and "vit_rel" not in name)
    if MBConv in kinds:
        strided = [
            m for m in model.modules() if isinstance(m, MBConv) and m.depthwise.stride == (2, 2)
        ]
        assert bool(strided) == ("strided" in name or name.startswith("coatnet_3_jft"))


# peak rate, last rate, decay, warm-up, schedule, batch, epochs, loss, smoothing, mixup, EMA, test crop
ONE = (1e-3, 1e-5, 0.05, 32, "cosine", 4096, 300, "softmax", 0.1, 0.8, None, "center")
ONE_TUNED = (5e-5, 0.0, 1e-8, 0, "constant", 512, 30, "softmax", 0.1, 0.8, 0.9999, "whole")
MANY = (1e-3, 1e-5, 0.01, 5, "linear", 4096, 90, "sigmoid", 0.0001, 0.0, None, "center")
MANY_TUNED = (5e-5, 0.0, 1e-8, 0, "constant", 1024, 30, "softmax", 0.1, 0.0, 0.9999, "whole")
JFT = (5e-4, 1e-5, 0.01, 0.273, "linear", 4096, 14, "sigmoid", 0.0001, 0.0, None, "center")
JFT_TUNED = (5e-5, 0.0, 1e-8, 0, "constant", 512, 30, "softmax", 0.1, 0.0, 0.9999, "whole")
TABLE_10 = {  # column, stochastic depth, RandAugment, top-1
    "coatnet_0": (ONE, 0.2, 15, "81.6"),
    "coatnet_3": (ONE, 0.7, 15, "84.5"),
    "coatnet_0_384": (ONE_TUNED, 0.2, 15, "83.9"),
    "coatnet_3_512": (ONE_TUNED, 0.7, 20, "86.0"),
    "coatnet_3_in21k": (MANY, 0.5, None, "53.0"),
    "coatnet_4_in21k_ra": (MANY, 0.7, 5, ""),
    "coatnet_4_in21k_ra_150ep": ((*MANY[:6], 150, *MANY[7:]), 0.7, 5, ""),
    "coatnet_4_in21k_ra_150ep_512": (MANY_TUNED, 0.7, 5, "88.56"),
    "coatnet_3_jft": ((1e-3, *JFT[1:]), 0.0, 5, "needs"),
    "coatnet_4_jft": (JFT, 0.1, 5, "needs"),
    "coatnet_7_jft3b": ((*JFT[:3], 0.0273, *JFT[4:]), 0.0, 5, "needs"),
    "coatnet_5_jft_512": (JFT_TUNED, 0.2, 5, "89.77"),
    "coatnet_7_jft3b_512": (JFT_TUNED, 0.2, 5, "90.88"),
    "coatnet_2_placeblind": (ONE, 0.5, 15, "83.8"),
    "coatnet_3_v1_in21k_384": (MANY_TUNED, 0.5, None, "87.4"),
    "coatnet_layout_c_c_t_t_jft_384": (JFT_TUNED, 0.1, 5, "84.23"),
}


@pytest.mark.parametrize("name", TABLE_10)
def test_table_10(name):
    recipe, (column, drop_path, magnitude, top1) = iso.load_recipe(name), TABLE_10[name]
    optim = recipe.optim
    augment = recipe.augment
    found = (
        optim.lr,
        optim.min_lr,
        optim.weight_decay,
        optim.warmup_epochs,
        optim.schedule,
        recipe.data.batch_size,
    )
    found += (
        recipe.epochs,
        recipe.loss,
        augment.smoothing,
        augment.mixup,
        recipe.ema,
        recipe.data.test_crop,
    )
    assert found == column
    assert optim.clip_grad == 1.0
    assert recipe.drop_path == drop_path
    assert augment.auto_augment == (
        None if magnitude is None else f"rand-m{magnitude}-n2-p1.0-mmax30"
    )
    assert recipe.expected.partition(" ")[0] == top1
    size = int(name.rpartition("_")[2]) if name.rpartition("_")[2] in ("224", "384", "512") else 224
    assert recipe.data.size == [size, size]
    assert recipe.model.kwargs.get("img_size", 224) == size


def test_figure_1_is_bare():
    for name in LAYOUTS:
        for recipe in (
            iso.load_recipe(f"coatnet_layout_{name}"),
            iso.load_recipe(f"coatnet_layout_{name}_jft"),
        ):
            assert recipe.augment == AugmentPart(scale=(1.0, 1.0), hflip=0.0)
            assert recipe.drop_path == recipe.optim.weight_decay == 0.0
            assert recipe.data.test_crop == "whole"  # as in training, where the crop is the image
            assert recipe.epochs == (3 if recipe.name.endswith("jft") else 300)


def test_layouts_are_matched():
    """In parameters, and less so in multiply-accumulates, to C-C-T-T."""
    with torch.device("meta"):
        models = {}
        for name in LAYOUTS:
            kwargs = RECIPES[f"coatnet_layout_{name}"]["model"]["kwargs"]
            models[name] = timm.create_model("coatnet_0", **kwargs)
    wanted = count_parameters(models["c_c_t_t"]), count_macs(models["c_c_t_t"], (3, 224, 224))
    for name, model in models.items():
        assert count_parameters(model) == pytest.approx(wanted[0], rel=0.05)
        assert count_macs(model, (3, 224, 224)) == pytest.approx(
            wanted[1], rel=0.2 if name == "vit_rel" else 0.03
        )


def test_sigmoids_sum_over_classes():
    logits = torch.randn(4, 7)
    labels = torch.tensor([1, 0, 6, 3])
    loss = build_criterion(AugmentPart(), "sigmoid")
    for given, hot in ((labels, F.one_hot(labels, 7).float()), (soft := torch.rand(4, 7), soft)):
        wanted = -(hot * F.logsigmoid(logits) + (1 - hot) * F.logsigmoid(-logits)).sum(1).mean()
        torch.testing.assert_close(loss(logits, given), wanted)
    smooth = build_criterion(AugmentPart(smoothing=1e-4), "sigmoid")
    few = logits.bfloat16()
    torch.testing.assert_close(smooth(few, labels), smooth(few.float(), labels), rtol=1e-7, atol=0)


@pytest.mark.parametrize(("crop", "mode"), [("whole", "squash"), ("center", "center")])
def test_what_of_a_test_image_is_seen(crop, mode):
    recipe = iso.load_recipe("digits_cnn", [f"data.test_crop={crop}"])
    config = data_config(recipe, timm.create_model("coatnet_0", depths=(2, 1, 1, 1, 1)))
    assert config["crop_mode"] == mode
    assert config["crop_pct"] == (1.0 if crop == "whole" else 0.875)
