"""The rows of the ledger: what is timed, and what it is compared with. See ledger.py.

A row's function returns passes by name, the plain thing first. Inputs have the batch of the row.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import nn

import isomorph as iso
from interleave import forward, kept_mib, step

Passes = dict[str, Callable[[], object]]

BATCHES = (2, 32)


class Row(NamedTuple):
    """Passes to time, of a batch where there is one, and the form that the ledger follows.

    A `long` row takes minutes: it is measured when `--only` names it.
    """

    make: Callable[[], Passes]
    memory: bool = False
    long: bool = False


def pair(plain: nn.Module, form: nn.Module, x: torch.Tensor, kind: str) -> Passes:
    """The inference, the training step or the memory of a plain module and of another form of it."""
    plain.train(kind != "inference")
    form.train(kind != "inference")
    if kind == "memory":
        return {
            "plain": lambda: kept_mib(plain, lambda: plain(x.requires_grad_())),
            "form": lambda: kept_mib(form, lambda: form(x.requires_grad_())),
        }
    take = forward if kind == "inference" else step
    return {"plain": take(plain, x), "form": take(form, x)}


def of_modules(
    make: Callable[[int], tuple[nn.Module, nn.Module, torch.Tensor]], batch: int, kind: str
) -> Passes:
    torch.manual_seed(0)
    return pair(*make(batch), kind)


def convolution(rule: object, channels: int, side: int, kernel: int, groups: int, batch: int):
    """A convolution, the layer that a rule makes of it, and a feature map."""
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=groups, bias=False)
    model = nn.Sequential(conv)
    form = iso.recast(model, rule, where="0")
    return model, form, torch.randn(batch, channels, side, side)


def pyramid(channels: int, side: int, kernel: int, groups: int, batch: int):
    """A convolution with its norm, and the pyramid that fuses to them."""
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=groups, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(channels))
    form = iso.recast(model, iso.LinearToPyramid(), where="0")
    return model, form, torch.randn(batch, channels, side, side)


def linear(layout: str, batch: int):
    model = nn.Sequential(nn.Linear(192, 768))
    form = iso.recast(model, iso.LinearToPyramid(layout), where="0")
    return model, form, torch.randn(batch, 197, 192)


def attention(make: Callable[[], nn.Module], batch: int):
    """timm's attention of ViT-Ti, with twelve heads, and another of the same width on its 14 x 14 tokens."""
    plain = timm.layers.Attention(192, num_heads=12, qkv_bias=True)
    return plain, make(), torch.randn(batch, 196, 192)


def recast_attention(rule: object, batch: int):
    plain = timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=12)
    return (
        plain.blocks[0].attn,
        iso.recast(plain, rule, where="blocks.*.attn").blocks[0].attn,
        tokens(batch),
    )


def tokens(batch: int) -> torch.Tensor:
    return torch.randn(batch, 197, 192)


def relative(batch: int):
    """timm's attention on tokens, and the one with a relative bias on the same tokens as a map."""
    plain = timm.layers.Attention(192, num_heads=12, qkv_bias=True)
    form = iso.layers.RelativeAttention(192, 12, (14, 14))

    class OnTokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.form = form

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.form(x.unflatten(1, (14, 14))).flatten(1, 2)

    return plain, OnTokens(), torch.randn(batch, 196, 192)


def windows(batch: int):
    """A network of one block that attends to 32 x 32 tokens, whole, and pruned to windows of 8 x 8."""
    model = timm.create_model(
        "vit_small_patch16_dinov3", depth=1, num_classes=0, img_size=512
    ).eval()
    masked = iso.recast(model, iso.AttentionToWindow(8), where="blocks.*.attn")
    iso.Anneal(steps=1).apply(masked, 1)
    return model, iso.prune(masked), torch.randn(batch, 3, 512, 512)


def map_attention(batch: int):
    """timm's attention on the positions of a map, and the block that `insert` adds."""
    plain = timm.layers.Attention(128, num_heads=8)
    form = iso.layers.MapAttention(128)

    class OfPositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.plain(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])

    return OfPositions(), form, torch.randn(batch, 128, 14, 14)


MAPS = {14: 256, 28: 128, 56: 64, 112: 32}
"""Side of a feature map, and its channels."""

