"""Edits of the map of any attention: time of one layer of DINOv3-S at 224 and 384 pixels, against fused attention.

    python benchmarks/map_edit.py [--rounds 9]

Writes the part "cost" of benchmarks/results/map_edit.json.
"""

import argparse
import json

import torch
from timm.models.eva import EvaAttention
from torch import nn

import isomorph as iso
from interleave import RESULTS, forward, interleaved, processor, saved_mib, step

RULES = {
    "refined": iso.AttentionToRefined(),
    "each head alone": iso.AttentionToRefined(ratio=0),
    "gated": iso.AttentionToGPSA(),
}
TOKENS = {224: 14 * 14 + 5, 384: 24 * 24 + 5}
"""Tokens of DINOv3-S by image size: patches of 16 pixels, a class token and 4 registers."""
FILE = RESULTS / "map_edit.json"
BATCH = 4


def cost(rounds):
    """Times of one attention layer, fused, unfused and edited, by turns."""
    rows = []
    for size, tokens in TOKENS.items():
        fused = nn.Sequential(EvaAttention(384, 6, num_prefix_tokens=5, scale_norm=False)).eval()
        layers = {"fused": fused}
        for name, rule in RULES.items():
            rule = (
                rule
                if name != "gated"
                else iso.AttentionToGPSA(grid_size=(size // 16,) * 2, prefix_tokens=5)
            )
            layers[name] = iso.recast(fused, rule, "0")
        unfused = iso.revert(layers["gated"])
        unfused[0].fused_attn = False
        layers["unfused"] = unfused
        x = torch.randn(BATCH, tokens, 384)
        inference = interleaved(
            {name: forward(m, x) for name, m in layers.items()}, x.device, rounds
        )
        training = interleaved(
            {name: step(m, x.clone()) for name, m in layers.items()}, x.device, rounds
        )
        for name, layer in layers.items():
            row = dict(
                size=size, form=name, inference_ms=inference[name], training_ms=training[name]
            )
            row |= dict(saved_mib=saved_mib(layer, x[:1].clone()))
            row |= dict(
                inference=inference[name] / inference["fused"],
                training=training[name] / training["fused"],
            )
            rows.append(row)
            print(
                {
                    key: round(value, 2) if isinstance(value, float) else value
                    for key, value in row.items()
                },
                flush=True,
            )
    machine = f"{processor()}, torch {torch.__version__}"
    FILE.write_text(
        json.dumps(json.loads(FILE.read_text()) | dict(cost=rows, machine=machine), indent=1) + "\n"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    cost(parser.parse_args().rounds)


if __name__ == "__main__":
    main()
