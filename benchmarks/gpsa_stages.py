"""Gated attention in every stage of a CNN: each form of content against the convolution, and whole networks.

    python benchmarks/gpsa_stages.py [--device cuda] [--rounds 5] [--only TABLE]

Ratios are times relative to the convolution, interleaved in one process. TABLE is stages, networks, memory,
training or naive; the other tables stay in the result file. "memory" counts what autograd keeps, and
allocates no GPU memory.
"""

import argparse
import resource
import time

import timm
import torch
from torch import nn

import isomorph as iso
from interleave import (
    forward,
    interleaved,
    processor,
    saved_mib,
    show,
    step,
    synchronize,
    update,
)
from isomorph.lab.evaluation import saved_bytes
from naive import NaiveGPSA2d

STAGES = {  # channels in and out, side of the map, kernel, stride, groups, batch
    "stem 7x7, 112": (3, 64, 224, 7, 2, 1, 4),
    "56": (64, 64, 56, 3, 1, 1, 8),
    "28": (128, 128, 28, 3, 1, 1, 8),
    "14": (256, 256, 14, 3, 1, 1, 8),
    "7": (512, 512, 7, 3, 1, 1, 8),
    "depthwise 7x7, 28": (192, 192, 28, 7, 1, 192, 4),
    "groups of 4, 28": (128, 128, 28, 3, 1, 32, 4),
}
FORMS = {
    "positions": dict(content="none"),
    "window": dict(content="window"),
    "global": dict(content="global"),
}
STARTS = {
    "exact": {},
    "soft (5, 6)": dict(locality=5.0, gate=6.0),
    "paper (1, 1)": dict(locality=1.0, gate=1.0),
}
MAX_GLOBAL = 28 * 28
"""Most queries for which the global form is measured: at 56 x 56 its training step keeps gigabytes."""
IMAGES = 32
"""Images of the training step whose memory is counted."""


def convolution(stage):
    """The convolution of a stage and its input."""
    channels, out, side, kernel, stride, groups, batch = STAGES[stage]
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return conv, torch.randn(batch, channels, side, side)


def rule(form, start):
    """The rule of a form: positions only have no gate."""
    fields = FORMS[form] | STARTS[start]
    return iso.ConvToGPSA(
        **{k: v for k, v in fields.items() if not (form == "positions" and k == "gate")}
    )


