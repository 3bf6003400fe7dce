"""Models and checkpoints that isomorph did not write: state dicts, timm's training script, modules of one's own."""

import argparse
import datetime
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import isomorph as iso
from isomorph.checkpoints.files import strip_wrappers
from isomorph.checkpoints.foreign import ModelOptions
from isomorph.checkpoints.model import record_data
from isomorph.lab.data.label_maps import _load_label_map
from isomorph.lab.tasks.diffusion.image_distance import InceptionFeatures
from isomorph.lab.training.open import open_model
from isomorph.models.input_sizes import evaluation_config, random_inputs
from isomorph.surgery import notes
from refusals import refused
from requirements import optional

VIT = dict(img_size=96, patch_size=8, depth=2)


def cnn(name="resnet18", **more):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=3, **more).eval()


def save(path, content):
    torch.save(content, path)
    return str(path)


def open_own(path, *arguments, **options):
    return open_model(str(path), *arguments, options=ModelOptions(**options))


RESIZED = {
    "positions": ("vit_tiny_patch16_224", dict(img_size=48), "pos_embed"),
    "patches": (
        "vit_tiny_patch16_224",
        dict(img_size=64, patch_size=16),
        "patch_embed.proj.weight",
    ),
    "windows": (
        "swin_tiny_patch4_window7_224",
        dict(img_size=48, window_size=6),
        "layers.0.blocks.0.attn.relative_position_bias_table",
    ),
}
SMALL_VIT = dict(img_size=32, patch_size=8, depth=1, embed_dim=12, num_heads=3, num_classes=2)
SMALL_SWIN = dict(img_size=32, window_size=4, depths=(1,), num_heads=(3,), embed_dim=12)


def test_files_from_before_and_after_a_merge_are_told_apart(tmp_path):
    own = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    example = torch.randn(1, 3, 8, 8)
    merged = iso.fuse(own, example)
    before = save(tmp_path / "before.pth", own.state_dict())
    after = save(tmp_path / "after.pth", merged.state_dict())
    said = "has norms, which are merged in the model: load it before iso.fuse$"
    refused(said, iso.load_weights, merged, before)
    said = "its norms are merged, and the model has them: merge these first, with iso.fuse$"
    refused(said, iso.load_weights, own, after)
    iso.load_weights(iso.fuse(own, example), after)
    longer = nn.Sequential(*own, nn.BatchNorm2d(4), nn.Linear(4, 4))
    assert "merge" not in refused("7 missing", iso.load_weights, longer, before)


@pytest.mark.parametrize("what", RESIZED)
def test_what_is_interpolated_to_another_size_is_said(what, tmp_path):
    name, other, tensor = RESIZED[what]
    small = SMALL_SWIN if "swin" in name else SMALL_VIT
    small = small | dict(num_classes=2)
    path = save(tmp_path / "small.pth", timm.create_model(name, **small).state_dict())
    model = timm.create_model(name, **small | other)
    iso.load_weights(model, path)
    (said,) = iso.surgery.notes(model)
    assert said.startswith(
        f"small.pth is for other sizes of images, patches or windows; interpolated: {tensor};"
    )
    same = timm.create_model(name, **small)
    iso.load_weights(same, path)
    assert not iso.surgery.notes(same)


def same(model, other):
    ours = model.state_dict()
    theirs = other.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def timm_script(network, ema=None, **settings):
    """A checkpoint as timm's train.py writes it."""
    defaults = dict(
        model="resnet18", num_classes=None, img_size=None, input_size=None, gp=None, model_kwargs={}
    )
    args = argparse.Namespace(
        **{**defaults, **dict(mean=None, std=None, crop_pct=None), **settings}
    )
    averaged = {"state_dict_ema": ema.state_dict()} if ema else {}
    return {
        "epoch": 1,
        "arch": args.model,
        "state_dict": network.state_dict(),
        "args": args,
        "metric": 5.0,
        **averaged,
    }


@pytest.mark.parametrize("wrap", [("",), ("module.", "_orig_mod."), ("model.",)])
def test_prefixes_of_wrappers(tmp_path, wrap):
    model = cnn()
    state = {"".join(wrap) + name: tensor for name, tensor in model.state_dict().items()}
    opened = open_own(
        save(tmp_path / "my.pth", {"model_state_dict": state, "epoch": 3}), arch="resnet18"
    )
    assert same(opened, model)
    assert opened.num_classes == 3
    assert not opened.training


