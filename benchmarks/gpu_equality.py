"""Every family on the GPU against the CPU, in float64 with gradients; fused on the GPU; compiled in float32.

python benchmarks/gpu_equality.py [--compile] [--name gpu_equality]
"""

import argparse
import copy
import sys

import timm
import torch

import isomorph as iso
from interleave import show, write

NAMES = {
    "convit_ti": {},
    "coatnet_0": {},
    "refined_vit_s": dict(depth=3),
    "refined_vit_s_released": dict(depth=3),
    "tdrl_vit_ti": dict(depth=3),
    "t_resnet50d": {},
    "t_cifar_resnet20": {},
}
"""Names of timm and arguments that keep the run short."""

SMALLEST = 1e-12
"""Gradients below this, such as those of biases before a BatchNorm, are zero up to rounding."""


def run(model, x):
    """Return the outputs, and the gradients of their mean square, on the CPU."""
    y = model(x)
    y.square().mean().backward()
    return y.detach().cpu(), [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def relative(expected, found):
    """Return the largest deviation of a gradient, over the gradient's own largest entry."""
    return max(
        float((a - b).abs().max() / a.abs().max())
        for a, b in zip(expected, found, strict=True)
        if a.abs().max() > SMALLEST
    )


def synchronises(model, x):
    """Return what a training step under bfloat16 waits for on the host: "nothing", or torch's message."""
    model.train()
    for mode in ("default", "error"):  # the first step may set up libraries
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return "nothing"


def compare(name, arguments, compiled):
    """Return one row: largest deviations of one network."""
    torch.manual_seed(0)
    model = timm.create_model(name, **arguments).double().eval()
    x = torch.randn(2, *model.pretrained_cfg["input_size"], dtype=torch.float64)
    (y, gradients), gpu = run(copy.deepcopy(model), x), copy.deepcopy(model).cuda()
    on_gpu, gpu_gradients = run(gpu, x.cuda())
    row = {
        "network": name,
        "output": float((y - on_gpu).abs().max()),
        "gradients": relative(gradients, gpu_gradients),
    }
    with torch.no_grad():
        row["fused"] = float((iso.fuse(copy.deepcopy(gpu))(x.cuda()).cpu() - y).abs().max())
        if compiled:
            row["compiled, float32"] = float(
                (torch.compile(gpu.float())(x.float().cuda()).cpu().double() - y).abs().max()
            )
    row["a step waits for"] = synchronises(gpu.float(), x.float().cuda())
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compile", action="store_true", help="also compile each network; up to a minute each"
    )
    parser.add_argument("--name", default="gpu_equality", help="of the JSON file in results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here; isomorph verify compares on a CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    for name, arguments in NAMES.items():
        rows.append(compare(name, arguments, options.compile))
        show(name, rows[-1:])
        write(options.name, {"GPU against CPU, float64; deviations": rows})
    show("all", rows)


if __name__ == "__main__":
    main()
