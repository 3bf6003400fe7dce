"""Edits of the map of any attention: their cost against fused attention, and training through them.

    python benchmarks/map_edit.py cost [--rounds 9]      # one layer of DINOv3-S at 224 and 384 pixels
    python benchmarks/map_edit.py cifar [--images 2560]  # a small DINOv3 on a part of CIFAR-10, two epochs each

Writes benchmarks/results/map_edit.json. The second part needs ISOMORPH_DATA with cifar10.
"""

import argparse
import copy
import json
import platform
import time

import timm
import torch
import torch.nn.functional as F
from timm.models.eva import EvaAttention
from torch import nn

import isomorph as iso
from interleave import RESULTS, forward, interleaved, saved_mib, step
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader

RULES = {
    "refined": iso.AttentionToRefined(),
    "each head alone": iso.AttentionToRefined(ratio=0),
    "gated": iso.AttentionToGPSA(),
}
CIFAR_FORMS = {
    "plain": None,
    "refined": RULES["refined"],
    "gated": RULES["gated"],
    "gated, half of it position": iso.AttentionToGPSA(gate=0.0),
}
"""Networks of the second part; the last one does not start at the function of the plain one."""
TOKENS = {224: 14 * 14 + 5, 384: 24 * 24 + 5}
"""Tokens of DINOv3-S by image size: patches of 16 pixels, a class token and 4 registers."""
FILE = RESULTS / "map_edit.json"
BATCH = 4
NETWORK = dict(img_size=32, patch_size=4, depth=3, embed_dim=96, num_heads=6, num_classes=10)


def record(part, rows):
    """Write one part of the result file and keep the others."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    found |= {
        part: rows,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def cost(rounds):
    """Times of one attention layer, fused, unfused and edited, by turns."""
    rows = []
    for size, tokens in TOKENS.items():
        fused = nn.Sequential(EvaAttention(384, 6, num_prefix_tokens=5, scale_norm=False)).eval()
        layers = {"fused": fused}
        for name, rule in RULES.items():
            rule = rule if name != "gated" else iso.AttentionToGPSA(grid_size=(size // 16,) * 2, prefix_tokens=5)
            layers[name] = iso.recast(fused, rule, "0")
        unfused = iso.revert(layers["gated"])
        unfused[0].fused_attn = False
        layers["unfused"] = unfused
        x = torch.randn(BATCH, tokens, 384)
        inference = interleaved({name: forward(m, x) for name, m in layers.items()}, x.device, rounds)
        training = interleaved({name: step(m, x.clone()) for name, m in layers.items()}, x.device, rounds)
        for name, layer in layers.items():
            row = dict(size=size, form=name, inference_ms=inference[name], training_ms=training[name])
            row |= dict(saved_mib=saved_mib(layer, x[:1].clone()))
            row |= dict(inference=inference[name] / inference["fused"], training=training[name] / training["fused"])
            rows.append(row)
            print(
                {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
    record("cost", rows)


def loader(split, count, config):
    """Batches of evenly spaced images of CIFAR-10."""
    source = open_source("cifar10", split)
    every = len(source) // count
    return list(eval_loader(source.subset(list(range(0, count * every, every))), config, 64))


def accuracy(model, batches):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in batches)
    return 100 * right / sum(len(y) for _, y in batches)


def train(model, batches, test, epochs=2):
    """Train with a new order of the batches every epoch; return loss by epoch, test top-1 and seconds."""
    start, losses = time.perf_counter(), []
    groups = iso.training.parameter_groups(model, lr=5e-4, gate_lr="20x")
    optimizer = torch.optim.AdamW(groups)
    before = accuracy(model, test)
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist()
        total = 0.0
        for x, y in (batches[i] for i in order):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        losses.append(total / sum(len(y) for _, y in batches))
    return dict(loss=losses, top1_before=before, top1=accuracy(model, test), seconds=time.perf_counter() - start)


def moved(model, new):
    """Return the largest change of each kind of parameter of the edits."""
    old, changes = dict(model.named_parameters()), {}
    for name, parameter in new.named_parameters():
        if ".edit." in name:
            kind, change = name.rpartition(".")[2], float((parameter - old[name]).abs().max())
            changes[kind] = max(changes.get(kind, 0.0), change)
    return changes


def cifar(images):
    """The same network and batches, plain and edited; forms that the result file has are not run again."""
    torch.manual_seed(0)
    plain = timm.create_model("vit_small_patch16_dinov3_qkvb", **NETWORK)
    config = dict(input_size=(3, 32, 32), mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
    batches, test = loader("train", images, config), loader("test", 1000, config)
    rows = json.loads(FILE.read_text()).get("cifar", {}).get("runs", []) if FILE.exists() else []
    for name in CIFAR_FORMS:
        if any(row["form"] == name for row in rows):
            continue
        model = plain if name == "plain" else iso.recast(plain, CIFAR_FORMS[name], "blocks.*.attn")
        trained = copy.deepcopy(model)
        row = dict(form=name, **train(trained, batches, test))
        if name != "plain":
            report = iso.surgery.compare_outputs(plain, model, test[0][0][:4])
            row |= dict(deviation=report.fp64, moved=moved(model, trained))
        rows.append(row)
        print(row, flush=True)
    record("cifar", dict(network=NETWORK, images=images, epochs=2, runs=rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "cifar"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=2560)
    given = parser.parse_args()
    cost(given.rounds) if given.part == "cost" else cifar(given.images)


if __name__ == "__main__":
    main()