def test_safetensors_of_the_hub_are_checkpoints_of_other_programs(tmp_path):
    model = cnn("cifar_resnet20")
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path, {"format": "pt"})
    refused("does not say what model it is; give base=NAME", open_own, path)
    for text in ("SmallNet", "SmallNet()", "networks.SmallNet"):
        name = text.removesuffix("()")
        said = rf"is text, not a module; give base={name}\(\) without quotes"
        refused(said, iso.load, path, base=text)
    assert same(open_own(path, arch="cifar_resnet20"), model)
    assert same(iso.load(path, base="cifar_resnet20"), model)


def test_a_prefix_that_the_model_has_itself_stays(tmp_path):
    own = nn.Sequential()
    own.add_module("model", nn.Linear(2, 2))
    assert list(strip_wrappers(own.state_dict(), own.state_dict())) == [
        "model.weight",
        "model.bias",
    ]
    assert list(strip_wrappers(own.state_dict())) == ["weight", "bias"]
    path = save(tmp_path / "own.pth", {f"module.{name}": t for name, t in own.state_dict().items()})
    assert iso.load_weights(own, path) == []


def test_the_script_of_timm_needs_no_arch_and_averaged_weights_are_chosen(tmp_path):
    last = cnn("cifar_resnet20")
    averaged = cnn("cifar_resnet20")
    nn.init.ones_(averaged.linear.weight)
    settings = dict(
        model="cifar_resnet20", img_size=96, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), crop_pct=1.0
    )
    path = save(tmp_path / "model_best.pth.tar", timm_script(last, averaged, **settings))
    model = open_own(path)
    assert same(model, averaged)
    assert notes(model) == (
        "model_best.pth.tar: averaged weights (EMA, state_dict_ema); ema=False takes state_dict",
    )
    config = evaluation_config(model)
    assert config["input_size"] == (3, 96, 96)
    assert config["mean"] == (0.5, 0.5, 0.5)
    assert config["crop_pct"] == 1.0
    assert same(open_own(path, ema=False), last)
    iso.save(model, tmp_path / "own.safetensors")
    assert evaluation_config(iso.load(tmp_path / "own.safetensors")) == config


def test_torch_models_ema_and_module_arguments_of_the_script(tmp_path):
    """torch.optim.swa_utils.AveragedModel adds a counter and a prefix; --model-kwargs of timm's script are its own."""
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=3, global_pool="avg", **VIT
    ).eval()
    averaged = torch.optim.swa_utils.AveragedModel(model).state_dict()
    settings = dict(model="vit_tiny_patch16_224", model_kwargs=VIT, gp="avg")
    content = {**timm_script(model, **settings), "model_ema": averaged}
    opened = open_own(save(tmp_path / "vit.pth", content))
    assert same(opened, model)
    assert evaluation_config(opened)["input_size"] == (3, 96, 96)
    images = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(opened(images), model(images))
    content = {
        "ema": model.state_dict(),
        "model": {name: 2 * t for name, t in model.state_dict().items()},
    }
    assert same(
        open_own(save(tmp_path / "both.pth", content), arch=settings["model"], model_kwargs=VIT),
        model,
    )
    within = open_own(
        save(tmp_path / "in.pth", {"state_dict": content}), arch=settings["model"], model_kwargs=VIT
    )
    assert notes(within)[-1] == "in.pth: averaged weights (EMA, ema); ema=False takes model"


