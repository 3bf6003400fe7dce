"""Patch and image sizes of vision transformers: what is exact, and what the report says."""

import pytest
import timm
import torch
import torch.nn.functional as F

import isomorph as iso
from command_line import isomorph
from isomorph.cli.options import DataOptions
from isomorph.cli.port import resize
from isomorph.surgery.resize import resize_filters, resizing_matrix
from refusals import refused
from same_networks import give_random_weights, hf_vit, timm_vit

X = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "sizes", [((8, 8), (12, 12)), ((8, 8), (16, 10)), ((8, 8), (5, 5)), ((4, 6), (4, 9))]
)
def test_filters_give_of_patches_what_they_gave_of_resized_ones(sizes):
    old, new = sizes
    filters = torch.randn(5, 3, *old, dtype=torch.float64)
    resized = resize_filters(filters, new)
    patches = torch.randn(7, 3, *new, dtype=torch.float64)
    inverse = torch.linalg.pinv(resizing_matrix(old, new))
    smaller = (patches.flatten(2) @ inverse.T).reshape(7, 3, *old)
    torch.testing.assert_close(
        F.conv2d(patches, resized), F.conv2d(smaller, filters), atol=1e-12, rtol=1e-12
    )


def test_an_enlarged_patch_keeps_its_embedding():
    filters = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    patches = torch.randn(7, 3, 8, 8, dtype=torch.float64)
    larger = F.interpolate(patches, size=(13, 16), mode="bicubic", antialias=True)
    found = F.conv2d(larger, resize_filters(filters, (13, 16)))
    torch.testing.assert_close(found, F.conv2d(patches, filters), atol=1e-12, rtol=1e-12)


MODELS = {
    "vit": timm_vit,
    "eva": lambda: timm_vit("eva02_tiny_patch14_224"),
    "beit": lambda: timm_vit("beit_base_patch16_224"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("patch", [4, 16])
def test_models_of_other_patches(name, patch):
    vit = give_random_weights(MODELS[name]())
    before = {key: x.clone() for key, x in vit.state_dict().items()}
    report = iso.resize_patches(vit, X, patch_size=patch, image_size=4 * patch)
    assert report.model(F.interpolate(X, size=4 * patch)).shape == (3, 5)
    assert report.patch == ((8, 8), (patch, patch))
    assert report.grid == ((4, 4), (4, 4))
    assert report.embedding < 1e-5  # filters of a float32 model
    assert (report.enlarged is None) == (patch < 8)
    for key, x in vit.state_dict().items():
        assert torch.equal(x, before[key])


def test_the_embedding_is_exact_in_float64():
    report = iso.resize_patches(give_random_weights(timm_vit()).double(), X, patch_size=16)
    assert report.embedding < 1e-12
    assert report.enlarged < 1e-12
    assert "enlarged patch has the embedding" in str(report)
    assert "not exact: embeddings of positions" in str(report)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_patches_enlarged_one_by_one_are_equal(name):
    vit = give_random_weights(MODELS[name]()).double()
    new = iso.resize_patches(vit, X, patch_size=16, image_size=64).model
    patches = F.unfold(X.double(), 8, stride=8).mT.reshape(-1, 3, 8, 8)
    larger = F.interpolate(patches, size=(16, 16), mode="bicubic", antialias=True)
    image = F.fold(larger.reshape(3, 16, -1).mT, 64, 16, stride=16)
    torch.testing.assert_close(new(image), vit(X.double()), atol=1e-10, rtol=1e-10)


def test_the_same_size_moves_nothing():
    report = iso.resize_patches(give_random_weights(timm_vit()), X)
    assert report.moved.relative == report.moved_by_timm.relative == 0
    assert report.moved.same_class == 100
    assert "exact" not in str(report)


def test_other_images_keep_the_filters_and_move_the_positions():
    vit = give_random_weights(timm_vit())
    report = iso.resize_patches(vit, X, image_size=(48, 64))
    assert report.grid == ((4, 4), (6, 8))
    assert torch.equal(report.model.patch_embed.proj.weight, vit.patch_embed.proj.weight)
    assert report.moved.relative > 0


def test_what_cannot_be_resized_is_said():
    refused("not a vision transformer of timm", iso.resize_patches, hf_vit(), X, 4)
    refused("do not fill images", iso.resize_patches, timm_vit(), X, 7)
    refused("size 'x'", iso.resize_patches, timm_vit(), X, "x")
    refused("empty", iso.resize_patches, timm_vit(), X[:0], 4)


@pytest.mark.slow
def test_the_command_saves_a_model_that_loads(tmp_path):
    source = tmp_path / "vit.safetensors"
    out = tmp_path / "vit16.safetensors"
    iso.save(give_random_weights(timm_vit()), source)
    done = isomorph("resize", source, "--patch", "16", "--size", "64", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "patches 8x8 -> 16x16, grid 4x4 -> 4x4, images 32x32 -> 64x64" in done.stdout
    new = iso.load(out).eval()
    wanted = iso.resize_patches(iso.load(source).eval(), X, 16, 64).model
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(new(images), wanted(images))
    assert timm.data.resolve_data_config(model=new)["input_size"] == (3, 64, 64)


def test_the_command_compares_as_many_images_as_asked(tmp_path, monkeypatch):
    compared = []

    def stop(model, images, *sizes):
        compared.append(len(images))
        raise iso.UserError("stopped")

    monkeypatch.setattr(iso, "resize_patches", stop)
    iso.save(timm_vit(), tmp_path / "vit.safetensors")
    digits = DataOptions(data="digits", max_images=5)
    source = str(tmp_path / "vit.safetensors")
    refused("stopped", resize, source, out=tmp_path / "x.safetensors", images=digits)
    assert compared == [5]


def test_a_hook_on_the_patch_filters_is_not_lost():
    vit = timm_vit()
    vit.patch_embed.proj.register_forward_hook(print)
    refused(r"patch_embed.proj has hooks \(print\)", iso.resize_patches, vit, X, 4)
