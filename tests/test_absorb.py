"""Models that take raw pixels: the normalisation is in the first layer, borders included."""

import PIL.Image
import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.cli import main
from refusals import refused

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class Strided(nn.Module):
    """A convolution with any padding, and what its border makes of an odd size."""

    def __init__(self, **kwargs):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, **kwargs)

    def forward(self, x):
        return self.conv(x).relu()


def narrow(name, **kwargs):
    return timm.create_model(name, num_classes=5, **kwargs)


VIT = dict(embed_dim=24, depth=1, num_heads=3, img_size=32, patch_size=8)
MODELS = {
    "padded": lambda: Strided(kernel_size=3, stride=2, padding=1),
    "padded, no bias": lambda: Strided(kernel_size=5, padding=2, bias=False),
    "not padded": lambda: Strided(kernel_size=3, stride=2),
    "padded same": lambda: Strided(kernel_size=(3, 4), padding="same", dilation=2),
    "reflected": lambda: Strided(kernel_size=3, padding=1, padding_mode="reflect"),
    "1 x 1": lambda: Strided(kernel_size=1),
    "CNN": lambda: narrow("cifar_resnet20"),
    "patches": lambda: narrow("vit_tiny_patch16_224", **VIT),
    "standardised filters": lambda: nn.Sequential(timm.layers.StdConv2d(3, 4, 3, padding=1)),
    "TensorFlow's padding": lambda: nn.Sequential(timm.layers.Conv2dSame(3, 4, 3, stride=2)),
}
CHANNELS = ("rgb", "bgr", "grey", "rgba", "xbgry")


def count_of(channels):
    return 1 if channels == "grey" else len(channels)


def draw(channels, height, width, scale):
    generator = torch.Generator().manual_seed(0)
    shape = (2, count_of(channels), height, width)
    return scale * torch.rand(shape, generator=generator, dtype=torch.float64)


def normalise(raw, channels, scale):
    """Write what a user writes in front of a model."""
    order = [0, 0, 0]
    if channels != "grey":
        order = [channels.index(letter) for letter in "rgb"]
    colours = raw[:, order]
    mean = torch.tensor(MEAN, dtype=raw.dtype).reshape(3, 1, 1)
    std = torch.tensor(STD, dtype=raw.dtype).reshape(3, 1, 1)
    return (colours / scale - mean) / std


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", MODELS)
def test_raw_images_give_the_outputs_of_normalised_ones(name, channels):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    odd = (32, 32) if name == "patches" else (37, 33)
    raw = draw(channels, *odd, scale=255)
    new = iso.absorb(model, MEAN, STD, channels=channels, images=normalise(raw, channels, 255))
    with torch.no_grad():
        wanted = model(normalise(raw, channels, 255))
        torch.testing.assert_close(new(raw), wanted, atol=1e-9, rtol=1e-9)


def test_a_zero_border_is_said_and_another_is_not():
    padded = iso.absorb(narrow("cifar_resnet20"), MEAN, STD)
    assert any("subtracted in front" in note for note in iso.surgery.notes(padded))
    patches = iso.absorb(narrow("vit_tiny_patch16_224", **VIT), MEAN, STD)
    assert iso.surgery.notes(patches) == ()
    assert type(patches.patch_embed.proj) is nn.Conv2d


@pytest.mark.parametrize("channels", ["rgb", "grey"])
def test_filters_in_groups_read_their_own_channels(channels):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3)).double()
    raw = draw(channels, 9, 11, 255)
    if channels == "grey":
        refused(
            "groups",
            iso.absorb,
            model,
            MEAN,
            STD,
            channels="grey",
            images=raw.expand(-1, 3, -1, -1),
        )
        return
    new = iso.absorb(model, MEAN, STD, images=raw)
    torch.testing.assert_close(new(raw), model(normalise(raw, channels, 255)), atol=1e-9, rtol=1e-9)