def test_tensors_that_the_model_cannot_hold(tmp_path):
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    state = cnn("cifar_resnet20").state_dict()
    two = tied.state_dict()
    tied[1].weight = tied[0].weight
    refused(
        "different tensors 0.weight and 1.weight",
        iso.load,
        save(tmp_path / "two.pth", two),
        base=tied,
    )
    whole = save(
        tmp_path / "whole.pth", {**two, "1.weight": two["0.weight"], "0.bias": torch.ones(3).int()}
    )
    refused(r"1 not of real numbers \(0.bias\)", iso.load, whole, base=tied)
    wide = iso.recast(tied, iso.LinearToPyramid(), where="1")
    plain = save(
        tmp_path / "wide.pth", {name: 2 * tensor for name, tensor in wide.state_dict().items()}
    )
    torch.testing.assert_close(iso.load(plain, base=wide).state_dict()["0.bias"], 2 * tied[0].bias)
    state["linear.weigth"] = state.pop("linear.weight")
    named = save(tmp_path / "typo.pth", state)
    refused(
        "1 missing \\(linear.weight\\); 1 unexpected \\(linear.weigth\\)",
        open_own,
        named,
        arch="cifar_resnet20",
    )


class TiedTokens(torch.nn.Module):
    """A network whose head is its table of tokens, with a buffer of two names."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.head.weight = self.tokens.weight
        for block in self.blocks[1:]:
            block.weight = self.blocks[0].weight
        self.register_buffer("scale", torch.rand(6))
        self.blocks[0].register_buffer("scale", self.scale)

    def forward(self, x):
        x = self.tokens(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_tied_tensors_that_a_file_holds_once(tmp_path):
    model = TiedTokens().eval()
    fresh = TiedTokens().eval()
    tokens = torch.arange(7)
    save_model(model, tmp_path / "once.safetensors")
    stored = load_file(tmp_path / "once.safetensors")
    assert len(stored) == len(model.state_dict()) - 4
    state = model.state_dict()
    for name, other in (("blocks.1.weight", "blocks.0.weight"), ("head.weight", "tokens.weight")):
        # whichever of its names a tensor is stored under
        renamed = dict(stored) | {name: state[name]}
        renamed.pop(other, None)
        opened = iso.load(save(tmp_path / f"{name}.pth", renamed), base=fresh)
        assert torch.equal(opened(tokens), model(tokens))
    opened = iso.load(tmp_path / "once.safetensors", base=fresh)
    assert torch.equal(opened(tokens), model(tokens))
    assert opened.head.weight is opened.tokens.weight
    assert iso.load_weights(fresh, tmp_path / "once.safetensors") == []
    assert torch.equal(fresh(tokens), model(tokens))
    del stored["blocks.0.bias"]
    stored = {key: value for key, value in stored.items() if value.shape != (7, 6)}
    lost = save(tmp_path / "lost.pth", stored)
    refused(
        r"3 missing \(tokens.weight, head.weight, blocks.0.bias\)",
        iso.load,
        lost,
        base=TiedTokens(),
    )


def test_a_folder_that_transformers_saved(tmp_path):
    transformers = optional("transformers", "nlp")
    sizes = dict(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    config = transformers.BertConfig(**sizes, max_position_embeddings=8)
    model, fresh = (transformers.BertForMaskedLM(config).eval() for _ in range(2))
    model.save_pretrained(tmp_path)
    opened = iso.load(tmp_path / "model.safetensors", base=fresh)
    tokens = torch.arange(5)[None]
    assert torch.equal(opened(tokens).logits, model(tokens).logits)


class OtherNames(torch.nn.Linear):
    """A layer whose state has names that it does not load."""

    def state_dict(self, *args, **kwargs):
        return {
            f"net.{name}": tensor for name, tensor in super().state_dict(*args, **kwargs).items()
        }


class OwnNames(OtherNames):
    """The same, which loads them."""

    def load_state_dict(self, state, *args, **kwargs):
        return super().load_state_dict(
            {key.removeprefix("net."): value for key, value in state.items()}
        )


def test_a_model_that_saves_other_names_than_it_loads_is_rejected(tmp_path):
    path = tmp_path / "own.safetensors"
    x = torch.randn(2, 3)
    patched = torch.nn.Linear(3, 3)
    patched.state_dict = lambda: {"weight": patched.weight}
    for model in (OtherNames(3, 3), patched):
        refused("is overridden and has other names than load_state_dict", iso.save, model, path)
        assert not path.exists()
    model = OwnNames(3, 3)
    iso.save(model, path)
    assert torch.equal(iso.load(path, base=OwnNames(3, 3))(x), model(x))


def test_harmless_classes_are_read_and_no_others(tmp_path):
    model = cnn("cifar_resnet20")
    harmless = dict(
        best=np.float64(0.5), epoch=np.int64(3), date=datetime.datetime(2024, 1, 2), out=Path("x")
    )
    content = {**timm_script(model, model="cifar_resnet20"), **harmless}
    torch.serialization.add_safe_globals([argparse.Namespace, np.dtype])
    allowed = torch.serialization.get_safe_globals()
    assert open_own(save(tmp_path / "a.pth", content)).num_classes == 3
    assert set(torch.serialization.get_safe_globals()) == set(allowed)


READERS = {
    "a checkpoint": lambda path: open_own(path, arch="cifar_resnet20"),
    "label maps": lambda path: _load_label_map(path, 3),
    "Inception": InceptionFeatures,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pickle_runs_no_code(reader, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"a": Bomb()}, tmp_path / "bad.pth", pickle_module=pickle)
    refused("mkdir|is not a file of weights|cannot read", READERS[reader], tmp_path / "bad.pth")
    assert not (tmp_path / "ran").exists()


def test_sizes_are_read_from_the_tensors(tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, in_chans=1, **VIT)
    path = save(tmp_path / "vit.pth", vit.state_dict())
    opened = open_own(path, arch="vit_tiny_patch16_224", model_kwargs={"depth": 2})
    assert same(opened, vit)
    assert evaluation_config(opened)["input_size"] == (1, 96, 96)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("deit_tiny_distilled_patch16_224", dict(img_size=64, depth=1)),
        ("convit_ti", dict(img_size=64, depth=2, local_up_to_layer=1)),
        (
            "swin_tiny_patch4_window7_224",
            dict(img_size=64, depths=(1, 1), num_heads=(2, 4), embed_dim=16),
        ),
    ],
)
def test_architectures_of_other_families(tmp_path, name, arguments):
    model = timm.create_model(name, num_classes=3, **arguments).eval()
    given = {
        key: value
        for key, value in arguments.items()
        if key != "img_size" or name.startswith("swin")
    }
    opened = open_own(save(tmp_path / "m.pth", model.state_dict()), arch=name, model_kwargs=given)
    assert same(opened, model)
    iso.save(opened, tmp_path / "m.safetensors")
    assert same(iso.load(tmp_path / "m.safetensors"), model)


def test_broken_files_are_named_in_one_line(tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1, momentum=0.9).state_dict()
    whole = Path(save(tmp_path / "whole.pth", cnn("cifar_resnet20").state_dict())).read_bytes()
    for name, content, said in (
        ("half.pth", whole[:100_000], "may be truncated"),
        ("empty.pth", b"", "may be truncated"),
        ("empty.safetensors", b"", "empty.safetensors: it is empty"),
        ("picture.safetensors", b"\x89PNG" + bytes(100), "truncated or of another format"),
        ("optimizer.pth", optimizer, "holds no weights, only the state of an optimiser"),
        ("list.pth", [1, 2], "holds a list, not a dictionary of tensors"),
    ):
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        elif content is not None:
            save(tmp_path / name, content)
        assert len(refused(said, open_own, tmp_path / name, arch="cifar_resnet20")) < 400


def test_modules_that_timm_cannot_build(tmp_path):
    def build():
        return torchvision.models.resnet18(num_classes=3).eval()

    base = build()
    path = tmp_path / "module.safetensors"
    new = iso.recast(base, iso.ConvToGPSA(init="exact"), where="layer4.*.conv2")
    iso.save(new, path)
    fresh = build()
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    again = iso.load(path, base=fresh)
    assert same(again, new)
    assert iso.edits(again) == iso.edits(new)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(before[name], tensor)
    assert isinstance(iso.revert(again).layer4[0].conv2, nn.Conv2d)
    refused("which timm cannot build; give base=ResNet", iso.load, path)
    opened = open_own(path, arch="resnet18")
    assert same(opened, new)
    assert same(iso.load(path, base="resnet18"), new)
    iso.save(opened, tmp_path / "timm.safetensors")
    assert same(iso.load(tmp_path / "timm.safetensors"), new)


def test_the_size_a_model_was_built_for_is_saved_and_a_trained_size_comes_first(tmp_path):
    path = tmp_path / "m.safetensors"
    for name, more in (
        ("vit_tiny_patch16_224", dict(depth=1)),
        ("convit_ti", dict(depth=2, local_up_to_layer=1)),
    ):
        model = timm.create_model(name, img_size=96, num_classes=3, **more).eval()
        assert iso.verify(model, model, random_inputs(1, model)).passed
        iso.save(model, path)
        for one in (model, iso.load(path)):
            assert evaluation_config(one)["input_size"] == (3, 96, 96)
    # its weights' test size
    assert evaluation_config(timm.create_model("resnet18"))["input_size"] == (3, 288, 288)
    flexible = timm.create_model(
        "vit_tiny_patch16_224", dynamic_img_size=True, img_size=96, depth=1
    )
    record_data(flexible, {"input_size": (3, 128, 128)})
    assert evaluation_config(flexible)["input_size"] == (3, 128, 128)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("convit_ti", dict(depth=2, local_up_to_layer=1)),
        ("tdrl_vit_ti", dict(depth=1, embed_dim=24, num_heads=3)),
        ("coatnet_0", dict(depths=(2, 1, 1, 1, 1), widths=(8, 8, 8, 32, 32))),
    ],
)
def test_checkpoint_path_of_timm_resizes_positions(tmp_path, name, arguments):
    small = timm.create_model(name, num_classes=3, img_size=64, **arguments)
    path = save(tmp_path / "64.pth", small.state_dict())
    model = timm.create_model(name, num_classes=3, img_size=96, checkpoint_path=path, **arguments)
    again = timm.create_model(name, num_classes=3, img_size=96, **arguments)
    iso.load_weights(again, path)
    assert same(model, again)


def test_a_function_that_builds_ones_own_model(tmp_path, monkeypatch):
    """It is looked for in the working folder too, builds a model by name and the base of a checkpoint."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets/mine.py").write_text(
        "import torch.nn as nn\n"
        "def build(classes=3): return nn.Sequential(nn.Conv2d(3, classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    monkeypatch.chdir(tmp_path)
    own = open_model("nets.mine:build", options=ModelOptions(model_kwargs={"classes": 4}))
    assert own(torch.zeros(1, 3, 8, 8)).shape == (1, 4)
    save(tmp_path / "w.pth", own.state_dict())
    iso.save(iso.recast(own, iso.ConvToGPSA(), where="0"), tmp_path / "t.safetensors")
    opened = open_own("t.safetensors", arch="nets.mine:build", model_kwargs={"classes": 4})
    assert opened(torch.zeros(1, 3, 8, 8)).shape == (1, 4)
    assert same(
        open_model(
            "nets.mine:build", Path("w.pth"), options=ModelOptions(model_kwargs={"classes": 4})
        ),
        own,
    )
    assert same(iso.load("w.pth", base="nets.mine:build", classes=4), own)
    assert str(tmp_path) not in sys.path


def test_checkpoints_of_self_supervised_training(tmp_path):
    """The authors' layout of DINOv2: a position for the class token too, other names, a backbone beside its heads."""
    name = "vit_small_patch14_reg4_dinov2"
    x = torch.randn(1, 3, 98, 98)
    model = timm.create_model(name, img_size=98, depth=1, num_classes=0).eval()
    state = dict(model.state_dict())
    first = torch.randn(1, 1, 384)
    state |= {"register_tokens": state.pop("reg_token"), "mask_token": torch.zeros(1, 384)}
    state |= {
        "cls_token": state["cls_token"] - first,
        "pos_embed": torch.cat([first, state["pos_embed"]], 1),
    }
    backbone = {f"backbone.{key}": tensor for key, tensor in state.items()}
    heads = {
        "dino_head.mlp.0.weight": torch.zeros(3),
        "ibot_head.last_layer.weight_v": torch.zeros(3),
    }
    other = {key: torch.zeros_like(tensor) for key, tensor in backbone.items()}
    for content in (state, backbone, {"student": other | heads, "teacher": backbone | heads}):
        file = save(tmp_path / "dino.pth", content)
        for given in ({}, {"img_size": 98}):
            opened = iso.load(file, base=name, depth=1, **given)
            torch.testing.assert_close(opened(x), model(x), atol=1e-3, rtol=1e-3)
            assert "interpolated" not in "".join(notes(opened))  # positions are cut
    refused(
        r"2 unexpected \(register_tokens", iso.load, file, base="vit_small_patch14_dinov2", depth=1
    )
    file = save(tmp_path / "timm.pth", model.state_dict())
    said = "positions for 48 patches, .*it has reg_token, and the model has not.*another `base`"
    refused(said, iso.load, file, base="vit_small_patch14_dinov2", depth=1)


@pytest.mark.parametrize("name", ["repvgg_a0", "fastvit_t8"])
@torch.no_grad()
def test_files_that_timm_merged_open_and_get_norms_again(tmp_path, name):
    model = timm.create_model(name, num_classes=3).eval()
    x = torch.randn(1, 3, 64, 64)
    merged = timm.utils.reparameterize_model(model)
    thin = open_own(save(tmp_path / "merged.pth", merged.state_dict()), arch=name)
    assert torch.equal(thin(x), merged(x))
    for each in (merged, thin):  # timm leaves the layers that it makes in train mode
        normed = iso.recast(each, iso.ConvToConvNorm())
        for module in normed.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert not module.training
        torch.testing.assert_close(normed(x), merged(x), atol=1e-4, rtol=1e-4)
    iso.save(normed, tmp_path / "normed.safetensors")  # of the file that was opened
    torch.testing.assert_close(
        iso.load(tmp_path / "normed.safetensors")(x), merged(x), atol=1e-4, rtol=1e-4
    )


def test_a_timm_model_of_ones_own_function_is_saved_with_its_edits(tmp_path, monkeypatch):
    (tmp_path / "with_own_attention.py").write_text(
        "import timm\n\n\nclass Own(timm.layers.Attention):\n    pass\n\n\ndef build():\n"
        "    return timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1, num_classes=3, attn_layer=Own)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = open_model("with_own_attention:build", pretrained=False)
    file = tmp_path / "new.safetensors"
    new = iso.recast(model, iso.LinearToPyramid(), where="head")
    x = torch.randn(1, 3, 32, 32)
    iso.save(new, file)
    assert torch.equal(open_own(file, arch="with_own_attention:build")(x), new(x))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))


