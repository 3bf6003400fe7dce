"""ViT-Ti with pyramids (P-W2S on q, k, v and the MLP) in closed form, branch by branch, and plain.

    python benchmarks/tdrl.py [--device cuda] [--batches 32 128] [--rounds 5] [--tables training] [--name NAME]
    OMP_NUM_THREADS=1 python benchmarks/tdrl.py --tables blocks  # three blocks, also on a busy machine
    OMP_NUM_THREADS=1 python benchmarks/tdrl.py --tables convolutions --name tdrl_cpu_1thread

All are interleaved in one process, on the same weights where they compute the same, with freed memory kept as in
isomorph's commands (`iso.keep_freed_memory`). Ratios are times over the plain
ViT's: 1 is as fast, more is slower. MiB are kept for the backward pass, for each image and in addition for any batch.
"""

import argparse
import re
from functools import partial

import timm
import torch
from torch._inductor.utils import run_and_get_code

import isomorph as iso
from interleave import (
    compiled,
    forward,
    graphed,
    interleaved,
    memory_mib,
    saved_mib,
    show,
    step,
    update,
)
from isomorph.lab.training.objectives.masked import GenericDistillationLoss
from isomorph.models.masked_autoencoder import MaskedAutoencoder
from naive import branch_by_branch
from tdrl_networks import build

MEMORY_MIB = 12 * 1024
"""A training step that would keep more than this is left out on a CPU."""

PARTS = {
    "q, k, v": dict(where=["blocks.*.attn.qkv"]),
    "q, k, v and fc1": dict(where=["blocks.*.attn.qkv", "blocks.*.mlp.fc1"]),
    "MLP": dict(where=["blocks.*.mlp.fc?"]),
    "MLP, P-W1S (Table 9)": dict(where=["blocks.*.mlp.fc?"], layout="P-W1S"),
    "MLP, R-D2W1S (Table 10)": dict(where=["blocks.*.mlp.fc?"], layout="R-D2W1S"),
    "MLP, naive-W8 (Table 10)": dict(where=["blocks.*.mlp.fc?"], layout="naive-W8"),
}


def kept(model, device):
    """MiB kept for the backward pass: an image, and whatever the batch."""
    few, more = (n * saved_mib(model, torch.randn(n, 3, 224, 224, device=device)) for n in (2, 6))
    image = (more - few) / 4
    return image, few - 2 * image


def training_table(device, rounds, batches):
    """One training step and its memory, one row a batch size."""
    plain = timm.create_model("tdrl_vit_ti", layout="plain").to(device)
    closed = timm.create_model("tdrl_vit_ti").to(device)
    forms = {"plain": plain, "closed": closed, "branches": branch_by_branch(closed)}
    memory = {name: kept(model, device) for name, model in forms.items()}
    rows = []
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device=device)
        turns = max(2, rounds * 32 // batch) if device.type == "cpu" else rounds
        fits = {
            n: m for n, m in forms.items() if batch * memory[n][0] < memory_mib(device, MEMORY_MIB)
        }
        times = interleaved({name: step(model, x) for name, model in fits.items()}, device, turns)
        rows.append(
            {
                "batch": batch,
                "rounds": turns,
                "plain ms": times["plain"],
                "closed form": times["closed"] / times["plain"],
                "branches": times["branches"] / times["plain"]
                if "branches" in times
                else "no memory",
                **{f"{name} MiB an image": memory[name][0] for name in forms},
                **{f"{name} MiB constant": memory[name][1] for name in ("closed", "branches")},
            }
        )
        show(f"so far, batch {batch}", rows[-1:])
    return rows


def step_table(device, rounds, batches, depth=12, name="closed form", prepare=None, capture=False):
    """One training step of both layouts: as it is, of models that `prepare` returns, or as a CUDA graph."""
    layouts = {"plain": "plain", name: "P-W2S"}
    forms = {
        key: timm.create_model("tdrl_vit_ti", depth=depth, layout=layout)
        for key, layout in layouts.items()
    }
    forms = {key: model.to(device) for key, model in forms.items()}
    forms = {key: prepare(model, device) for key, model in forms.items()} if prepare else forms
    rows = []
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device=device)
        runs = {key: step(model, x) for key, model in forms.items()}
        runs = {key: graphed(run, device) for key, run in runs.items()} if capture else runs
        times = interleaved(runs, device, rounds)
        rows.append(
            {
                "batch": batch,
                "rounds": rounds,
                "plain ms": times["plain"],
                name: times[name] / times["plain"],
            }
        )
        show(f"so far, batch {batch}", rows[-1:])
    return rows


def compiled_table(device, rounds, batches):
    """One training step of three compiled blocks, largest batch."""
    return step_table(device, rounds, batches[-1:], depth=3, prepare=compiled)


def calls_table(device, rounds, batches):
    """Kernels and products that Inductor's code calls for one block, forward and backward."""
    rows = []
    for name, layout in {"plain": "plain", "closed form": "P-W2S"}.items():
        block = timm.create_model("tdrl_vit_ti", depth=1, layout=layout).blocks[0].to(device)
        x = torch.randn(2, 197, 192, device=device, requires_grad=True)
        _, codes = run_and_get_code(step(torch.compile(block), x))
        bodies = [code[code.index("def call(") :] for code in codes]
        calls = [
            len(re.findall(r"\b(?:cpp_fused|triton_|extern_kernels\.|torch\.ops\.)[\w.]*\(", b))
            for b in bodies
        ]
        rows.append({"block": name, "forward": calls[0], "backward": calls[1], "calls": sum(calls)})
    return rows


