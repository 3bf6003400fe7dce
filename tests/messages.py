"""Messages that need more than their line: why they are said, what to do, and a call that ends in one.

docs_build/generate.py writes the table of docs/guides/troubleshooting.md from here.
"""

import sys
import time
from types import SimpleNamespace

import timm
import torch
from torch import nn

import isomorph as iso

NOWHERE = "http://127.0.0.1:9"
"""An address that no server listens on."""


def cnn(**more):
    return timm.create_model("cifar_resnet20", **more).eval()


def not_finite(*_):
    model = cnn()
    model.conv1.weight.data[0] = float("nan")
    iso.evaluate(model, "digits")


def without_network(folder, patch):
    for name, value in dict(
        HF_HUB_OFFLINE=False, ENDPOINT=NOWHERE, HF_HUB_CACHE=str(folder)
    ).items():
        patch.setattr(f"huggingface_hub.constants.{name}", value)
    iso.models.create("resnet18", pretrained=True)


def state_dict_alone(folder, _):
    torch.save(cnn().state_dict(), folder / "my.pth")
    iso.load(folder / "my.pth")


def cut_file(folder, _):
    iso.save(cnn(), path := folder / "model.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    iso.load(path)


def idle_layers(folder, _):
    from isomorph.lab.training.run import loop
    from isomorph.lab.training.run.state import Run
    from tiny_runs import tiny

    with loop._idle_layers_reported(Run(tiny(folder)), SimpleNamespace(say=print)):
        pass  # a step that calls no layer


def process_alone(_, patch):
    """The second of three processes, of which no other starts."""
    from isomorph.lab import distributed

    def wait(_):
        time.sleep(0.1)
        raise RuntimeError("nobody came")

    for name, value in dict(WORLD_SIZE="3", RANK="1").items():
        patch.setenv(name, value)
    patch.setattr(distributed, "_PATIENCE", 0.01)
    patch.setattr(distributed.dist, "init_process_group", wait)
    distributed.open_runtime("cpu")


def without_pycocotools(_, patch):
    from isomorph.lab.tasks.detection.data import pycocotools

    patch.setitem(sys.modules, "pycocotools.coco", None)
    pycocotools("coco")


def existing_file(folder, _):
    from isomorph.checkpoints.paths import require_new

    require_new(folder, False, "--out")


MESSAGES = {
    "matches no module": (
        "`where` is a glob over full names of modules: `layer3.*.conv?`",
        "print `[n for n, _ in model.named_modules()]`; the message names the nearest",
        lambda *_: iso.targets(cnn(), iso.ConvToGPSA(), "layr3.*"),
    ),
    "of a loader": (
        "a pair `(images, labels)`, or a loader, was given for a batch",
        "the images alone: `images, labels = next(iter(loader))`; `recalibrate`, `quantize` and analysis take loaders",
        lambda *_: iso.fuse(cnn(), [torch.randn(2, 3, 32, 32), torch.zeros(2).long()]),
    ),
    "NOT equal": (
        "the outputs differ by more than the tolerance, or a module that was recast does",
        "read the report, which names the first operation after which they differ, and the notes below",
        lambda *_: iso.verify(nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)),
    ),
    "no folder": (
        "a folder of images has one folder a class, in `train/` and `val/` or directly",
        "[sources and folders](../reference/data.md#sources)",
        lambda folder, _: iso.data.open_source(folder / "photos", "test"),
    ),
    "classes, the data has": (
        "the classifier has other classes than the folder",
        "the right folder; training makes a new classifier by itself where `--model.num_classes` is left out",
        lambda *_: iso.evaluate(cnn(num_classes=3), "digits"),
    ),
    "outputs are not finite": (
        "NaN or infinite values in the network; a metric would count them as class 0",
        "find the first layer with `torch.autograd.detect_anomaly()`; lower the learning rate",
        not_finite,
    ),
    "give an example": (
        "the input size of a model of your own is unknown",
        "`example=batch`, as the model takes it",
        lambda *_: iso.insert(
            nn.Sequential(nn.Linear(4, 4)), lambda width: nn.Linear(width, width), after="0"
        ),
    ),
    "exists; give": (
        "the file of `--out` exists",
        "another name, or `--overwrite`",
        existing_file,
    ),
    "does not say what model it is": (
        "a state dict names its tensors, not the network",
        "`base=NAME`, `--arch NAME`, as in [your own model](your-own-model.md)",
        state_dict_alone,
    ),
    "cannot download": (
        "no network, or the server does not answer",
        "[offline](offline.md): files of weights, or the cache",
        without_network,
    ),
    "may be truncated": ("the file ends too early", "download or copy it again", cut_file),
    "recast, but not called in the first step": (
        "a parent reads the layer's weight instead of calling it",
        "recast another layer; packed attention needs `iso.AttentionToLinears` first",
        idle_layers,
    ),
    "needs pycocotools": (
        "an extra is not installed; the message names its package",
        "`pip install 'isomorph[dense]'`: [extras](../start/install.md#extras)",
        without_pycocotools,
    ),
    "waits for the": (
        "not all processes of torchrun have started",
        "start every process, or unset `WORLD_SIZE`",
        process_alone,
    ),
    "found no others": (
        "the processes cannot reach each other",
        "the same `MASTER_ADDR` and `MASTER_PORT` in each; a firewall",
        process_alone,
    ),
    "is not a field": (
        "a misspelt field of a recipe",
        "[all fields](../reference/recipe-fields.md); the message names the nearest",
        lambda *_: iso.load_recipe("digits_cnn", ["optim.lrr=3"]),
    ),
}
"""What a message contains, why it is said, what to do, and a call that ends in it: with a folder and a monkeypatch."""