def test_precisions_of_a_file(tmp_path):
    model = Spectral()
    iso.save(model, tmp_path / "c.safetensors")
    assert torch.equal(iso.load(tmp_path / "c.safetensors", base=Spectral()).filter, model.filter)
    flat = save(tmp_path / "flat.pth", {**nn.Linear(2, 2).state_dict(), "epoch": 3})
    refused(r"1 unexpected \(epoch\)", iso.load, flat, base=nn.Linear(2, 2))
    base = nn.Linear(2, 2).bfloat16()
    base.register_buffer("freq", torch.rand(2), persistent=False)
    iso.save(base, tmp_path / "b.safetensors")
    assert iso.load(tmp_path / "b.safetensors", base=base).freq.dtype == torch.float32


def test_a_tensor_larger_than_its_file_is_not_read(tmp_path):
    path = save(tmp_path / "small.pth", {"weight": torch.zeros(1).expand(2, 10**13)})
    refused("more than fit into", iso.load, path, base=nn.Linear(2, 2))


class Counts(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_what_a_file_cannot_hold_is_one_line(tmp_path):
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("mask", torch.eye(2).to_sparse())
    double = nn.Linear(2, 2)
    double.register_buffer("freqs", torch.ones(2, dtype=torch.complex128))
    for model, said in (
        (double, "freqs has dtype complex128"),
        (Counts(2, 2), "_extra_state is a dict"),
        (nn.Linear(2, 2, device="meta"), "weight has no values"),
        (sparse, "mask is sparse"),
    ):
        refused(said, iso.save, model, tmp_path / "m.safetensors")
        assert not (tmp_path / "m.safetensors").exists()


def test_extra_state_is_loaded(tmp_path):
    model = Counts(2, 2)
    path = save(tmp_path / "c.pth", model.state_dict())
    assert torch.equal(iso.load(path, base=Counts(2, 2)).weight, model.weight)
    assert iso.load_weights(Counts(2, 2), path) == []
