"""convit_s against timm's convit_small and against the plain ViT of the same width and heads (432, 9).

    python benchmarks/convit.py [--device cuda] [--rounds 5] [--name NAME] [--sizes 224 384] [--batches 8 32]

Ratios above 1 mean that isomorph is faster. The three are interleaved in one process, ours and timm's on the same
weights. The second table grows one layer from 14 x 14 to 64 x 64 tokens.
"""

import argparse

import timm
import torch
from timm.layers import Attention
from timm.models.convit import GPSA as TimmGPSA
from timm.models.vision_transformer import VisionTransformer

import isomorph  # noqa: F401 (registers convit_s)
from gpsa import contest
from interleave import forward, interleaved, memory_mib, saved_mib, show, step, write
from isomorph.layers import GPSA
from isomorph.models.convit import checkpoint_filter_fn

MEMORY_MIB = 18 * 1024
"""A training step that would keep more than this is left out of the table on a CPU."""

GRIDS = (14, 24, 32, 48, 64)


def networks(size, device):
    """The three networks, ours and timm's with the same weights, shown to compute the same."""
    timms = timm.create_model("convit_small", img_size=size)
    ours = timm.create_model("convit_s", img_size=size)
    ours.load_state_dict(checkpoint_filter_fn(timms.state_dict(), ours))
    deit = VisionTransformer(img_size=size, embed_dim=432, num_heads=9)
    found = {"ours": ours.to(device), "timm": timms.to(device), "DeiT": deit.to(device)}
    if not torch.is_autocast_enabled(device.type):
        x = torch.randn(1, 3, size, size, device=device)
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(x), timms.eval()(x), atol=1e-4, rtol=1e-4)
    return found


def network_table(device, rounds, sizes=(224, 384), batches=(8, 32)):
    """Inference, training step and saved activations of the three, one row a batch and size."""
    rows = []
    for size in sizes:
        nets = networks(size, device)
        saved = {
            name: saved_mib(net.train(), torch.randn(2, 3, size, size, device=device))
            for name, net in nets.items()
        }
        for batch in batches:
            x = torch.randn(batch, 3, size, size, device=device)
            turns = max(3, rounds * 8 * 224**2 // (batch * size**2))
            run = interleaved(
                {name: forward(net.eval(), x) for name, net in nets.items()}, device, turns
            )
            fits = {
                n: net
                for n, net in nets.items()
                if batch * saved[n] < memory_mib(device, MEMORY_MIB)
            }
            train = interleaved(
                {name: step(net.train(), x) for name, net in fits.items()}, device, turns
            )
            rows.append(
                {
                    "size": size,
                    "batch": batch,
                    "rounds": turns,
                    "inference ms": run["ours"],
                    "vs timm": run["timm"] / run["ours"],
                    "vs DeiT": run["DeiT"] / run["ours"],
                    "step ms": train.get("ours", "no memory"),
                    **{
                        f"step vs {name}": train[name] / train["ours"]
                        if name in train
                        else "no memory"
                        for name in ("timm", "DeiT")
                    },
                    **{f"{name} MiB": saved[name] for name in nets},
                    "saved vs DeiT": saved["ours"] / saved["DeiT"],
                }
            )
            show(f"so far, {size} at batch {batch}", rows[-1:])
    return rows


def growth_table(device, rounds):
    """One layer, 9 heads of 48, one image: cost as the grid grows, and by which factor from 14 x 14."""
    rows, first = [], None
    for side in GRIDS:
        x = torch.randn(1, side * side, 432, device=device)
        layers = {
            "ours": GPSA(432, 9, (side, side)),
            "timm": TimmGPSA(432, 9),
            "plain": Attention(432, 9),
        }
        row = contest({name: layer.to(device) for name, layer in layers.items()}, x, device, rounds)
        cost = {
            "ours": (row["forward ms"], row["saved MiB"]),
            "timm": (row["forward ms"] * row["vs timm"], row["timm MiB"]),
        }
        first = first or cost
        for name, (time, memory) in cost.items():
            row |= {
                f"{name} time x": time / first[name][0],
                f"{name} memory x": memory / first[name][1],
            }
        rows.append({"grid": f"{side}x{side}"} | row)
    return rows


TABLES = {
    "Networks; ratios above 1: convit_s is faster": network_table,
    "One layer from 14 x 14 to 64 x 64 tokens": growth_table,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds at 224 and batch 8; fewer above"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 384])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--name", help="of the JSON file in results")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    limits = {network_table: dict(sizes=options.sizes, batches=options.batches)}
    found = {}
    for title, table in TABLES.items():
        found[title] = table(device, options.rounds, **limits.get(table, {}))
        show(title, found[title])
    print(f"\nwrote {write(options.name or f'convit_{options.device}', found)}")


if __name__ == "__main__":
    main()
