"""GPSA against timm's and against plain attention; GPSA2d against the convolution and a naive form.

    python benchmarks/gpsa.py [--device cuda] [--rounds 7] [--name NAME]

Ratios above 1 mean that isomorph is faster. Everything is interleaved in one process on the same input.
"""

import argparse

import timm
import torch
from timm.layers import Attention
from timm.models.convit import GPSA as TimmGPSA

import isomorph as iso
from interleave import forward, interleaved, saved_mib, show, step, with_value, write
from isomorph.layers import GPSA, GPSA2d
from naive import NaiveGPSA2d

TOKENS = [
    (heads, width, grid)
    for heads, width in ((4, 192), (9, 432), (16, 768))
    for grid in ((14, 14), (24, 24), (32, 48))
]
MAPS = [(64, (8, 8), 128), (512, (14, 14), 8), (512, (20, 20), 4)]


class Square(torch.nn.Module):
    """timm's layer takes any token count for a square grid; only its cost is wanted here."""

    def __init__(self, layer, tokens):
        super().__init__()
        self.layer = layer
        side = int(tokens**0.5)
        self.exact = side * side == tokens
        # it would build side x side indices and fail: give it a grid of the right count
        if not self.exact:
            indices = torch.zeros(1, tokens, tokens, 3)
            self.layer.get_rel_indices = lambda n: indices.to(self.layer.qk.weight.device)

    def forward(self, x):
        return self.layer(x)


def contest(layers, x, device, rounds):
    """Inference, training step and saved activations of `ours`, beside each rival."""
    run = interleaved(
        {name: forward(layer.eval(), x) for name, layer in layers.items()}, device, rounds
    )
    train = interleaved(
        {name: step(layer.train(), x) for name, layer in layers.items()}, device, rounds
    )
    rivals = [name for name in layers if name != "ours"]
    return {
        "forward ms": run["ours"],
        **{f"vs {name}": run[name] / run["ours"] for name in rivals},
        "step ms": train["ours"],
        **{f"step vs {name}": train[name] / train["ours"] for name in rivals},
        "saved MiB": saved_mib(layers["ours"], x),
        **{f"{name} MiB": saved_mib(layers[name], x) for name in rivals},
    }


def token_table(device, rounds=9, scale=1):
    """One row per width and grid; `scale` multiplies the batches, here and below: 1 for a CPU, more for a GPU."""
    batch = 8 * scale
    rows = []
    for heads, width, (H, W) in TOKENS:
        size = max(1, batch * 196 * 4 // (H * W)) if H * W > 600 else batch
        x = torch.randn(size, H * W, width, device=device)
        layers = {
            "ours": GPSA(width, heads, (H, W)),
            "timm": Square(TimmGPSA(width, heads), H * W),
            "plain": Attention(width, heads, qkv_bias=False),
        }
        layers = {name: layer.to(device) for name, layer in layers.items()}
        if H == W and not torch.is_autocast_enabled(device.type):  # same weights, same function
            ours, theirs = layers["ours"], layers["timm"].layer
            theirs.qk.load_state_dict(ours.qk.state_dict())
            theirs.v.load_state_dict(ours.v.state_dict())
            theirs.proj.load_state_dict(ours.proj.state_dict())
            theirs.pos_proj.weight.data.copy_(ours.position)
            theirs.gating_param.data.copy_(ours.gate)
            torch.testing.assert_close(ours(x), theirs(x), atol=1e-3, rtol=1e-3)
        row = {"heads x width": f"{heads} x {width}", "grid": f"{H}x{W}", "batch": size}
        rows.append(row | contest(layers, x, device, rounds))
    return rows


def map_table(device, rounds=9, scale=1):
    """GPSA2d beside the convolution it replaces and the naive form."""
    rows = []
    for channels, (H, W), few in MAPS:
        batch = scale * few
        x = torch.randn(batch, channels, H, W, device=device)
        conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(device)
        ours = iso.ConvToGPSA("paper").build(iso.surgery.Site(conv)).to(device)
        layers = {"ours": ours, "naive": NaiveGPSA2d(ours), "conv": conv}
        if not torch.is_autocast_enabled(device.type):
            torch.testing.assert_close(layers["naive"](x), ours(x), atol=1e-4, rtol=1e-4)
        rows.append(
            {"map": f"{H}x{W}/{channels}", "batch": batch} | contest(layers, x, device, rounds)
        )
    return rows


def network_table(device, rounds=5, scale=1):
    """t_resnetrs50 beside the CNN it is recast from, stride 1 in the last stage for both."""
    cnn = iso.unstride(timm.create_model("resnetrs50"), "layer4").eval().to(device)
    tcnn = iso.recast(cnn, iso.ConvToGPSA("paper"), "layer4.*.conv2")
    batch = 8 * scale
    x = torch.randn(batch, 3, 224, 224, device=device)
    run = interleaved({"cnn": forward(cnn, x), "tcnn": forward(tcnn, x)}, device, rounds)
    return [
        {
            "network": "t_resnetrs50 at 224",
            "batch": batch,
            "ms": run["tcnn"],
            "CNN ms": run["cnn"],
            "vs CNN": run["cnn"] / run["tcnn"],
        }
    ]


def form_table(device, rounds=9, scale=1):
    """Where each form wins: the measurements behind `max_dense_pairs`."""
    rows = []
    for side in (8, 14, 20, 24, 32):
        layer, x = (
            GPSA2d(512, 512, 3, 1, 1).to(device),
            torch.randn(2 * scale, 512, side, side, device=device),
        )
        run = interleaved(
            both_forms(GPSA2d, "max_dense_pairs", forward(layer.eval(), x)), device, rounds
        )
        rows.append(
            {
                "layer": "GPSA2d 512",
                "grid": f"{side}x{side}",
                "dense ms": run["dense"],
                "by axis ms": run["by axis"],
            }
        )
    return rows


def both_forms(module, threshold, run):
    """The same pass with the threshold moved out of the way, either side."""
    values = {"dense": 10**12, "by axis": 0}
    return {form: with_value(module, threshold, value, run) for form, value in values.items()}


TABLES = {
    "GPSA (tokens); ratios above 1: ours is faster": token_table,
    "GPSA2d (maps); ratios above 1: ours is faster": map_table,
    "Whole network, inference": network_table,
    "Forms": form_table,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds behind each median"
    )
    parser.add_argument("--name", help="of the JSON file in results")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    found = {}
    for title, table in TABLES.items():
        found[title] = table(device, rounds=options.rounds)
        show(title, found[title])
    print(f"\nwrote {write(options.name or f'gpsa_{options.device}', found)}")


if __name__ == "__main__":
    main()