def pretraining_table(device, rounds, batches):
    """One step of generic distillation (G2SD) from MAE's ViT-B, on a quarter of the student's tokens."""
    forms = {}
    for name, layout in {"plain": "plain", "closed form": "P-W2S"}.items():
        student = MaskedAutoencoder(
            timm.create_model("tdrl_vit_ti", layout=layout), depth=4, width=128, heads=4
        )
        teacher = MaskedAutoencoder(timm.create_model("vit_base_patch16_224"))
        forms[name] = GenericDistillationLoss(student.to(device), teacher.to(device), device)
    rows = []
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device=device)
        noise = torch.rand(batch, 196, device=device)
        runs = {name: partial(distil, loss, x, noise) for name, loss in forms.items()}
        runs |= {f"{name} graph": graphed(run, device) for name, run in runs.items()}
        times = interleaved(runs, device, rounds)
        row = {"batch": batch, "rounds": rounds, "plain ms": times["plain"]}
        row |= {
            "closed form": times["closed form"] / times["plain"],
            "plain, CUDA graph ms": times["plain graph"],
        }
        rows.append(
            row | {"closed form, CUDA graph": times["closed form graph"] / times["plain graph"]}
        )
        show(f"so far, batch {batch}", rows[-1:])
    return rows


def distil(loss, images, noise):
    loss.trainable_module.zero_grad()
    loss.loss(loss.trainable_module, images, noise)[0].backward()


def convolutions_table(network, batch, size, device, rounds, batches):
    """One training step of a CNN with pyramids, with RepVGG's or MobileOne's branches, and with neither."""
    x = torch.randn(batch, 3, size, size, device=device)
    names = {"plain": "plain", "repvgg": "repvgg", "all": "P-W2S"}
    forms = {name: build(network, form, size).to(device) for name, form in names.items()}
    if size == 32:
        forms["branches"] = branch_by_branch(forms["all"])
    times = interleaved({name: step(model, x) for name, model in forms.items()}, device, rounds)
    return [
        {
            "batch": batch,
            "form": name,
            "parameters, M": sum(p.numel() for p in model.parameters()) / 1e6,
            "step, ms": times[name],
            "times plain": times[name] / times["plain"],
            "MiB an image": saved_mib(model, x),
        }
        for name, model in forms.items()
    ]


def parts_table(device, rounds, batches):
    """Where the time goes: a training step with pyramids in some of the layers only, smallest batch."""
    x = torch.randn(min(batches), 3, 224, 224, device=device)
    forms = {"plain": timm.create_model("tdrl_vit_ti", layout="plain")}
    forms |= {name: timm.create_model("tdrl_vit_ti", **kwargs) for name, kwargs in PARTS.items()}
    times = interleaved(
        {n: step(m.to(device), x) for n, m in forms.items()}, device, max(3, rounds - 2)
    )
    return [
        {
            "pyramids in": name,
            "parameters, M": sum(p.numel() for p in forms[name].parameters()) / 1e6,
            "step, times plain": times[name] / times["plain"],
        }
        for name in PARTS
    ]


def inference_table(device, rounds, batches):
    """The fused network against the plain one."""
    plain = timm.create_model("tdrl_vit_ti", layout="plain").to(device).eval()
    fused = iso.fuse(timm.create_model("tdrl_vit_ti").to(device).eval())
    rows = []
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device=device)
        times = interleaved(
            {"plain": forward(plain, x), "fused": forward(fused, x)}, device, 3 * rounds
        )
        rows.append(
            {
                "batch": batch,
                "plain ms": times["plain"],
                "fused, times plain": times["fused"] / times["plain"],
            }
        )
    return rows


TABLES = {
    "Training step; times are multiples of the plain ViT's": training_table,
    "CUDA graph: training step; times are multiples of the plain ViT's": partial(
        step_table, capture=True
    ),
    "Compiled: training step of three blocks": compiled_table,
    "Calls of a compiled block": calls_table,
    "Pre-training: generic distillation": pretraining_table,
    "Blocks: training step of three blocks": partial(step_table, depth=3, name="closed"),
    "Convolutions: training step of ResNet-20 at 32 px": partial(
        convolutions_table, "cifar_resnet20", 128, 32
    ),
    "Convolutions: training step of MobileOne-S0 at 32 px": partial(
        convolutions_table, "mobileone_s0", 128, 32
    ),
    "Convolutions: training step of MobileOne-S0 at 224 px": partial(
        convolutions_table, "mobileone_s0", 32, 224
    ),
    "By part": parts_table,
    "Inference": inference_table,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds at batch 32; fewer above on a CPU"
    )
    parser.add_argument(
        "--tables", nargs="+", default=[""], help="beginnings of their titles; by default all"
    )
    parser.add_argument("--name", help="of the JSON file in results")
    options = parser.parse_args()
    iso.keep_freed_memory()
    torch.manual_seed(0)
    device, found = torch.device(options.device), {}
    chosen = tuple(name.lower() for name in options.tables)
    tables = {title: table for title, table in TABLES.items() if title.lower().startswith(chosen)}
    if not tables:
        parser.error(
            f"no table begins with {' or '.join(options.tables)}; choose from: {'; '.join(TABLES)}"
        )
    for title, table in tables.items():
        found[title] = table(device, options.rounds, options.batches)
        show(title, found[title])
    print(f"\nwrote {update(options.name or f'tdrl_{options.device}', found)}")


if __name__ == "__main__":
    main()
