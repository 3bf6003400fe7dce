"""What looking costs: time and peak memory of each analysis on ViT-B at 384 px, and of CKA over a loader.

python benchmarks/analysis.py [--model vit_base_patch16_384] [--images 2000] [--quick]
"""

import argparse
import subprocess
import sys
from functools import partial

import timm
import torch

import isomorph as iso
from interleave import forward, interleaved, show, write

LOOKS = {
    "nonlocality": iso.nonlocality,
    "entropy": iso.analysis.attention_entropy,
    "logit_stats": iso.analysis.logit_stats,
    "head_similarity": iso.analysis.head_similarity,
    "one layer's map": partial(iso.attention_maps, where="blocks.3.*"),
    "all maps": iso.attention_maps,
}


def growth(code: str) -> float:
    """MiB that a process grows by while it runs some code, after `before = peak()`."""
    head = "import resource, timm, torch, isomorph as iso\n"
    head += "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", head + code], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def looking(name: str, rounds: int) -> list[dict[str, object]]:
    """Each analysis of one image against the plain forward pass."""
    model = timm.create_model(name).eval()
    x = torch.randn(1, *model.pretrained_cfg["input_size"])
    contenders = {
        "forward": forward(model, x),
        **{what: partial(look, model, x) for what, look in LOOKS.items()},
    }
    times = interleaved(contenders, torch.device("cpu"), rounds)
    return [
        {"look": what, "ms": ms, "times the forward": ms / times["forward"]}
        for what, ms in times.items()
    ]


def streaming(images: int) -> list[dict[str, object]]:
    """Growth in memory over a loader of so many images, beyond that of the first hundred."""
    code = """
model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
loader = lambda n: (torch.randn(50, 3, 64, 64) for _ in range(n // 50))
look = {look}
look(100); before = peak(); look({images}); print(peak() - before)
"""
    looks = {
        "nonlocality": "lambda n: iso.nonlocality(model, loader(n))",
        "cka": "lambda n: iso.cka(model, model, loader(n))",
        "feature_evolution": "lambda n: iso.analysis.feature_evolution(model, loader(n))",
    }
    return [
        {
            "look": what,
            "images": images,
            "growth MiB": growth(code.format(look=look, images=images)),
        }
        for what, look in looks.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_base_patch16_384")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="a smoke test: writes nothing")
    given = parser.parse_args()
    tables = {
        "one image": looking(given.model, 1 if given.quick else 9),
        "a loader": streaming(given.images),
    }
    for title, rows in tables.items():
        show(title, rows)
    if not given.quick:
        print(f"\nwrote {write('analysis', tables)}")


if __name__ == "__main__":
    main()
