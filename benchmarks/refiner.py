"""Refined attention: as one convolution, as the paper's three, as released, and plain; one layer, and whole networks.

    python benchmarks/refiner.py [--device cuda] [--rounds 5] [--name NAME]

All are interleaved in one process, on the same weights where they compute the same. Ratios are times over the paper's
three convolutions: 5 is five times as fast. MiB are kept for the backward pass, of one image.
"""

import argparse

import timm
import torch
from timm.layers import Attention

import isomorph  # noqa: F401 (its models join timm's registry)
from interleave import forward, interleaved, saved_mib, show, step, write
from isomorph.layers import ExpandedAttention, LocalAttention, RefinedAttention, SpatialAttention
from isomorph.layers.refined.refiner import MapConvolution, SpatialRefiner
from isomorph.layers.refined.released import ReleasedDLA
from naive import three_convolutions

SHAPE = dict(dim=384, num_heads=12, qkv_bias=True)
"""Of Refined-ViT-S; ratio 3, kernel 3."""
GRIDS = {197: (14, 14), 785: (28, 28)}


def layers(N):
    """The contenders, and the naive form that each is measured against."""
    ours, local = RefinedAttention(**SHAPE), LocalAttention(**SHAPE)
    spatial = SpatialAttention(
        grid_size=GRIDS[N], prefix_tokens=1, refine=SpatialRefiner(12), **SHAPE
    )
    return {
        "plain": Attention(**SHAPE),
        "three convolutions": three_convolutions(ours),
        "one convolution": ours,
        "one, recomputed": RefinedAttention(recompute=True, **SHAPE),
        "without reduction": ExpandedAttention(**SHAPE),
        "spatial": spatial,
        "released": RefinedAttention(refine=ReleasedDLA(12), **SHAPE),
        "local, map convolved": three_convolutions(
            RefinedAttention(refine=MapConvolution(12), **SHAPE)
        ),
        "local, no map": local,
    }


def rows_of(contenders, x, device, rounds, base, against):
    """Forward, step and memory of every contender."""
    fast = interleaved({n: forward(m.eval(), x) for n, m in contenders.items()}, device, rounds)
    slow = interleaved(
        {n: step(m.train(), x.clone()) for n, m in contenders.items()}, device, rounds
    )
    kept = {n: saved_mib(m, x[:2].clone()) for n, m in contenders.items()}
    return [
        {
            **base,
            "form": name,
            "forward ms": fast[name],
            "forward, times as fast": fast[against(name)] / fast[name],
            "step ms": slow[name],
            "step, times as fast": slow[against(name)] / slow[name],
            "MiB an image": kept[name],
        }
        for name in contenders
    ]


def layer_table(device, rounds, scale=1):
    """One attention layer of Refined-ViT-S; local attention is measured against its convolved map.

    `scale` multiplies the batches, here and below: 1 for a CPU, more for a GPU.
    """
    rows = []
    for N, batch in ((197, 8 * scale), (785, 2 * scale)):
        contenders = {name: layer.to(device) for name, layer in layers(N).items()}
        x = torch.randn(batch, N, SHAPE["dim"], device=device)

        def against(name: str) -> str:
            return "local, map convolved" if name.startswith("local") else "three convolutions"

        rows += rows_of(contenders, x, device, rounds, {"tokens": N, "batch": batch}, against)
    return rows


def network_table(device, rounds, scale=1):
    """Refined-ViT-S at 224, and DeiT-S."""
    ours = timm.create_model("refined_vit_s")
    networks = {
        "deit_small": timm.create_model("deit_small_patch16_224"),
        "refined_vit_s, three convolutions": three_convolutions(ours),
        "refined_vit_s": ours,
        "refined_vit_s, recomputed": timm.create_model("refined_vit_s", recompute=True),
        "refined_vit_s, share 0": timm.create_model("refined_vit_s", share=0),
        "refined_vit_s_released": timm.create_model("refined_vit_s_released"),
    }
    networks = {name: network.to(device) for name, network in networks.items()}
    x = torch.randn(8 * scale, 3, 224, 224, device=device)
    against = lambda _: "refined_vit_s, three convolutions"  # noqa: E731
    return rows_of(networks, x, device, rounds, {"batch": len(x)}, against)


def base_table(device, rounds, scale=1):
    """Blocks of ViT-Base width at 224: what the maps cost in memory, and what recomputing them costs in time."""
    blocks = {
        name: timm.create_model("refined_vit_b", depth=4, num_classes=0, **form).to(device)
        for name, form in {
            "plain": dict(ratio=0, kernel=0),
            "one convolution": {},
            "one, recomputed": dict(recompute=True),
            "local, no map": dict(ratio=0),
        }.items()
    }
    x = torch.randn(4 * scale, 3, 224, 224, device=device)
    return rows_of(blocks, x, device, rounds, {"batch": len(x)}, lambda _: "plain")


TABLES = {
    "Attention of Refined-ViT-S": layer_table,
    "Networks": network_table,
    "Four blocks of ViT-Base; times as fast as plain": base_table,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", help="of the JSON file in results")
    options = parser.parse_args()
    torch.manual_seed(0)
    device, found = torch.device(options.device), {}
    for title, table in TABLES.items():
        found[title] = table(device, options.rounds)
        show(title, found[title])
    print(f"\nwrote {write(options.name or f'refiner_{options.device}', found)}")


if __name__ == "__main__":
    main()
