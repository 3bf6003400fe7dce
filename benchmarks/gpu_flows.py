"""What users do, on a GPU: each flow works, or its error is printed, and the exit status is 1.

python benchmarks/gpu_flows.py [--device cpu] [FLOW ...]
"""

import argparse
import copy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import isomorph as iso

COMMAND = [sys.executable, "-c", "from isomorph_command import main; main()"]
SMALL_VIT = ["--model.kwargs.img_size=32", "--model.kwargs.patch_size=8", "--model.kwargs.depth=2"]


def vit(device: str) -> nn.Module:
    return (
        timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, depth=3)
        .eval()
        .to(device)
    )


def cnn(device: str) -> nn.Module:
    return timm.create_model("cifar_resnet20").eval().to(device)


def images(device: str, size: int = 64) -> Tensor:
    return torch.randn(
        2, 3, size, size, generator=torch.Generator().manual_seed(0), device="cpu"
    ).to(device)


def step(model: nn.Module, x: Tensor, dtype: torch.dtype, inside: bool = False) -> None:
    """A training step under autocast, its backward pass inside or after it."""
    with torch.autocast(x.device.type, dtype):
        loss = model.train()(x).float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def recast(device: str) -> None:
    """Every rule for attention and convolutions: equal, then a step, then back."""
    rules = (
        iso.AttentionToGPSA(),
        iso.AttentionToRefined(),
        iso.AttentionToRelative(),
        iso.AttentionToWindow(window=2),
    )
    cases = [(vit(device), rule, "blocks.*.attn", images(device)) for rule in rules]
    cases += [
        (cnn(device), iso.ConvToGPSA(content=c), "layer3.*.conv2", images(device, 32))
        for c in ("global", "none")
    ]
    for model, rule, where, x in cases:
        new = iso.recast(model, rule, where)
        iso.verify(model, new, x)
        iso.verify(model, iso.revert(copy.deepcopy(new)), x)
        step(new, x, torch.bfloat16)


def pyramids(device: str) -> None:
    """Steps in both half precisions, running statistics again, and fused."""
    x, model = images(device), vit(device)
    wide = iso.recast(model, iso.LinearToPyramid(), where=["blocks.*.attn.qkv", "blocks.*.mlp.fc?"])
    iso.verify(model, wide, x)
    for dtype in (torch.bfloat16, torch.float16) if device != "cpu" else (torch.bfloat16,):
        for inside in (False, True):
            step(wide, x, dtype, inside)
    wide = iso.recalibrate(wide, [x, x]).eval()
    iso.verify(wide, iso.fuse(wide), x)


def norms(device: str) -> None:
    """Norms merged, with weights and biases, and a block inserted."""
    for model in (timm.create_model("resnet18", num_classes=10).eval().to(device), vit(device)):
        iso.verify(model, iso.fuse(model, affine=True), images(device))
    plain = cnn(device)
    with_block = iso.insert(plain, iso.layers.MapAttention, "layer3.2")
    assert iso.verify(plain, with_block, images(device, 32)).passed


def looks(device: str) -> None:
    """Analysis of a gated network."""
    model, x = iso.recast(vit(device), iso.AttentionToGPSA(), "blocks.*.attn"), images(device)
    iso.attention_maps(model, x), iso.gates(model), iso.nonlocality(model, x)
    iso.analysis.feature_evolution(model, x.repeat(8, 1, 1, 1))


def kept(device: str) -> None:
    """Values that eval mode keeps follow their parameters, and a CUDA graph gives the same outputs."""
    x = images(device)
    for name, given in (
        ("convit_ti", dict(depth=4, local_up_to_layer=3)),
        ("refined_vit_s", dict(depth=2)),
    ):
        model = timm.create_model(name, img_size=64, num_classes=10, **given).eval().to(device)
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.mul_(1.01)
            expected = copy.deepcopy(model)(x)
            torch.testing.assert_close(model(x), expected)
            if device == "cuda":
                with torch.cuda.stream(torch.cuda.Stream()):
                    model(x)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = model(x)
                graph.replay()
                torch.testing.assert_close(captured, expected)


def files(device: str) -> None:
    """Saved, loaded and exported."""
    model, x = iso.recast(vit(device), iso.AttentionToGPSA(), "blocks.*.attn"), images(device)
    with tempfile.TemporaryDirectory() as folder:
        iso.save(model, f"{folder}/model.safetensors")
        iso.verify(model, iso.load(f"{folder}/model.safetensors").eval().to(device), x)
        iso.export(model, f"{folder}/model.onnx")


def default_device(device: str) -> None:
    """The same where the caller has set torch's default device."""
    with torch.device(device):
        norms(device), pyramids(device)


def commands(device: str) -> None:
    """Trained in bfloat16 on digits, evaluated and fused from the command line."""
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("tdrl_vit_ti", SMALL_VIT), ("t_cifar_resnet20", [])):
            run = [
                "--epochs=1",
                "--amp=bf16",
                "--data.size=[32,32]",
                "--data.fraction=0.1",
                f"--out={folder}/{name}",
            ]
            call("train", "digits_cnn", f"--model.name={name}", f"--device={device}", *run, *more)
            call(
                "evaluate",
                f"{folder}/{name}/model.safetensors",
                "--data",
                "digits",
                f"--device={device}",
            )
        call(
            "fuse", f"{folder}/tdrl_vit_ti/model.safetensors", "--out", f"{folder}/thin.safetensors"
        )


def call(*arguments: str) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, f"{' '.join(arguments)}: {(done.stderr or done.stdout)[-1500:]}"


FLOWS: tuple[Callable[[str], None], ...] = (
    recast,
    pyramids,
    norms,
    looks,
    kept,
    files,
    default_device,
    commands,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "flows", nargs="*", help="names; by default all: " + ", ".join(f.__name__ for f in FLOWS)
    )
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    failed = False
    for flow in FLOWS:
        if options.flows and flow.__name__ not in options.flows:
            continue
        start = time.perf_counter()
        try:
            flow(options.device)
            outcome = "works"
        except Exception:
            outcome, failed = f"FAILED\n{traceback.format_exc()}", True
        print(f"{flow.__name__}, {time.perf_counter() - start:.0f} s: {outcome}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