def test_images_between_zero_and_one_need_no_scale():
    model = narrow("cifar_resnet20").double().eval()
    new = iso.absorb(model, MEAN, STD, scale=1)
    raw = draw("rgb", 35, 31, 1)
    torch.testing.assert_close(new(raw), model(normalise(raw, "rgb", 1)), atol=1e-9, rtol=1e-9)
    assert new.pretrained_cfg["std"] == (1.0, 1.0, 1.0)


def test_a_saved_model_takes_raw_images(tmp_path):
    new = iso.absorb(narrow("cifar_resnet20").eval(), MEAN, STD, channels="bgr")
    iso.save(new, tmp_path / "raw.safetensors")
    loaded = iso.load(tmp_path / "raw.safetensors").eval()
    raw = draw("bgr", 32, 32, 255).float()
    assert torch.equal(loaded(raw), new(raw))
    assert loaded.pretrained_cfg["mean"] == (0.0, 0.0, 0.0)


def test_a_fused_model_takes_raw_images():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).double().eval()
    model[1].running_mean.normal_()
    raw = draw("rgb", 33, 35, 255)
    new = iso.fuse(iso.absorb(model, MEAN, STD, images=raw), example=raw, only_forward=True)
    for module in new.modules():
        assert not isinstance(module, nn.BatchNorm2d)
    torch.testing.assert_close(new(raw), model(normalise(raw, "rgb", 255)), atol=1e-9, rtol=1e-9)


class ReadsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).mean() + x.mean()


def test_what_cannot_be_absorbed_is_said():
    images = torch.randn(1, 3, 16, 16)
    refused("something else reads the image", iso.absorb, ReadsTwice(), MEAN, STD, images=images)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(768, 5))
    refused("not a convolution", iso.absorb, flat, MEAN, STD, images=images)
    refused("does not say which images", iso.absorb, ReadsTwice(), MEAN, STD)
    cnn = narrow("cifar_resnet20")
    refused("channels 'rgg'", iso.absorb, cnn, MEAN, STD, channels="rgg")
    refused("a number for each channel", iso.absorb, cnn, MEAN, (1.0,))
    refused("reads 3 channels", iso.absorb, cnn, (0.5,), (0.5,))


OWN_NET = """
from torch import nn


def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 2))
"""


def test_a_network_of_one_s_own_is_exported_for_raw_images(tmp_path, monkeypatch):
    (tmp_path / "own_raw_net.py").write_text(OWN_NET)
    monkeypatch.chdir(tmp_path)
    command = ["export", "own_raw_net:build", "--raw-images", "--size", "16", "--out", "raw.pt2"]
    with pytest.raises(SystemExit, match="0"):
        main(command)
    assert iso.deployment.open_artefact("raw.pt2").metadata["mean"] == (0.0, 0.0, 0.0)


def test_an_exported_file_says_that_it_takes_raw_images(tmp_path):
    model = narrow("cifar_resnet20").eval()
    iso.save(model, tmp_path / "cnn.safetensors")
    out = tmp_path / "raw.pt2"
    source = str(tmp_path / "cnn.safetensors")
    with pytest.raises(SystemExit, match="0"):
        main(["export", source, "--raw-images", "--out", str(out)])
    artefact = iso.deployment.open_artefact(out)
    config = artefact.metadata
    assert config["mean"] == (0.0, 0.0, 0.0)
    raw = draw("rgb", 32, 32, 255).float()
    own = timm.data.resolve_model_data_config(model)
    mean = torch.tensor(own["mean"]).reshape(3, 1, 1)
    std = torch.tensor(own["std"]).reshape(3, 1, 1)
    torch.testing.assert_close(artefact(raw), model((raw / 255 - mean) / std), atol=1e-4, rtol=1e-4)
    prepared = timm.data.create_transform(
        **{key: config[key] for key in ("input_size", "mean", "std")}
    )
    image = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8).numpy()
    assert float(prepared(PIL.Image.fromarray(image)).max()) > 100
