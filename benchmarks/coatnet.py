"""CoAtNet-0 against timm's, configured as near to the paper as its options allow; its stages; relative attention.

    python benchmarks/coatnet.py [--device cuda] [--batches 1 8 32] [--rounds 5] [--compiled] [--name NAME]

All are interleaved in one process. Ratios are times over timm's network in the same memory format: above 1 is faster.
"Of matmul" is the share of the rate that one large matrix product reaches on this machine, in the same precision.
"""

import argparse
import copy

import timm
import torch
import torch.nn.functional as F

import isomorph as iso
from interleave import forward, interleaved, saved_mib, show, step, write
from isomorph.analysis.cost import count_macs, count_parameters
from isomorph.layers.relative.attention import attend_with_bias, expand_table

NEAREST = dict(conv_stride_mode="1x1", conv_pool_type="max2", transformer_pool_type="max2")
NEAREST |= dict(conv_attn_act_layer="gelu", head_hidden_size=0)
"""timm's options that make its coatnet_0 the paper's."""
LAST = torch.channels_last


def networks(device):
    """timm's network, ours, and ours fused: the same function but for the order of pool and norm in the head."""
    theirs = timm.create_model("coatnet_0_224", **NEAREST).to(device)
    ours = timm.create_model("coatnet_0").to(device)
    assert count_parameters(theirs) == count_parameters(ours)
    return {"timm": theirs, "ours": ours, "ours, fused": iso.fuse(ours.eval())}


def middle(batches):
    """The batch of all tables but that of inference."""
    return batches[len(batches) // 2]


def in_layouts(found):
    """timm's network in torch's own memory format too; ours lays its maps out with channels last by itself."""
    last = {
        f"{name}, channels last": copy.deepcopy(model).to(memory_format=LAST)
        for name, model in found.items()
    }
    return {"timm": found["timm"], **last}


def in_format(name, x):
    """Return images in the memory format of a contender: torch convolves in channels_last if the images are."""
    return x.contiguous(memory_format=LAST if "channels last" in name else torch.contiguous_format)


def rows_of(times, base, against="timm, channels last"):
    """One row a contender, its ratio to one of them."""
    return [
        {**base, "network": n, "ms": t, "times as fast": times[against] / t}
        for n, t in times.items()
    ]


def inference_table(device, rounds, batches):
    """coatnet_0 at 224."""
    found = {name: model.eval() for name, model in in_layouts(networks(device)).items()}
    rows = []
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=LAST)
        rows += rows_of(
            interleaved({n: forward(m, in_format(n, x)) for n, m in found.items()}, device, rounds),
            {"batch": batch},
        )
        show(f"so far, batch {batch}", rows[-len(found) :])
    return rows


def training_table(device, rounds, batches):
    """A forward and a backward pass of coatnet_0 at 224, and what it keeps for it."""
    found = in_layouts({n: m.train() for n, m in networks(device).items() if "fused" not in n})
    batch = middle(batches)
    x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=LAST)
    times = interleaved(
        {n: step(m, in_format(n, x.clone())) for n, m in found.items()}, device, rounds
    )
    kept = {n: saved_mib(m, in_format(n, x[:2].clone())) for n, m in found.items()}
    return [
        row | {"MiB an image": kept[row["network"]]} for row in rows_of(times, {"batch": batch})
    ]


def compiled_table(device, rounds, batches):
    """The same through torch.compile, channels last."""
    batch = middle(batches)
    x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=LAST)
    found = {n: m for n, m in in_layouts(networks(device)).items() if "channels last" in n}
    fast = {n: torch.compile(m.eval()) for n, m in found.items()}
    rows = rows_of(
        interleaved({n: forward(m, x) for n, m in fast.items()}, device, rounds),
        {"pass": "inference"},
    )
    slow = {
        n: torch.compile(copy.deepcopy(m).train()) for n, m in found.items() if "fused" not in n
    }
    steps = {n: step(m, x.clone(memory_format=LAST)) for n, m in slow.items()}
    return rows + rows_of(interleaved(steps, device, rounds), {"pass": "training"})


