"""Pruned gated attention against the whole layers, plain attention and convolutions.

    python benchmarks/prune.py [--device cuda] [--rounds 7] [--name NAME] [--only layers|networks|trained]

With `--only`, the tables of the other groups stay in the result file. Times of one table are interleaved in one
process. "trained" needs ISOMORPH_DATA with cifar10 and weights: it fine-tunes a T-CNN for some minutes on real images,
prunes it at several tolerances, and measures top-1 on the test images.
"""

import argparse
import copy

import timm
import torch
from timm.layers import Attention

import isomorph as iso
from interleave import forward, interleaved, saved_mib, show, step, update
from isomorph.data.sources import spaced_images
from isomorph.evaluation import count_macs, count_parameters
from isomorph.layers import GPSA, GPSA2d
from isomorph.layers.prune_heads import prune_heads

MAPS = [(64, (8, 8), 64), (512, (7, 7), 16), (512, (14, 14), 8), (256, (14, 14), 8), (128, (28, 28), 4)]
TOKENS = [(4, 192, (14, 14)), (9, 432, (14, 14)), (4, 192, (24, 24))]
WEIGHTS: list[str] = []
IMAGES = [10_000]
TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.1)


def versions(layer):
    """The whole layer, and the layer with half and all of its heads position-only."""
    heads = layer.num_heads
    half = prune_heads(layer, "pb" * (heads // 2) + "p" * (heads % 2))
    return {"0%": layer, "50%": half, "100%": prune_heads(layer, "p" * heads)}


def contest(layers, x, device, rounds, rival):
    """Inference and training step in milliseconds, both relative to the rival, and saved MiB of one image."""
    run = interleaved({name: forward(layer, x) for name, layer in layers.items()}, device, rounds)
    train = interleaved({name: step(layer, x) for name, layer in layers.items()}, device, rounds)
    rows = []
    for name, layer in layers.items():
        times = {"forward ms": run[name], "forward / rival": run[name] / run[rival]}
        times |= {"step ms": train[name], "step / rival": train[name] / train[rival]}
        rows.append({"heads pruned": name} | times | {"saved MiB": saved_mib(layer, x)})
    return rows


def map_table(device, rounds):
    """GPSA2d beside its convolution."""
    rows = []
    for channels, (H, W), batch in MAPS:
        conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(device)
        whole = iso.ConvToGPSA(locality=3.0, gate=1.0).build(conv).to(device)
        x = torch.randn(batch, channels, H, W, device=device)
        layers = {**versions(whole), "convolution": conv}
        shape = {"map": f"{H}x{W}/{channels}", "batch": batch}
        rows += [shape | row for row in contest(layers, x, device, rounds, "convolution")]
    return rows


def token_table(device, rounds):
    """GPSA beside plain attention."""
    rows = []
    for heads, width, (H, W) in TOKENS:
        whole, x = GPSA(width, heads, (H, W)).to(device), torch.randn(8, H * W, width, device=device)
        layers = {**versions(whole), "attention": Attention(width, heads).to(device)}
        shape = {"heads x width": f"{heads} x {width}", "grid": f"{H}x{W}", "batch": 8}
        rows += [shape | row for row in contest(layers, x, device, rounds, "attention")]
    return rows


def with_gates(model, gates):
    """A copy of a model whose layers have these gates, repeated over the heads."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, GPSA | GPSA2d):
            count = layer.num_heads
            layer.gate.data.copy_(torch.tensor((gates * count)[:count]))
    return model


def networks(device):
    """T-CNNs with closed gates and soft taps beside their CNNs, ConViTs beside a DeiT of their width."""
    for name, where, batch in (("cifar_resnet20", "layer3.*.conv?", 32), ("resnet50", "layer4.*.conv2", 2)):
        cnn = timm.create_model(name).eval().to(device)
        tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=3.0, gate=6.0), where)
        yield name, batch, {"0%": tcnn, "100%": iso.prune(tcnn, 0.01), "rival": cnn}
    for name, heads, width in (("convit_ti", 4, 192), ("convit_s", 9, 432)):
        whole = timm.create_model(name).eval().to(device)
        rival = timm.models.VisionTransformer(embed_dim=width, depth=12, num_heads=heads).eval().to(device)
        half, closed = (iso.prune(with_gates(whole, gates), 0.01) for gates in ([9.0, 0.0], [9.0]))
        models = {"0%": whole, "50%": half, "100%": closed, "rival": rival}
        yield from ((name, batch, models) for batch in (2, 8))


def network_table(device, rounds):
    rows = []
    for name, batch, models in networks(device):
        size = models["rival"].pretrained_cfg["input_size"] if hasattr(models["rival"], "pretrained_cfg") else None
        size = size or (3, 224, 224)
        x = torch.randn(batch, *size, device=device)
        run = interleaved({key: forward(model, x) for key, model in models.items()}, device, rounds)
        train = interleaved({key: step(model, x) for key, model in models.items()}, device, max(rounds // 2, 2))
        for key, model in models.items():
            times = {"forward ms": run[key], "forward / rival": run[key] / run["rival"]}
            times |= {"step ms": train[key], "step / rival": train[key] / train["rival"]}
            cost = {"M parameters": count_parameters(model) / 1e6, "G MACs": count_macs(model, size) / 1e9}
            rows.append({"network": name, "batch": batch, "heads pruned": key} | times | cost)
    return rows


def trained_table(device, rounds):
    """A T-CNN fine-tuned on real images and pruned: heads removed, top-1 on all test images, deviation and speed."""
    cnn = timm.create_model("cifar_resnet20", pretrained=True).eval()
    if WEIGHTS:
        tcnn = iso.load(WEIGHTS[0])
    else:
        tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=5.0, gate=6.0), "layer3.*.conv?")
        fine_tune(tcnn)
    tcnn.eval()
    source = spaced_images(iso.data.open_source("cifar10", "test"), IMAGES[0])
    loader = iso.data.eval_loader(source, timm.data.resolve_data_config(model=cnn), 200)
    images = next(iter(loader))[0]
    gates = torch.cat([*iso.gates(tcnn).values()])
    print(f"gates after fine-tuning: {gates.min():.4f} to {gates.max():.4f}, median {gates.median():.4f}")
    models = {"CNN": cnn, "whole": tcnn}
    for tolerance in TOLERANCES:
        if iso.surgery.prunable_heads(tcnn, tolerance):
            models[f"{tolerance:g}"] = iso.prune(tcnn, tolerance)
    run = interleaved({key: forward(model, images) for key, model in models.items()}, device, rounds)
    rows = []
    for key, model in models.items():
        pruned = len(iso.surgery.prunable_heads(tcnn, float(key))) if key[0] == "0" else 0
        other = tcnn if key[0] == "0" else model
        (difference,) = iso.surgery.compare_outputs(other, model, images[:100]).inputs
        layers = sum(type(part).__name__ == "PositionalConv2d" for part in model.modules())
        rows.append(
            {"tolerance": key, "heads pruned": pruned, "layers without content": layers}
            | {"top-1": iso.evaluate(model, loader)["top1"], "max |diff| of logits": f"{difference.fp32:.1e}"}
            | {"relative to the largest": f"{difference.fp32 / difference.scale:.1e}"}
            | {"forward / CNN": run[key] / run["CNN"], "parameters": count_parameters(model)}
        )
    return rows


def fine_tune(model, epochs=2, images=10_000):
    """Some epochs of AdamW on real training images, with rates of their own for gates and positions."""
    config = timm.data.resolve_data_config(model=model)
    source = spaced_images(iso.data.open_source("cifar10", "train"), images)
    x, y = (torch.cat(part) for part in zip(*iso.data.eval_loader(source, config, 500), strict=True))
    optimizer = torch.optim.AdamW(iso.training.parameter_groups(model, lr=5e-4, gate_lr="100x", position_lr="20x"))
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=epochs * len(x) // 128 + epochs)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            flipped = x[batch].flip(-1) if torch.rand(()) < 0.5 else x[batch]
            torch.nn.functional.cross_entropy(model(flipped), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


TABLES = {
    "layers": {"GPSA2d beside its convolution": map_table, "GPSA beside plain attention": token_table},
    "networks": {"Whole networks": network_table},
    "trained": {"A T-CNN fine-tuned on CIFAR-10, then pruned": trained_table},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds behind each median")
    parser.add_argument("--name", default="prune", help="of the JSON file in results")
    parser.add_argument("--weights", help="a T-CNN trained on CIFAR-10, instead of fine-tuning one")
    parser.add_argument("--images", type=int, default=10_000, help="test images of the trained T-CNN")
    parser.add_argument("--only", choices=list(TABLES), help="one group of tables")
    options = parser.parse_args()
    torch.manual_seed(0)
    WEIGHTS[:] = filter(None, [options.weights])
    IMAGES[0] = options.images
    found = {}
    for group, tables in TABLES.items():
        for title, table in tables.items():
            if options.only in (None, group):
                found[title] = table(torch.device(options.device), options.rounds)
                show(title, found[title])
    print(f"\nwrote {update(options.name, found)}")


if __name__ == "__main__":
    main()
