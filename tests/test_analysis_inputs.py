"""Analysis of models whose batches are arguments by name, and of grids and windows that only a run shows."""

import copy

import pytest
import timm
import torch
from PIL import Image
from torch import nn

import isomorph as iso
from attention_layers import NETWORKS
from command_line import isomorph
from isomorph.analysis.batches import count_images, images_of, single_images, some_images
from isomorph.analysis.windows import attention_windows, observed_windows
from isomorph.lab.evaluation.classes import config_labels
from isomorph.models.input_sizes import describe_images, evaluation_config
from law_rows import noisy
from refusals import refused

X = torch.randn(16, 3, 32, 32)


def build(name):
    torch.manual_seed(0)
    return noisy(NETWORKS[name]().eval())


MEASURES = {
    "attention_maps": iso.attention_maps,
    "attention_from": iso.analysis.attention_from,
    "nonlocality": iso.nonlocality,
    "prefix_attention": iso.analysis.prefix_attention,
    "attention_entropy": iso.analysis.attention_entropy,
    "head_similarity": iso.analysis.head_similarity,
    "logit_stats": iso.analysis.logit_stats,
    "map_similarity": iso.analysis.map_similarity,
    "feature_evolution": lambda model, data: iso.analysis.feature_evolution(
        model, data, "layers.?"
    ),
    "cka": lambda model, data: iso.cka(model, model, data, "layers.?").matrix,
}
OF_ONE_BATCH = ("attention_maps", "attention_from")


@pytest.mark.parametrize("measure", MEASURES)
def test_a_batch_by_name_is_measured_as_the_tensor(measure):
    """Alone, in a loader, and in a loader with labels."""
    model = build("transformers' ViT")
    expected = MEASURES[measure](model, X)
    named = {"pixel_values": X, "interpolate_pos_encoding": False}
    data = [named]
    if measure not in OF_ONE_BATCH:
        data += [[named], [(named, torch.zeros(len(X)))]]
    for each in data:
        torch.testing.assert_close(MEASURES[measure](model, each), expected, rtol=0, atol=0)


def test_batches_of_different_sizes_by_name_have_the_mean_over_images():
    model = build("transformers' ViT")
    parts = [{"pixel_values": X[:2]}, {"pixel_values": X[2:]}]
    whole = iso.nonlocality(model, X)
    torch.testing.assert_close(iso.nonlocality(model, parts), whole)


def test_images_of_a_batch_by_name():
    ids = torch.zeros(16, 7, dtype=torch.long)
    batch = {"input_ids": ids, "pixel_values": X, "scale": torch.ones(()), "flag": True}
    assert images_of(batch) is X
    assert count_images(batch) == len(X)
    part = some_images(batch, 2, 4)
    assert (part["input_ids"].shape, part["pixel_values"].shape, part["flag"]) == (
        (2, 7),
        (2, 3, 32, 32),
        True,
    )
    assert [each["pixel_values"].shape[0] for each in single_images([batch, batch])] == [1] * 32
    refused("the batch has no tensors", images_of, {"flag": True})
    refused(
        "give a batch as the model reads it, like a tensor .*, not a str",
        iso.nonlocality,
        nn.Identity(),
        ["x"],
    )


def clip():
    from transformers import CLIPConfig, CLIPModel

    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = small | dict(vocab_size=20, max_position_embeddings=8)
    vision = small | dict(image_size=32, patch_size=8)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


def test_a_model_of_images_and_text_is_measured_with_its_own_batch():
    model = clip()
    batch = {"input_ids": torch.randint(0, 20, (16, 7)), "pixel_values": X}
    maps = iso.attention_maps(model, batch)
    assert sorted(value.shape[-1] for value in maps.values()) == [7, 17]
    assert len(iso.analysis.attention_entropy(model, [batch, batch])) == 2
    (vision,) = [name for name in maps if "vision" in name]
    assert iso.analysis.attention_from(model, batch, where=vision)[vision].shape == (16, 2, 4, 4)