layers = iso.layers
GATED = iso.ConvToGPSA
MODULES: dict[str, Callable[[int], tuple[nn.Module, nn.Module, torch.Tensor]]] = {
    "GPSA": partial(recast_attention, iso.AttentionToGPSA(init="paper")),
    "PSA": partial(attention, lambda: layers.PSA(192, 12, (14, 14))),
    "refined": partial(recast_attention, iso.AttentionToRefined()),
    "spatial": partial(attention, lambda: layers.SpatialAttention(192, 12, grid_size=(14, 14))),
    "expanded": partial(attention, lambda: layers.ExpandedAttention(192, 12)),
    "relative": relative,
    "window attention": windows,
    "map attention": map_attention,
    "pyramid, linear P-W2S": partial(linear, "P-W2S"),
    "pyramid, linear naive-W1": partial(linear, "naive-W1"),
    "pyramid, 1x1": partial(pyramid, 128, 28, 1, 1),
    "pyramid, 3x3": partial(pyramid, 64, 28, 3, 1),
    "pyramid, depthwise": partial(pyramid, 128, 28, 3, 128),
}
for _side, _channels in MAPS.items():
    for _content in ("global", "window", "none"):
        if _content == "global" and _side > 28:
            continue  # a training step would keep gigabytes
        _rule = GATED(init="exact", content=_content)
        _make = partial(convolution, _rule, _channels, _side, 3, 1)
        MODULES[f"GPSA2d {_content}, {_side}"] = _make
_soft = GATED(init="exact", content="window", locality=1.0, gate=1.0)
MODULES["GPSA2d window, 56, open gates"] = partial(convolution, _soft, 64, 56, 3, 1)


def network(plain: Callable[[], nn.Module], form: Callable[[], nn.Module], size: int, batch: int):
    return plain(), form(), torch.randn(batch, 3, size, size)


