"""Operations counted, forward and backward: a GPU pays for every kernel that is launched, however small.

A row says what a layer may launch at batch 1 and at batch 4, in the form that a GPU takes. A rewrite that lowers a
count lowers its row; nothing raises one. To add a layer, add a row to LAYERS.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import isomorph as iso
from isomorph.layers import modes
from test_eval_mode import LAYERS as KEPT

NOT_LAUNCHED = {"_unsafe_view", "promote_types", "result_type", "can_cast"}
NO_KERNEL = ("sym_", "is_", "empty", "new_empty")
"""Operations that launch nothing, and how the names of others begin, besides those that return a view."""

SYNCHRONISING = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
}
SYNCHRONISING |= {
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "allclose",
    "_assert_async",
}
"""Operations that wait for the device: the host needs a value, or a size that depends on one."""


class Launched(TorchDispatchMode):
    """Count what is launched; a custom operator counts as what it runs. Unless `wait`, raise where the host waits."""

    def __init__(self, wait: bool = True) -> None:
        super().__init__()
        self.wait = wait
        self.names = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        space, name = operation._schema.name.split("::")
        if not self.wait and name in SYNCHRONISING:
            raise RuntimeError(f"{name} waits for the device")
        if space not in ("aten", "prim", "prims"):
            with self:
                return operation.redispatch(
                    torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs
                )
        views = any(
            each.alias_info and not each.alias_info.is_write for each in operation._schema.returns
        )
        if not views and name not in NOT_LAUNCHED and not name.startswith(NO_KERNEL):
            self.names[name] += 1
        return operation(*args, **kwargs)

    @property
    def total(self) -> int:
        return self.names.total()


def launched(
    layer: nn.Module, x: torch.Tensor, train: bool = True, wait: bool = True
) -> tuple[Counter, Counter]:
    """Return what the forward and the backward pass launch; in eval mode, what a second call launches, and nothing."""
    layer.train(train).zero_grad(set_to_none=True)
    if not train:
        with torch.no_grad(), Launched(wait) as forward:
            layer(x)
            forward.names.clear()
            layer(x)
        return forward.names, Counter()
    x = x.clone().requires_grad_()
    with Launched(wait) as forward:
        y = layer(x)
    grad = torch.ones_like(y)
    with Launched(wait) as backward:
        y.backward(grad)
    return forward.names, backward.names


def saved_mib(layer: nn.Module, x: torch.Tensor) -> float:
    """Return the MiB that a training step keeps for the backward pass, without the parameters."""
    kept = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            # the tensor keeps its address from being reused
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        layer.train()(x.clone().requires_grad_())
    return sum(size for size, _ in storages.values()) / 2**20


class Row(NamedTuple):
    """A layer and its input of one image, and the most that it launches and keeps (MiB) in a training step."""

    make: Callable[[], nn.Module]
    size: tuple[int, ...]
    forward: int
    backward: int
    eval: int
    mib: float


def attention(rule=None) -> nn.Module:
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=12)
    return (vit if rule is None else iso.recast(vit, rule, where="blocks.*.attn")).blocks[0].attn


def block() -> nn.Module:
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=12)
    return iso.recast(
        vit, iso.LinearToPyramid(), where=["blocks.*.attn.qkv", "blocks.*.mlp.fc?"]
    ).blocks[0]


def conv(rule=None) -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(512, 512, 3, padding=1, bias=False))
    return (conv if rule is None else iso.recast(conv, rule, where="0"))[0]


TOKENS = (1, 197, 192)
MAP = (1, 512, 14, 14)
IMAGE = (1, 3, 224, 224)
partial = functools.partial

LAYERS = {
    "timm's attention": Row(attention, TOKENS, 3, 9, 3, 0.74),
    "attention -> gated": Row(
        partial(attention, iso.AttentionToGPSA(init="paper")), TOKENS, 16, 38, 10, 0.91
    ),
    "attention -> refined": Row(
        partial(attention, iso.AttentionToRefined()), TOKENS, 11, 21, 9, 4.44
    ),
    "attention -> relative": Row(
        partial(attention, iso.AttentionToRelative()), TOKENS, 11, 18, 3, 3.08
    ),
    "conv": Row(conv, MAP, 1, 1, 1, 0.39),
    "conv -> gated": Row(partial(conv, iso.ConvToGPSA(init="paper")), MAP, 22, 43, 10, 10.2),
    "conv -> gated, window": Row(
        partial(conv, iso.ConvToGPSA(init="paper", content="window")), MAP, 22, 43, 10, 10.2
    ),
    "conv -> position": Row(
        partial(conv, iso.ConvToGPSA(init="paper", content="none")), MAP, 13, 25, 6, 0.41
    ),
    "ConViT-Ti": Row(partial(timm.create_model, "convit_ti"), IMAGE, 245, 507, 185, 30.1),
    "block with pyramids": Row(block, TOKENS, 89, 121, 10, 17.0),
}
"""REDESIGN's layers; the plain ones show what is counted."""