class Patches(nn.Module):
    """A network that reads patches and their grid, as SigLIP2 does."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, patches, spatial_shapes):
        return self.attn(patches, patches, patches, need_weights=False)[0]


def test_the_grid_of_patches_is_the_given_one():
    model = Patches().eval()
    shapes = torch.tensor([[3, 4]]).expand(2, 2)
    batch = {"patches": torch.randn(2, 12, 8), "spatial_shapes": shapes}
    assert iso.analysis.attention_from(model, batch)["attn"].shape == (2, 2, 3, 4)
    mixed = batch | {"spatial_shapes": torch.tensor([[3, 4], [4, 3]])}
    refused(
        "the grid of the tokens of MultiheadAttention is unknown", iso.nonlocality, model, mixed
    )


class TokensOfPatches(nn.Module):
    def __init__(self, kernel, padding):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, kernel, kernel, padding)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.attn(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(("kernel", "padding"), [(8, "valid"), (8, 0), (1, "same")])
def test_the_grid_of_a_patch_embedding_whatever_its_padding_is_called(kernel, padding):
    model = TokensOfPatches(kernel, padding).eval()
    images = torch.randn(2, 3, 3 * kernel, 4 * kernel)
    assert iso.analysis.attention_from(model, images)["attn"].shape == (2, 2, 3, 4)


def test_transformers_siglip_is_measured():
    model = build("transformers' SigLIP")
    assert list(iso.nonlocality(model, X)) == list(iso.attention_maps(model, X))


# --- windows


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (60, 68)])
def test_windows_that_a_run_shows_are_those_of_timms_swin(size):
    """timm's blocks are asked for theirs; running them shows the same: shifted, padded."""
    import timm

    sizes = dict(img_size=size, patch_size=4, window_size=4, strict_img_size=False)
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", embed_dim=12, depths=(2,), num_heads=(2,), **sizes
    ).eval()
    images = torch.randn(1, 3, *size)
    known = attention_windows(swin, images)
    observed = observed_windows(swin, images, list(known))
    assert list(observed) == list(known)
    for name, windows in known.items():
        assert observed[name].grid == windows.grid
        assert torch.equal(observed[name].members, windows.members)


