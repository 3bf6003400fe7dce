"""Global attention, the same limited to windows by a mask, and the windows alone: time of the attention and the model.

    python benchmarks/windows.py

Writes results/windows.json. Random weights, depth 2, one image, one thread of a CPU.
"""

import argparse

import timm
import torch
from torch import nn

import isomorph as iso
from interleave import forward, interleaved, update

MODELS = {"DINOv3-S": "vit_small_patch16_dinov3", "relative bias": "vit_relpos_small_patch16_224"}


def attention_of(model: nn.Module, x: torch.Tensor):
    """One pass of the first attention layer, on what the model gives it."""
    layer, calls = model.blocks[0].attn, []
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(x)
    handle.remove()
    args, kwargs = calls[0]

    def run():
        with torch.no_grad():
            return layer(*args, **kwargs)

    return run


def row(name: str, size: int, window: int, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = timm.create_model(MODELS[name], depth=2, num_classes=0, img_size=size).eval()
    masked = iso.recast(model, iso.AttentionToWindow(window), where="blocks.*.attn")
    iso.Anneal(steps=1).apply(masked, 1)
    forms = {"global": model, "masked": masked, "windows": iso.prune(masked)}
    x, cpu = torch.randn(1, 3, size, size), torch.device("cpu")
    found: dict[str, object] = {"model": name, "pixels": size, "window": window}
    for what, contender in (("attention", attention_of), ("model", forward)):
        times = interleaved(
            {form: contender(each, x) for form, each in forms.items()}, cpu, rounds, warm_up=1
        )
        found |= {f"{what} {form} ms": round(time, 1) for form, time in times.items()}
        found[f"{what} gain"] = round(times["global"] / times["windows"], 2)
    print(found, flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [row(name, size, 8, rounds) for name in MODELS for size in (512, 1024)]
    update("windows", {"windows": rows})
