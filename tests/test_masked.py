"""Masked pre-training: against a slow reference, blind to what is hidden, through files, taught by a frozen teacher."""

import copy
import math

import pytest
import timm
import torch

import isomorph as iso
from isomorph.checkpoints.autoencoder import load_autoencoder, save_autoencoder
from isomorph.errors import UserError
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.loaders import eval_loader
from isomorph.lab.training.build import build_model
from isomorph.lab.training.objectives import masked
from isomorph.lab.training.recipe.fields import MaskPart
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.models.masked_autoencoder import MaskedAutoencoder, sincos_pos_embed, split_patches
from isomorph.surgery import edits
from refusals import refused

CPU = torch.device("cpu")
SMALL = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5)
WIDE = {**SMALL, "img_size": (16, 24), "patch_size": (4, 8)}
PLAIN = "vit_tiny_patch16_224"
ENCODERS = {
    "timm": (PLAIN, SMALL),
    "registers": (PLAIN, {**SMALL, "reg_tokens": 2, "no_embed_class": True, "pre_norm": True}),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "pyramids": ("tdrl_vit_ti", SMALL),
    "rectangular pyramids": ("tdrl_vit_ti", WIDE),
}


def autoencoder(kind="timm", depth=2, width=16, heads=4, **arguments):
    """A small one, none of its weights at a special value."""
    name, sizes = ENCODERS[kind]
    model = MaskedAutoencoder(timm.create_model(name, **sizes), depth, width, heads, **arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("pos_embed"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images_for(model, count=3):
    return torch.randn(count, 3, *model.encoder.patch_embed.img_size)


def slow_positions(row, column, width):
    """Column, then row; of each the sines, then the cosines."""
    found = []
    for place in (column, row):
        for wave in (math.sin, math.cos):
            found += [wave(place / 10000 ** (4 * k / width)) for k in range(width // 4)]
    return torch.tensor(found, dtype=torch.float64)


def slow_loss(model, images, noise):
    """MAE section 3, patch by patch: encode the visible ones, put mask tokens for the others, paint, compare.

    In eval mode, where BatchNorm needs no batch.
    """
    vit = model.encoder
    errors = []
    hidden_count = 0
    (ph, pw), (H, W) = vit.patch_embed.patch_size, vit.patch_embed.grid_size
    prefix = vit.num_prefix_tokens
    for image, draw in zip(images, noise, strict=True):
        order = sorted(range(H * W), key=lambda i: draw[i].item())
        visible = order[: math.floor(H * W * (1 - model.ratio))]
        patches = []
        for r in range(H):
            for c in range(W):
                patches.append(image[:, r * ph : (r + 1) * ph, c * pw : (c + 1) * pw])
        own = vit.pos_embed[0, -H * W :]
        tokens = [
            vit.patch_embed.proj(patches[i][None]).flatten() + own[i] for i in sorted(visible)
        ]
        first = [
            getattr(vit, n)[0]
            for n in ("cls_token", "dist_token", "reg_token")
            if getattr(vit, n, None) is not None
        ]
        first = torch.cat(first) if first else own.new_zeros(0, vit.embed_dim)
        if not vit.no_embed_class:
            first = first + vit.pos_embed[0, :prefix]
        x = vit.norm_pre(torch.cat([first, torch.stack(tokens)])[None])
        for block in vit.blocks:
            x = block(x)
        x = model.decoder_embed(vit.fc_norm(vit.norm(x)))[0]
        understood = dict(zip(sorted(visible), x[prefix:], strict=True))
        placed = []
        for i in range(H * W):
            token = understood.get(i, model.mask_token[0, 0])
            placed.append(token + slow_positions(i // W, i % W, model.width))
        x = torch.cat([x[:prefix], torch.stack(placed)])[None]
        for block in model.decoder_blocks:
            x = block(x)
        painted = model.decoder_pred(model.decoder_norm(x))[0, prefix:]
        for i in set(range(H * W)) - set(visible):
            wanted = torch.stack(
                [patches[i][:, r, c] for r in range(ph) for c in range(pw)]
            ).flatten()
            if model.normalise:
                spread = ((wanted - wanted.mean()) ** 2).sum() / (len(wanted) - 1)
                wanted = (wanted - wanted.mean()) / (spread + 1e-6) ** 0.5
            errors.append(
                sum((a - b) ** 2 for a, b in zip(painted[i], wanted, strict=True)) / len(wanted)
            )
            hidden_count += 1
    return sum(errors) / hidden_count


@pytest.mark.parametrize("kind", ENCODERS)
def test_loss_and_gradients_are_the_papers(kind):
    model = autoencoder(kind, normalise=kind != "registers").double().eval()
    model.decoder_pos_embed = sincos_pos_embed(
        model.encoder.patch_embed.grid_size, model.width
    ).double()
    images = images_for(model).double()
    noise = model.draw_noise(images)
    losses = []
    gradients = []
    for loss in (model.loss(images, noise), slow_loss(model, images, noise)):
        names, parameters = zip(
            *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
        )
        losses.append(loss)
        gradients.append(
            dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))
        )
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7)  # the table is kept in float32
    assert None not in gradients[0].values(), (
        "DDP wants a gradient for every parameter that is trained"
    )
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_the_mask_is_uniform_and_of_one_size():
    seen = split_patches(torch.rand(4000, 10), 0.75)
    assert seen.visible.shape == (4000, 2)
    assert (seen.mask.sum(1) == 8).all()
    assert (seen.mask.mean(0) - 0.8).abs().max() < 0.03  # 4 deviations
    shown = torch.zeros(4000, 10).scatter_(1, seen.visible, 1.0)
    assert torch.equal(shown, 1 - seen.mask)
    assert torch.equal(
        split_patches(torch.tensor([[0.3, 0.1, 0.2, 0.9]]), 0.5).mask,
        torch.tensor([[1.0, 0.0, 0.0, 1.0]]),
    )


@pytest.mark.parametrize("kind", ["timm", "rectangular pyramids"])
def test_the_encoder_sees_nothing_of_hidden_patches(kind):
    model = autoencoder(kind).train()
    images = images_for(model)
    noise = model.draw_noise(images)
    seen = model.split_patches(images, noise)
    (height, width), grid = model.patch_size, model.encoder.patch_embed.grid_size
    for part, same in ((seen.mask, True), (1 - seen.mask, False)):
        pixels = (
            part.unflatten(1, grid)
            .repeat_interleave(height, 1)
            .repeat_interleave(width, 2)[:, None]
        )
        other = images + pixels * torch.randn_like(images)
        found = [copy.deepcopy(model).encode(x, seen) for x in (images, other)]
        assert torch.equal(*found) == same


def test_another_size_of_image():
    model = autoencoder("pyramids").eval()
    prediction, mask = model(torch.randn(2, 3, 8, 24))
    assert prediction.shape == (2, 12, 48)
    assert (mask.sum(1) == 9).all()
    for wrong, words in (
        (torch.randn(1, 3, 18, 16), "multiple"),
        (torch.randn(1, 3, 2, 16), "smaller"),
    ):
        refused(words, model, wrong)


def plain_autoencoder(*sizes, mask=0.75, **changes):
    return MaskedAutoencoder(
        timm.create_model(PLAIN, **SMALL | changes), *sizes or (1, 16, 4), mask
    )


def build_pair(block=2, student=None, **sizes):
    teacher = autoencoder(depth=3)
    return masked.GenericDistillationLoss(
        student or plain_autoencoder(**sizes), teacher, CPU, block
    )


def gated():
    return iso.recast(timm.create_model(PLAIN, **SMALL), iso.AttentionToGPSA(), "blocks.0.attn")


def encoded(name, **arguments):
    return MaskedAutoencoder(timm.create_model(name, **arguments), 1, 16, 4)


REFUSED = {
    "a CNN": (lambda: encoded("resnet18"), "VisionTransformer"),
    "places": (lambda: MaskedAutoencoder(gated(), 1, 16, 4), "recast"),
    "nothing visible": (lambda: plain_autoencoder(mask=0.99), "mask ratio"),
    "heads": (
        lambda: plain_autoencoder(1, 16, 3),
        "width 16 is not a multiple of 4 and of its 3 heads",
    ),
    "another shape": (
        lambda: build_pair(student=autoencoder("rectangular pyramids")),
        "cannot process",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_refused(kind):
    make, words = REFUSED[kind]
    refused(words, make)


# files


@pytest.mark.parametrize("kind", ["recast", "rectangular pyramids"])
def test_an_autoencoder_comes_back_whole(kind, tmp_path):
    if kind == "recast":
        wide = iso.recast(
            timm.create_model(PLAIN, **SMALL), iso.LinearToPyramid(), "blocks.*.mlp.fc?"
        )
        model = MaskedAutoencoder(wide, 1, 16, 4, mask=0.5, normalise=False).eval()
    else:
        model = autoencoder(kind, mask=0.5, normalise=False).eval()
    save_autoencoder(model, tmp_path / "autoencoder.safetensors")
    back = load_autoencoder(tmp_path / "autoencoder.safetensors")
    images = images_for(model)
    noise = model.draw_noise(images)
    for a, b in zip(model(images, noise), back(images, noise), strict=True):
        assert torch.equal(a, b)
    assert (back.ratio, back.normalise, back.heads, back.training) == (0.5, False, 4, False)
    assert not back.encoder.pos_embed.requires_grad
    assert edits(back.encoder) == edits(model.encoder)
    whole = iso.recast(model, iso.LinearToPyramid(), "decoder_blocks.0.mlp.fc1")
    refused("edit its encoder", save_autoencoder, whole, tmp_path / "whole.safetensors")


def test_the_published_size():
    """MAE's ViT-B with its decoder has 111.9M parameters, both fixed tables counted."""
    with torch.device("meta"):
        model = MaskedAutoencoder(timm.create_model("vit_base_patch16_224", num_classes=0))
    assert sum(p.numel() for p in model.parameters()) + 197 * 512 == 111_907_840


def test_pre_training_starts_a_fine_tuning_run(tmp_path):
    model = autoencoder("pyramids").eval()
    save_autoencoder(model, path := tmp_path / "autoencoder.safetensors")
    refused("it has a decoder", iso.load_weights, timm.create_model(PLAIN, **SMALL), path)
    iso.save(model.encoder, tmp_path / "encoder.safetensors")
    (name, sizes), images = ENCODERS["pyramids"], torch.randn(2, 3, 16, 16)
    for file in ("encoder.safetensors", "autoencoder.safetensors"):
        fresh = timm.create_model(name, **{**sizes, "num_classes": 7}).eval()
        iso.load_weights(fresh, tmp_path / file, fresh_head=True)
        assert torch.equal(fresh.forward_features(images), model.encoder.forward_features(images))
        for p in fresh.parameters():
            assert p.requires_grad
    assert torch.equal(iso.load(path)(images), model.encoder(images))


def published(model):
    """The tensors as MAE publishes them: class token, a table with a row of zeros for it, no head."""
    state = {
        n.removeprefix("encoder."): t.clone()
        for n, t in model.state_dict().items()
        if "head" not in n
    }
    table = torch.cat(
        [
            torch.zeros(1, model.width),
            sincos_pos_embed(model.encoder.patch_embed.grid_size, model.width),
        ]
    )
    return state | {"decoder_pos_embed": table[None]}


def test_a_published_checkpoint(tmp_path):
    model = autoencoder(depth=3, width=32, heads=16).eval()
    state = published(model)
    images = images_for(model)
    noise = model.draw_noise(images)
    torch.save({"model": state}, tmp_path / "mae.pth")
    arguments = {k: v for k, v in SMALL.items() if k != "num_classes"}
    back = load_autoencoder(tmp_path / "mae.pth", PLAIN, **arguments)
    assert torch.equal(back(images, noise)[0], model(images, noise)[0])
    changes = {
        "1 missing .decoder_norm.bias": {"decoder_norm.bias": None},
        "not an MAE checkpoint": {"decoder_embed.weight": None},
    }
    for words, change in changes.items():
        damaged = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        torch.save({"model": damaged}, tmp_path / "damaged.pth")
        refused(words, load_autoencoder, tmp_path / "damaged.pth", PLAIN, **arguments)


def test_an_encoder_alone_is_no_teacher(tmp_path):
    model = autoencoder()
    path = tmp_path / "mae_pretrain_vit_base.pth"
    torch.save({"model": {n: t for n, t in published(model).items() if "decoder" not in n}}, path)
    part = MaskPart(teacher=path, teacher_model=PLAIN)
    with pytest.raises(UserError, match=r"encoder and no decoder.*full pre-training checkpoint"):
        masked.build_pretraining(part, timm.create_model(PLAIN, **SMALL), CPU)


# tasks


@pytest.fixture
def digits():
    """Some real images, in batches."""
    source = open_source("digits", "test")
    config = dict(
        input_size=(3, 16, 16),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        interpolation="bicubic",
        crop_pct=1.0,
    )
    loader = eval_loader(source, config, 32)
    return [batch for batch, _ in zip(loader, range(4), strict=False)]


def test_evaluation_is_the_same_whatever_the_batches(digits):
    task = masked.ReconstructionLoss(autoencoder(), CPU)
    model = task.trainable_module
    images = torch.cat([images for images, _ in digits])
    torch.manual_seed(3)
    found = masked.evaluate_pretraining(task, model, digits)
    state = torch.get_rng_state()
    other = masked.evaluate_pretraining(task, model, [(images[:50], None), (images[50:], None)])
    assert torch.equal(state, torch.get_rng_state())
    repeated = masked.evaluate_pretraining(task, model, [*digits, (images[:1], torch.tensor([-1]))])
    assert repeated == found  # label -1: to fill up a process's batches
    assert found["reconstruction"] == pytest.approx(other["reconstruction"], rel=1e-5)


def pair(student="pyramids", block=4, **cfg):
    """A student taught by a wider, deeper teacher on differently normalised images."""
    teacher = autoencoder("timm", depth=5, width=32, heads=4, mask=0.5)
    teacher.encoder.pretrained_cfg = {**teacher.encoder.pretrained_cfg, **cfg}
    return masked.GenericDistillationLoss(autoencoder(student), teacher, CPU, block)


def test_alignment_is_the_papers():
    task = pair(block=2, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3)).eval()
    student = task.trainable_module.student
    teacher = task.teacher.model
    student.encoder.pretrained_cfg = {**student.encoder.pretrained_cfg}
    pixels = torch.rand(2, 3, 16, 16)
    seen = {}
    for who in (student, teacher):
        mean = torch.tensor(who.pretrained_cfg["mean"]).view(3, 1, 1)
        std = torch.tensor(who.pretrained_cfg["std"]).view(3, 1, 1)
        seen[who] = (pixels - mean) / std
    noise = student.draw_noise(pixels)
    found = task(seen[student], noise=noise)
    goal = teacher.decoder_features(seen[teacher], noise, block=2)
    goal = (goal - goal.mean(-1, keepdim=True)) / (
        goal.var(-1, unbiased=False, keepdim=True) + 1e-6
    ).sqrt()
    off = (task.trainable_module.align(student.decoder_features(seen[student], noise)) - goal).abs()
    wanted = torch.where(off < 2, off**2 / 4, off - 1).mean()
    torch.testing.assert_close(found["loss"], wanted, rtol=1e-4, atol=1e-5)
    assert found["output"].shape == (2, 16, 32)
    for p in task.teacher.parameters():
        assert not p.requires_grad
    for module in task.teacher.modules():
        assert not module.training
    assert torch.equal(
        student.split_patches(pixels, noise).mask, teacher.split_patches(pixels, noise).mask
    )


def test_patches_are_not_dropped_twice():
    vit = timm.create_model(PLAIN, **SMALL, patch_drop_rate=0.5)
    refused("patch_drop_rate", MaskedAutoencoder, vit, 1, 16, 4)


def test_a_width_without_positions_is_refused():
    small = SMALL | dict(embed_dim=30)
    refused("embed_dim 30", MaskedAutoencoder, timm.create_model(PLAIN, **small), 1, 16, 4)


def test_pre_training_starts_from_a_classifier_too(tmp_path):
    trained = timm.create_model(PLAIN, **SMALL)
    iso.save(trained, weights := tmp_path / "trained.safetensors")
    kwargs = {key: value for key, value in SMALL.items() if key != "num_classes"}
    for part in (ModelPart(weights=weights), ModelPart(name=PLAIN, kwargs=kwargs, weights=weights)):
        encoder = build_model(part, 0)
        assert not [name for name in encoder.state_dict() if name.startswith("head")]
        assert torch.equal(encoder.blocks[0].attn.qkv.weight, trained.blocks[0].attn.qkv.weight)