def stage_table(device, rounds):
    """Forward, step and saved memory of every form by stage, from the exact and from a soft start."""
    rows = []
    for stage in STAGES:
        conv, x = convolution(stage)
        conv, x = conv.to(device), x.to(device)
        layers = {("convolution", ""): conv}
        for form in FORMS:
            if form == "global" and conv(x).shape[-1] ** 2 > MAX_GLOBAL:
                continue
            for start in STARTS if form == "positions" else ("exact",):
                layers[form, start] = rule(form, start).build(iso.surgery.Site(conv)).to(device)
        run = interleaved(
            {key: forward(layer.eval(), x) for key, layer in layers.items()}, device, rounds
        )
        train = interleaved(
            {key: step(layer.train(), x) for key, layer in layers.items()},
            device,
            max(rounds // 2, 3),
        )
        for key, layer in layers.items():
            row = {"stage": stage, "batch": len(x), "form": key[0], "start": key[1]}
            row |= {
                "forward ms": run[key],
                "forward / convolution": run[key] / run["convolution", ""],
            }
            row |= {
                "step ms": train[key],
                "step / convolution": train[key] / train["convolution", ""],
            }
            rows.append(row | {"saved MiB": saved_mib(layer, x)})
    return rows


def odd_square(name, module):
    """All convolutions of a network but the 1x1 ones, which have no neighbours to attend to."""
    return isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1


def recast_whole(cnn, form, start="exact"):
    return iso.recast(cnn, rule(form, start), odd_square)


def network_table(device, rounds):
    """Inference of whole networks at 224 x 224, every odd-square convolution recast, and the largest deviation."""
    rows = []
    for name in ("resnet50", "resnet18", "resnext50_32x4d", "regnety_016", "efficientnet_b0"):
        torch.manual_seed(0)
        cnn = timm.create_model(name).eval().to(device)
        x = torch.randn(8, 3, 224, 224, device=device)
        forms = ("positions", "window") if name.startswith("resnet") else ("positions",)
        models = {form: recast_whole(cnn, form) for form in forms}
        if name == "resnet50":
            models["positions, soft (5, 6)"] = recast_whole(cnn, "positions", "soft (5, 6)")
        run = interleaved(
            {k: forward(m, x) for k, m in ({"CNN": cnn} | models).items()}, device, rounds
        )
        expected = cnn(x)
        for form, model in models.items():
            layers = sum(hasattr(module, "centre") for module in model.modules())
            deviation = ((model(x) - expected).abs().max() / expected.abs().max()).item()
            row = {
                "network": name,
                "layers": layers,
                "batch": len(x),
                "form": form,
                "ms": run[form],
            }
            rows.append(
                row | {"time / CNN": run[form] / run["CNN"], "deviation": f"{deviation:.0e}"}
            )
    return rows


def memory_table(device, rounds):
    """Memory that a training step of a ResNet-50 keeps at 224 x 224, from one image."""
    cnn = timm.create_model("resnet50").to(device)
    models = {"CNN": cnn} | {form: recast_whole(cnn, form) for form in ("positions", "window")}
    rows = []
    for form, model in models.items():
        kept = saved_bytes(model, (3, 224, 224), 2)
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        whole = IMAGES * kept + 4 * weights  # weights, gradients and two moments of AdamW
        row = {"network": "resnet50", "form": form, "saved MiB an image": kept / 2**20}
        rows.append(
            row
            | {"M parameters": weights / 4e6, f"GiB at batch {IMAGES}, with AdamW": whole / 2**30}
        )
    return rows


def training_table(device, rounds):
    """One training step of a whole ResNet-50 with windows, 32 images of 224 x 224, and the memory of the process.

    The memory is the peak of the process: of this table alone with `--only training`, else of earlier tables too.
    """
    model = recast_whole(timm.create_model("resnet50"), "window").to(device)
    x, optimizer = (
        torch.randn(IMAGES, 3, 224, 224, device=device),
        torch.optim.AdamW(model.parameters()),
    )
    for _ in range(2):  # the second is timed
        synchronize(device)
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        synchronize(device)
    row = {
        "network": "resnet50",
        "form": "window",
        "batch": IMAGES,
        "seconds": time.perf_counter() - began,
    }
    if device.type == "cpu":  # ru_maxrss is in KiB
        return [
            row
            | {
                "GiB of the process at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                / 2**20
            }
        ]
    return [row | {"GiB at most": torch.cuda.max_memory_allocated(device) / 2**30}]


def naive_table(device, rounds):
    """Each form against the naive layer, which computes global attention and forms every map; soft heads, open gates.

    Windows compute another function than the naive layer; they are what one uses instead.
    """
    rows = []
    for stage in ("28", "14", "7"):
        conv, x = convolution(stage)
        x = x[:2].to(device)
        layers = {
            form: rule(form, "paper (1, 1)").build(iso.surgery.Site(conv.to(device)))
            for form in FORMS
        }
        layers["naive"] = NaiveGPSA2d(layers["global"])
        run = interleaved(
            {form: forward(layer.eval(), x) for form, layer in layers.items()}, device, rounds
        )
        train = interleaved(
            {form: step(layer.train(), x) for form, layer in layers.items()},
            device,
            max(rounds // 2, 3),
        )
        for form, layer in layers.items():
            row = {
                "stage": stage,
                "batch": len(x),
                "form": form,
                "naive / forward": run["naive"] / run[form],
            }
            rows.append(
                row
                | {"naive / step": train["naive"] / train[form], "saved MiB": saved_mib(layer, x)}
            )
    return rows


TABLES = {
    "naive": naive_table,
    "stages": stage_table,
    "networks": network_table,
    "memory": memory_table,
    "training": training_table,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds behind each median"
    )
    parser.add_argument("--only", choices=list(TABLES))
    parser.add_argument("--name", default="gpsa_stages", help="of the JSON file in results")
    options = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for title in [options.only] if options.only else TABLES:
        found[title] = TABLES[title](torch.device(options.device), options.rounds)
        show(title, found[title])
    print(f"\n{processor()}: wrote {update(options.name, found)}")


if __name__ == "__main__":
    main()