@pytest.mark.parametrize("size", [(32, 32), (48, 32), (40, 36)])
def test_maps_and_distances_of_transformers_swin(size):
    """Uniform attention within windows of 4 x 4 has the mean distance within such a window."""
    model = build("transformers' Swin")
    images = torch.randn(2, 3, *size)
    distances = iso.nonlocality(model, images)
    maps = iso.attention_maps(model, images)
    assert list(distances) == list(maps)
    lines = iso.analysis.attention_from(model, images, position=(0.0, 0.0))
    grid = (size[0] // 4, size[1] // 4)
    for name, heads in distances.items():
        assert 0 < heads.min() <= heads.max() < 3 * 2**0.5
        assert lines[name].shape == (2, 4, *grid)
        torch.testing.assert_close(lines[name].sum((-1, -2)), torch.ones(2, 4), atol=1e-1, rtol=0)


def swin_v2():
    from transformers import Swinv2Config, Swinv2Model

    sizes = dict(
        image_size=64, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4
    )
    return Swinv2Model(Swinv2Config(**sizes))


def sam():
    from transformers import SamVisionConfig, SamVisionModel

    sizes = dict(
        hidden_size=16, output_channels=8, num_hidden_layers=2, num_attention_heads=2, image_size=64
    )
    more = dict(patch_size=4, window_size=5, global_attn_indexes=[1], mlp_dim=16, num_pos_feats=8)
    return SamVisionModel(SamVisionConfig(**sizes, **more))


@pytest.mark.parametrize("build_model", [swin_v2, sam])
def test_a_query_in_a_window_attends_on_the_map_of_the_image(build_model):
    """Also where a window alone would be a map: 4 x 4 tokens, or 5 x 5 that are cut from a padded map."""
    torch.manual_seed(0)
    model = noisy(build_model().eval())
    images = torch.randn(2, 3, 64, 64)
    lines = iso.analysis.attention_from(model, images, position=(0.9, 0.9))
    assert {tuple(each.shape) for each in lines.values()} == {(2, 2, 16, 16)}
    windowed = next(iter(lines.values()))
    assert not windowed[:, :, :8, :8].any()
    assert windowed[:, :, 14, 14].all()


class MixesBeforeWindows(nn.Module):
    """Windows of a map that a convolution has mixed: which token is where is unclear."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, size):
        y = self.mix(x.transpose(1, 2)).transpose(1, 2).reshape(-1, 4, 8)
        return self.attn(y, y, y, need_weights=False)[0].reshape(x.shape)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = MixesBeforeWindows()

    def forward(self, x):
        return self.block(x.flatten(2).transpose(1, 2), (4, 4))


def test_windows_that_stay_unclear_are_not_guessed():
    model = Around().eval()
    images = torch.randn(1, 8, 4, 4)
    assert observed_windows(model, images, ["block.attn"]) == {}
    refused("block.attn: ", iso.nonlocality, model, images)


# --- the page


SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
NAMES = dict(num_labels=3, id2label={0: "cat", 1: "dog", 2: "cow"})
IN_PATCHES = SMALL | dict(image_size=32, patch_size=8)
CLASSIFIERS = {
    "ViT": ("ViTConfig", "ViTForImageClassification", IN_PATCHES),
    "DeiT": ("DeiTConfig", "DeiTForImageClassificationWithTeacher", IN_PATCHES),
    "SigLIP": ("SiglipConfig", "SiglipForImageClassification", dict(vision_config=IN_PATCHES)),
    "CLIP": ("CLIPConfig", "CLIPForImageClassification", dict(vision_config=IN_PATCHES)),
    "Swin": (
        "SwinConfig",
        "SwinForImageClassification",
        dict(image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4),
    ),
    "ResNet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        dict(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]),
    ),
}


def page(models, inputs=None):
    config = evaluation_config(models[0])
    subjects = [
        iso.report.PageModel(f"m{i}", model, config, inputs=inputs)
        for i, model in enumerate(models)
    ]
    images = [iso.report.PageImage("x", torch.rand(config["input_size"]))]
    return iso.report.analyze_sections(subjects, images)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_of_transformers_has_its_predictions_on_the_page(name):
    import transformers

    config, network, sizes = CLASSIFIERS[name]
    model = getattr(transformers, network)(getattr(transformers, config)(**sizes, **NAMES)).eval()
    first, *_ = page([model])
    assert any(f"m0 predicts {animal} (" in first.finding for animal in NAMES["id2label"].values())
    assert (first.viewer is not None) == (name != "ResNet")
    changed = noisy(copy.deepcopy(model))
    first, *_ = page([model, changed])
    assert "outputs of m1 and m0 are at most" in first.finding
    assert "the predicted class is the same on" in first.finding


def test_a_model_without_class_names_predicts_numbers():
    import transformers

    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**IN_PATCHES, num_labels=3)
    ).eval()
    first, *_ = page([model])
    assert "m0 predicts class " in first.finding
    assert config_labels(model) == []


def as_texts(images):
    return {"input_ids": torch.zeros(len(images), 7, dtype=torch.long), "pixel_values": images}


def test_a_page_of_a_model_that_reads_arguments_by_name():
    sections = page([clip()], inputs=as_texts)
    titles = [section.title for section in sections]
    assert titles == ["Attention", "Attention distance and entropy", "Cost", "Model history: m0"]
    names = [layer["name"] for layer in sections[0].viewer.data["layers"]]
    assert [name for name in names if "vision" in name]
    (row,) = sections[2].table[1:]
    assert row[0] == "m0"


def siglip2():
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    return Siglip2VisionModel(Siglip2VisionConfig(**SMALL, patch_size=4, num_patches=16)).eval()


def as_patches(images):
    patches = nn.functional.unfold(images, 4, stride=4).transpose(1, 2)
    grid = [side // 4 for side in images.shape[-2:]]
    shapes = torch.tensor(grid, device=images.device).expand(len(images), 2)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2]),
        "spatial_shapes": shapes,
    }


def test_siglip2_is_measured_verified_and_drawn_with_its_own_batch():
    torch.manual_seed(0)
    model = siglip2()
    batch = as_patches(torch.randn(2, 3, 12, 20))
    lines = iso.analysis.attention_from(model, batch)
    assert {tuple(each.shape) for each in lines.values()} == {(2, 2, 3, 5)}
    assert list(iso.nonlocality(model, [batch])) == list(lines)
    assert iso.verify(model, copy.deepcopy(model), batch).passed
    config = {"input_size": (3, 12, 20), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    config |= {"crop_mode": "center", "interpolation": "bicubic"}
    subject = iso.report.PageModel("m", model, config, inputs=as_patches)
    first, *_ = iso.report.analyze_sections(
        [subject], [iso.report.PageImage("x", torch.rand(3, 12, 20))]
    )
    assert {tuple(layer["byModel"][0]["keys"]) for layer in first.viewer.data["layers"]} == {(3, 5)}


OWN_NETWORK = """
import torch
from torch import nn


class OfPatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, patches, grids):
        x = self.embed(patches)
        return self.head(self.attn(x, x, x, need_weights=False)[0].mean(1))