@pytest.fixture(autouse=True)
def gpu_form(monkeypatch):
    """Layers take the form that they take on a GPU."""
    monkeypatch.setattr(modes, "CPU_DEVICE", "another")


@pytest.mark.parametrize("name", LAYERS)
def test_no_more_operations(name):
    row = LAYERS[name]
    torch.manual_seed(0)
    layer = row.make()
    x = torch.randn(row.size)
    assert saved_mib(layer, x) <= row.mib
    for images in (1, 4):  # the counts are those of every batch
        passes = launched(layer, x.expand(images, *row.size[1:]).clone())
        counted = [count.total() for count in passes]
        assert counted[0] <= row.forward, passes[0]
        assert counted[1] <= row.backward, passes[1]
    again, _ = launched(layer, x, train=False)
    assert again.total() <= row.eval, again


OTHERS = {
    "convolution block": (lambda: iso.layers.MBConv(8, 12, stride=2), (2, 8, 9, 9)),
    "convolution block, LayerNorm": (
        lambda: iso.layers.LayerNormMBConv(8, 12, stride=2),
        (2, 8, 9, 9),
    ),
    "LocalAttention": (lambda: iso.layers.LocalAttention(16, 4), (2, 12, 16)),
    "ExpandedAttention": (lambda: iso.layers.ExpandedAttention(16, 4), (2, 12, 16)),
    "SpatialAttention": (lambda: iso.layers.SpatialAttention(16, 4, grid_size=(3, 4)), (2, 12, 16)),
    "window in tiles": (
        lambda: iso.layers.WindowGPSA2d(4, 4, padding=1, kernel_size=3),
        (1, 4, 18, 18),
    ),
    "map of 24 x 24": (lambda: iso.layers.GPSA2d(4, 4, padding=1, kernel_size=3), (1, 4, 24, 24)),
    "PyramidLinear": (lambda: iso.layers.PyramidLinear(8, 8), (2, 12, 8)),
    "PyramidConv2d": (lambda: iso.layers.PyramidConv2d(8, 8, 1), (2, 8, 5, 5)),
    "annealed": (lambda: iso.layers.AnnealedReLU(), (2, 8)),
    "padding": (lambda: iso.layers.SamePadding((3, 3), (2, 2)), (2, 8, 5, 6)),
}
EVERY = {name: (row.make, row.size) for name, row in LAYERS.items()} | KEPT | OTHERS


@pytest.mark.parametrize("name", EVERY)
def test_all_tensors_are_on_the_layer_s_device(name):
    make, size = EVERY[name][:2]
    layer = make()
    with FakeTensorMode():  # a GPU on which nothing is computed; two devices in one operation raise
        for module in layer.modules():
            for tensors in (module._parameters, module._buffers):
                for key, each in tensors.items():
                    if each is not None:
                        fake = torch.empty(each.shape, dtype=each.dtype, device="cuda")
                        tensors[key] = (
                            nn.Parameter(fake) if isinstance(each, nn.Parameter) else fake
                        )
        for train in (True, False):
            layer.train(train)(torch.empty(size, device="cuda"))


@pytest.mark.parametrize("device", ["another", "cpu"])
@pytest.mark.parametrize("name", EVERY)
def test_nothing_waits_for_the_device(name, device, monkeypatch):
    monkeypatch.setattr(modes, "CPU_DEVICE", device)
    make, size = EVERY[name][:2]
    layer = make()
    x = torch.randn(size)
    launched(layer, x, wait=False)
    launched(layer, x, train=False, wait=False)
