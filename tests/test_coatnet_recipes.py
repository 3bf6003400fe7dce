"""Every run of the CoAtNet paper builds the network it names, under the column of Table 10 it belongs to."""

from typing import NamedTuple

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
        blocks = [module for module in model.modules() if isinstance(module, MBConv)]
        strides = {block.depthwise.stride for block in blocks}
        assert ((2, 2) in strides) == ("strided" in name or name.startswith("coatnet_3_jft"))


class Column(NamedTuple):
    """What the runs of a column have alike."""

    lr: float
    min_lr: float
    weight_decay: float
    warmup_epochs: float
    schedule: str
    batch_size: int
    epochs: int
    loss: str
    smoothing: float
    mixup: float
    ema: float | None
    test_crop: str


ONE = Column(1e-3, 1e-5, 0.05, 32, "cosine", 4096, 300, "softmax", 0.1, 0.8, None, "center")
ONE_TUNED = Column(5e-5, 0.0, 1e-8, 0, "constant", 512, 30, "softmax", 0.1, 0.8, 0.9999, "whole")
MANY = Column(1e-3, 1e-5, 0.01, 5, "linear", 4096, 90, "sigmoid", 0.0001, 0.0, None, "center")
MANY_TUNED = Column(5e-5, 0.0, 1e-8, 0, "constant", 1024, 30, "softmax", 0.1, 0.0, 0.9999, "whole")
JFT = Column(5e-4, 1e-5, 0.01, 0.273, "linear", 4096, 14, "sigmoid", 0.0001, 0.0, None, "center")
JFT_TUNED = Column(5e-5, 0.0, 1e-8, 0, "constant", 512, 30, "softmax", 0.1, 0.0, 0.9999, "whole")
TABLE_10 = {  # column, stochastic depth, RandAugment, top-1
    "coatnet_0": (ONE, 0.2, 15, "81.6"),
    "coatnet_3": (ONE, 0.7, 15, "84.5"),
    "coatnet_0_384": (ONE_TUNED, 0.2, 15, "83.9"),
    "coatnet_3_512": (ONE_TUNED, 0.7, 20, "86.0"),
    "coatnet_3_in21k": (MANY, 0.5, None, "53.0"),
    "coatnet_4_in21k_ra": (MANY, 0.7, 5, ""),
    "coatnet_4_in21k_ra_150ep": (MANY._replace(epochs=150), 0.7, 5, ""),
    "coatnet_4_in21k_ra_150ep_512": (MANY_TUNED, 0.7, 5, "88.56"),
    "coatnet_3_jft": (JFT._replace(lr=1e-3), 0.0, 5, "needs"),
    "coatnet_4_jft": (JFT, 0.1, 5, "needs"),
    "coatnet_7_jft3b": (JFT._replace(warmup_epochs=0.0273), 0.0, 5, "needs"),
    "coatnet_5_jft_512": (JFT_TUNED, 0.2, 5, "89.77"),
    "coatnet_7_jft3b_512": (JFT_TUNED, 0.2, 5, "90.88"),
    "coatnet_2_placeblind": (ONE, 0.5, 15, "83.8"),
    "coatnet_3_v1_in21k_384": (MANY_TUNED, 0.5, None, "87.4"),
    "coatnet_layout_c_c_t_t_jft_384": (JFT_TUNED, 0.1, 5, "84.23"),
}


@pytest.mark.parametrize("name", TABLE_10)
def test_table_10(name):
    recipe = iso.load_recipe(name)
    column, drop_path, magnitude, top1 = TABLE_10[name]
    optim = recipe.optim
    augment = recipe.augment
    found = Column(
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        warmup_epochs=optim.warmup_epochs,
        schedule=optim.schedule,
        batch_size=recipe.data.batch_size,
        epochs=recipe.epochs,
        loss=recipe.loss,
        smoothing=augment.smoothing,
        mixup=augment.mixup,
        ema=recipe.ema,
        test_crop=recipe.data.test_crop,
    )
    assert found == column
    assert optim.clip_grad == 1.0
    assert recipe.drop_path == drop_path
    policy = None
    if magnitude is not None:
        policy = f"rand-m{magnitude}-n2-p1.0-mmax30"
    assert augment.auto_augment == policy
    assert recipe.expected.partition(" ")[0] == top1
    end = name.rpartition("_")[2]
    size = int(end) if end in ("224", "384", "512") else 224
    assert recipe.data.size == [size, size]
    assert recipe.model.kwargs.get("img_size", 224) == size


def test_figure_1_is_bare():
    for name in LAYOUTS:
        for ending, epochs in (("", 300), ("_jft", 3)):
            recipe = iso.load_recipe(f"coatnet_layout_{name}{ending}")
            assert recipe.augment == AugmentPart(scale=(1.0, 1.0), hflip=0.0)
            assert recipe.drop_path == 0.0
            assert recipe.optim.weight_decay == 0.0
            assert recipe.data.test_crop == "whole"  # as in training, where the crop is the image
            assert recipe.epochs == epochs


def test_layouts_are_matched():
    """In parameters, and less so in multiply-accumulates, to C-C-T-T."""
    with torch.device("meta"):
        models = {}
        for name in LAYOUTS:
            kwargs = RECIPES[f"coatnet_layout_{name}"]["model"]["kwargs"]
            models[name] = timm.create_model("coatnet_0", **kwargs)
    image = (3, 224, 224)
    parameters = count_parameters(models["c_c_t_t"])
    macs = count_macs(models["c_c_t_t"], image)
    for name, model in models.items():
        assert count_parameters(model) == pytest.approx(parameters, rel=0.05)
        spread = 0.2 if name == "vit_rel" else 0.03
        assert count_macs(model, image) == pytest.approx(macs, rel=spread)


def test_sigmoids_sum_over_classes():
    logits = torch.randn(4, 7)
    labels = torch.tensor([1, 0, 6, 3])
    loss = build_criterion(AugmentPart(), "sigmoid")
    one_hot = F.one_hot(labels, 7).float()
    soft = torch.rand(4, 7)
    for given, shares in ((labels, one_hot), (soft, soft)):
        of_classes = shares * F.logsigmoid(logits) + (1 - shares) * F.logsigmoid(-logits)
        torch.testing.assert_close(loss(logits, given), -of_classes.sum(1).mean())
    smooth = build_criterion(AugmentPart(smoothing=1e-4), "sigmoid")
    few = logits.bfloat16()
    torch.testing.assert_close(smooth(few, labels), smooth(few.float(), labels), rtol=1e-7, atol=0)


@pytest.mark.parametrize(("crop", "mode"), [("whole", "squash"), ("center", "center")])
def test_what_of_a_test_image_is_seen(crop, mode):
    recipe = iso.load_recipe("digits_cnn", [f"data.test_crop={crop}"])
    config = data_config(recipe, timm.create_model("coatnet_0", depths=(2, 1, 1, 1, 1)))
    assert config["crop_mode"] == mode
    assert config["crop_pct"] == (1.0 if crop == "whole" else 0.875)