def read(images):
    grid = torch.tensor([side // 4 for side in images.shape[-2:]])
    patches = nn.functional.unfold(images, 4, stride=4).transpose(1, 2)
    return {"patches": patches, "grids": grid.expand(len(images), 2)}
"""


def test_the_command_reads_the_inputs_of_a_function(tmp_path, monkeypatch):
    (tmp_path / "own_patches.py").write_text(OWN_NETWORK)
    Image.new("RGB", (40, 40)).save(tmp_path / "x.png")
    monkeypatch.chdir(tmp_path)
    given = [
        "analyze",
        "own_patches:OfPatches",
        "--image",
        "x.png",
        "--size",
        "24x32",
        "--out",
        "page.html",
    ]
    ran = isomorph(*given, "--inputs", "own_patches:read")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000
    wrong = isomorph(*given, "--overwrite", "--inputs", "own_patches:reed")
    assert "cannot use own_patches:reed" in wrong.stderr
    assert "did you mean own_patches:read?" in wrong.stderr
    assert wrong.returncode == 2


def test_the_sizes_that_are_said_are_those_that_are_used():
    dino = timm.create_model("vit_small_patch14_dinov2", depth=1, img_size=98)
    assert describe_images(dino).startswith("own size 98 x 98, crop_pct 1,")
    tested_larger = timm.create_model("resnet18")
    assert describe_images(tested_larger).startswith(
        "own size 224 x 224, in tests 288 x 288, crop_pct 1,"
    )
    assert evaluation_config(siglip_of(dict(vision_config=IN_PATCHES)))["input_size"] == (3, 32, 32)


def siglip_of(sizes):
    import transformers

    return transformers.SiglipForImageClassification(
        transformers.SiglipConfig(**sizes, num_labels=3)
    )


def test_words_have_no_grid_however_many_they_are():
    """As many tokens as the image has patches, or more."""
    transformers = pytest.importorskip("transformers")
    text = dict(
        hidden_size=24,
        intermediate_size=24,
        num_attention_heads=3,
        num_hidden_layers=1,
        max_position_embeddings=40,
    )
    vision = dict(
        hidden_size=24,
        intermediate_size=24,
        num_attention_heads=3,
        num_hidden_layers=1,
        image_size=32,
        patch_size=8,
    )
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = transformers.CLIPModel(config).eval()
    inputs = dict(input_ids=torch.randint(1, 90, (2, 40)), pixel_values=torch.randn(2, 3, 32, 32))
    found = iso.nonlocality(model, inputs)
    assert found
    assert all(name.startswith("vision_model") for name in found)