def recast_resnet18(content: str) -> nn.Module:
    """ResNet-18 with every convolution larger than 1 x 1 recast."""

    def is_large(name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1

    return iso.recast(timm.create_model("resnet18"), GATED(content=content), is_large)


create = timm.create_model
NETWORKS = {
    "ConViT-S": partial(network, partial(create, "convit_small"), partial(create, "convit_s"), 224),
    "CoAtNet-0": partial(
        network, partial(create, "coatnet_0_rw_224"), partial(create, "coatnet_0"), 224
    ),
    "Refined-ViT-S": partial(
        network,
        partial(create, "vit_small_patch16_224", depth=16),
        partial(create, "refined_vit_s"),
        224,
    ),
    "TDRL-ViT-Ti": partial(
        network, partial(create, "tdrl_vit_ti", layout="plain"), partial(create, "tdrl_vit_ti"), 224
    ),
    "TDRL-ViT-Ti, naive-W1": partial(
        network,
        partial(create, "tdrl_vit_ti", layout="plain"),
        partial(create, "tdrl_vit_ti", layout="naive-W1"),
        224,
    ),
    "T-ResNet50-D": partial(
        network, partial(create, "resnet50d"), partial(create, "t_resnet50d"), 224
    ),
    "T-ResNet50-RS": partial(
        network, partial(create, "resnetrs50"), partial(create, "t_resnetrs50"), 224
    ),
    "ResNet-18, windows": partial(
        network, partial(create, "resnet18"), partial(recast_resnet18, "window"), 224
    ),
    "ResNet-18, positions": partial(
        network, partial(create, "resnet18"), partial(recast_resnet18, "none"), 224
    ),
}

MODELS = ("resnet18", "vit_tiny_patch16_224")
OPERATIONS = ("recast", "verify", "fuse", "insert", "save", "load", "export")


def operation(name: str, what: str) -> Passes:
    """An operation on a model, next to one forward pass of one image."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    x = torch.randn(1, 3, 224, 224)
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    convolutional = name.startswith("resnet")
    rule, where = (
        (GATED(), "layer4.*.conv2") if convolutional else (iso.AttentionToGPSA(), "blocks.*.attn")
    )
    new = iso.recast(model, rule, where=where)
    iso.save(new, folder / "saved.safetensors")
    after = "layer3" if convolutional else "blocks.5"
    width = 256 if convolutional else 192
    runs = {
        "recast": lambda: iso.recast(model, rule, where=where),
        "verify": lambda: iso.verify(model, new, x),
        "fuse": lambda: iso.fuse(model, x),
        "insert": lambda: iso.insert(
            model, lambda _: layers.MapAttention(width), after=after, example=x
        ),
        "save": lambda: iso.save(new, folder / "again.safetensors"),
        "load": lambda: iso.load(folder / "saved.safetensors"),
        "export": lambda: iso.export(model, folder / "model.onnx", overwrite=True),
    }
    return {"plain": forward(model, x), "form": runs[what]}


def processes(command: list[str], code: int) -> Passes:
    """A command in a process of its own, next to `import timm` in one."""

    def run(arguments: list[str], expected: int) -> None:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == expected, (arguments, done.stderr)

    plain = partial(run, ["-c", "import timm"], 0)
    return {"plain": plain, "form": partial(run, command, code)}


def training() -> Passes:
    """A short run on digits, next to as many bare steps of the same model on images of the same size."""
    folder = tempfile.mkdtemp(prefix="ledger-")
    recipe = iso.load_recipe("digits_cnn", ["epochs=2", f"out={folder}/run"])
    model = timm.create_model("cifar_resnet20", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = recipe.data.batch_size
    steps = 2 * (1347 // batch)
    x = torch.randn(batch, 3, *recipe.data.size)
    labels = torch.randint(10, (batch,))

    def bare() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()

    runs = iter(range(10**6))

    def whole() -> None:
        fresh = iso.load_recipe("digits_cnn", ["epochs=2", f"out={folder}/run{next(runs)}"])
        iso.train(fresh, show=False)

    return {"plain": bare, "form": whole}


def evaluation() -> Passes:
    """`evaluate` on 256 images, next to the bare passes."""
    model = timm.create_model("cifar_resnet20", num_classes=10).eval()
    images = [(torch.randn(64, 3, 32, 32), torch.randint(10, (64,))) for _ in range(4)]

    @torch.no_grad()
    def bare() -> None:
        for x, _ in images:
            model(x)

    return {"plain": bare, "form": lambda: iso.evaluate(model, images)}


def page() -> Passes:
    """`isomorph analyze` of a small ViT and one image, in a process of its own."""
    from PIL import Image

    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
    iso.save(model, folder / "vit.safetensors")
    Image.new("RGB", (224, 224), (120, 80, 200)).save(folder / "image.png")
    command = [
        "analyze",
        str(folder / "vit.safetensors"),
        "--image",
        str(folder / "image.png"),
        "--overwrite",
    ]
    return processes(["-m", "isomorph_command", *command, "--out", str(folder / "page.html")], 0)


# Networks whose training step at batch 32 is measured with all rows.
SHORT_STEPS = {"TDRL-ViT-Ti", "TDRL-ViT-Ti, naive-W1"}


def rows() -> dict[str, Row]:
    """Every row by its name: family/form/pass/batch."""
    found: dict[str, Row] = {}
    for name, make in MODULES.items():
        for kind in ("inference", "step"):
            for batch in BATCHES:
                if batch > 2 and name in (
                    "window attention",
                    "GPSA2d window, 112",
                    "GPSA2d global, 28",
                ):
                    continue  # a minute or gigabytes
                found[f"layer/{name}/{kind}/{batch}"] = Row(partial(of_modules, make, batch, kind))
        found[f"layer/{name}/memory/2"] = Row(partial(of_modules, make, 2, "memory"), memory=True)
    for name, make in NETWORKS.items():
        for kind in ("inference", "step"):
            found[f"network/{name}/{kind}/2"] = Row(partial(of_modules, make, 2, kind))
        inference = partial(of_modules, make, 32, "inference")
        found[f"network/{name}/inference/32"] = Row(inference)
        step = partial(of_modules, make, 32, "step")
        found[f"network/{name}/step/32"] = Row(step, long=name not in SHORT_STEPS)
        found[f"network/{name}/memory/2"] = Row(partial(of_modules, make, 2, "memory"), memory=True)
    found["network/ResNet-18, windows/inference/8"] = Row(
        partial(of_modules, NETWORKS["ResNet-18, windows"], 8, "inference")
    )
    for name in MODELS:
        for what in OPERATIONS:
            found[f"operation/{what}/{name}"] = Row(partial(operation, name, what))
    program = ["-m", "isomorph_command"]
    found["command/--help"] = Row(partial(processes, [*program, "--help"], 0))
    found["command/wrong name"] = Row(partial(processes, [*program, "recats"], 2))
    found["command/wrong model"] = Row(
        partial(processes, [*program, "export", "resnet5O", "--out", "x.onnx"], 2)
    )
    found["command/wrong value"] = Row(
        partial(processes, [*program, "train", "digits_cnn", "--optim.lr", "-1"], 2)
    )
    found["command/wrong field"] = Row(
        partial(processes, [*program, "train", "digits_cnn", "--optim.lrr", "3"], 2)
    )
    found["command/import isomorph"] = Row(partial(processes, ["-c", "import isomorph"], 0))
    found["command/train"] = Row(training)
    found["command/evaluate"] = Row(evaluation)
    found["command/analyze"] = Row(page)
    return found
