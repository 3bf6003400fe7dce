"""Specific distillation as G2SD has it: a distillation token, and a teacher with arguments of its own (MAE's ViT-B)."""

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.checkpoints.autoencoder import load_autoencoder
from isomorph.lab.training.build import build_model
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.state import Run
from isomorph.models.masked_autoencoder import MaskedAutoencoder
from test_operations import Launched

SMALL = dict(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3)
TEACHER = "vit_base_patch16_224.mae"


def run_recipe(folder, **more):
    recipe = dict(
        augment=dict(mixup=0.2), optim=dict(layer_decay=0.65), epochs=1, out=str(folder)
    ) | dict(
        model=dict(name="tdrl_vit_ti_distilled", kwargs=SMALL),
        data=dict(source="digits", fraction=0.05, size=[16, 16], batch_size=16, test_images=60),
    )
    return validate(recipe | more)


def mae_files(folder):
    """A pooled teacher of ten classes in MAE's own fine-tuning layout, and the model that it is."""
    torch.manual_seed(0)
    net = timm.create_model(TEACHER, num_classes=10, global_pool="avg", **SMALL).eval()
    assert "fc_norm.weight" in net.state_dict()
    torch.save({"model": net.state_dict(), "epoch": 99}, folder / "mae_finetuned.pth")
    return net, folder / "mae_finetuned.pth"


@pytest.mark.parametrize(("layout", "kind"), [("P-W2S", "hard"), ("plain", "soft")])
def test_a_token_learns_the_teacher_and_both_heads_predict(tmp_path, layout, kind):
    """The class token learns the labels, the other the teacher, with equal weights; at test the mean of both heads."""
    net, weights = mae_files(tmp_path)
    kwargs = SMALL | dict(global_pool="avg", num_classes=10)
    distill = dict(teacher=TEACHER, weights=str(weights), kwargs=kwargs, kind=kind, token=True)
    model = dict(name="tdrl_vit_ti_distilled", kwargs=SMALL | dict(layout=layout))
    recipe = run_recipe(tmp_path / "run", distill=distill, model=model)
    run = Run(recipe)
    run.loss_module.train()
    x = torch.randn(8, 3, 16, 16)
    soft = torch.rand(8, 10).softmax(1)
    first, second = run.trained(x)
    # MAE's, not those of timm's default vit_base
    assert net.pretrained_cfg["mean"] == (0.485, 0.456, 0.406)
    labels = -(soft * first.log_softmax(1)).sum(1).mean()
    goal = net(x).argmax(1) if kind == "hard" else net(x).softmax(1)
    term = nn.functional.cross_entropy(second, goal)
    if kind == "soft":  # the divergence from the teacher, without the teacher's entropy
        term = term + (goal * goal.log()).sum(1).mean()
    with Launched(wait=False):
        found = run.loss_module(x, soft)["loss"]
    torch.testing.assert_close(found, (labels + term) / 2)
    result = iso.train(recipe, show=False)
    wide = iso.load(tmp_path / "run/model.safetensors")
    tokens = wide.forward_features(x)
    torch.testing.assert_close(
        wide(x), (wide.head(tokens[:, 0]) + wide.head_dist(tokens[:, 1])) / 2
    )
    torch.testing.assert_close(wide(x), result.model(x))


def test_a_pre_trained_encoder_gets_a_token(tmp_path):
    """The checkpoint has a class token only; the distillation token is new and has no position."""
    encoder = timm.create_model("tdrl_vit_ti", num_classes=0, layout="plain", **SMALL).eval()
    autoencoder = MaskedAutoencoder(encoder, 1, 16, 4)
    state = {
        name.removeprefix("encoder."): tensor for name, tensor in autoencoder.state_dict().items()
    }
    torch.save({"model": state}, tmp_path / "mae.pth")
    kwargs = SMALL | dict(layout="P-W2S", num_classes=7)
    part = ModelPart(name="tdrl_vit_ti_distilled", kwargs=kwargs, weights=tmp_path / "mae.pth")
    model = build_model(part, 7).eval()
    new = model.isomorph_record.start.partition("new: ")[2]
    assert {"dist_token", "head_dist.weight"} <= set(new.replace(" and ", ", ").split(", "))
    torch.testing.assert_close(model.pos_embed[:, [0, 2, 3, 4, 5]], encoder.pos_embed)
    assert not model.pos_embed[:, 1].any()
    for block in model.blocks:  # nobody attends to the new token: the others are what they were
        block.attn.forward = (lambda attn: lambda x, **_: blind(attn, x))(block.attn)
    x = torch.randn(2, 3, 16, 16)
    found = model.forward_features(x)[:, [0, 2, 3, 4, 5]]
    torch.testing.assert_close(found, encoder.forward_features(x), rtol=1e-4, atol=1e-4)


def blind(attn, x):
    """Attention in which the second token is no key."""
    q, k, v = attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    mask = torch.ones(x.shape[1], dtype=torch.bool)
    mask[1] = False
    return attn.proj(
        nn.functional.scaled_dot_product_attention(q, k, v, mask[None]).transpose(1, 2).flatten(2)
    )


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", TEACHER])
def test_the_teacher_of_generic_distillation_sees_images_as_mae_does(tmp_path, name):
    """timm's own vit_base_patch16_224 is normalised by 0.5; MAE's checkpoints are not."""
    encoder = timm.create_model(name, num_classes=0, **SMALL)
    state = MaskedAutoencoder(encoder, 1, 16, 4).state_dict()
    torch.save(
        {"model": {n.removeprefix("encoder."): t for n, t in state.items()}}, tmp_path / "mae.pth"
    )
    teacher = load_autoencoder(tmp_path / "mae.pth", name, 4, **SMALL)
    assert teacher.pretrained_cfg["mean"][0] == 0.485