def matmul_rate(device, dtype=torch.float32):
    """GMAC a second of a large matrix product, and what autocast makes of it."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind(0)
    return size**3 / interleaved({"product": lambda: a @ b}, device, 9)["product"] / 1e6


def stage_table(device, rounds, batches):
    """Share of the rate of one large product that each stage reaches in inference."""
    batch, rate = middle(batches), matmul_rate(device)
    found = {n: m.eval() for n, m in in_layouts(networks(device)).items() if n != "timm"}
    stages = {
        name: [model.stem, *(stage for stage in model.stages if len(list(stage.children())))]
        for name, model in found.items()
    }
    calls, macs, x = {}, [], torch.randn(batch, 3, 224, 224, device=device).to(memory_format=LAST)
    for name, parts in stages.items():
        y = x
        for i, part in enumerate(parts):
            calls[name, i] = forward(part, y)
            if len(macs) == i:
                macs.append(count_macs(part, tuple(y.shape[1:])))
            y = calls[name, i]()
    times = interleaved(calls, device, rounds)
    return [
        {
            "stage": f"S{i}",
            "GMAC": macs[i] / 1e9,
            "share of MACs": macs[i] / sum(macs),
            **{f"{name}, ms": times[name, i] for name in stages},
            **{
                f"{name}, of matmul": batch * macs[i] / times[name, i] / 1e6 / rate
                for name in stages
            },
        }
        for i in range(len(macs))
    ]


def attention_table(device, rounds, batches):
    """Relative attention itself, heads of 32: in inference and with gradients, against torch's kernel on its own."""
    rows = []
    for side, heads in ((7, 24), (14, 12), (24, 12), (32, 12)):
        q, k, v = torch.randn(3, middle(batches), heads, side**2, 32, device=device).unbind(0)
        table = torch.randn(heads, 2 * side - 1, 2 * side - 1, device=device)
        bias = expand_table(table, (side, side))
        calls = {
            "no bias": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
            "ours": lambda q=q, k=k, v=v, b=bias: attend_with_bias(b, 0.0, q, k, v),
            "bias of three axes": lambda q=q, k=k, v=v, b=bias: F.scaled_dot_product_attention(
                q, k, v, attn_mask=b
            ),
            "making the bias": lambda t=table, s=side: expand_table(t, (s, s)),
        }
        with torch.no_grad():
            times = interleaved(calls, device, rounds)
        q, k, v, bias = (t.clone().requires_grad_() for t in (q, k, v, bias))
        steps = {
            "torch's kernel, step": lambda q=q, k=k, v=v, b=bias: F.scaled_dot_product_attention(
                q, k, v, b[None]
            ),
            "ours, step": lambda q=q, k=k, v=v, b=bias: attend_with_bias(b, 0.0, q, k, v),
        }
        go = torch.ones_like(q)
        times |= interleaved(
            {n: lambda f=f, go=go: f().backward(go) for n, f in steps.items()}, device, rounds
        )
        base = {"grid": f"{side} x {side}", "heads": heads, "batch": middle(batches)}
        rows.append(base | {f"{name}, ms": t for name, t in times.items()})
        rows[-1]["ours, step, times as fast"] = times["torch's kernel, step"] / times["ours, step"]
    return rows


TABLES = {
    "Inference of coatnet_0 at 224": inference_table,
    "Training step of coatnet_0 at 224": training_table,
    "Stages in inference": stage_table,
    "Relative attention": attention_table,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compiled", action="store_true", help="compile the networks too, which takes minutes"
    )
    parser.add_argument("--name", help="of the JSON file in results")
    options = parser.parse_args()
    torch.manual_seed(0)
    device, found = torch.device(options.device), {}
    tables = TABLES | ({"Compiled, channels last": compiled_table} if options.compiled else {})
    for title, table in tables.items():
        found[title] = table(device, options.rounds, options.batches)
        show(title, found[title])
    print(f"\nwrote {write(options.name or f'coatnet_{options.device}', found)}")


if __name__ == "__main__":
    main()
