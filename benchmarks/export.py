"""Export of every family: deviation of the exported file from the model, and its speed next to eager PyTorch.

    python benchmarks/export.py                 # all families, results/export.json
    python benchmarks/export.py convit coatnet  # these families only; the rows of the others stay
    python benchmarks/export.py --table         # the table of docs/guides/ship.md, from results/export.json

Weights are random. Deviations are the largest over three shapes; the table has them relative to the largest output,
which is 1e15 for an untrained MobileOne. Times are medians of interleaved passes of the fused
model and the exported one in one process, on one thread, in milliseconds per batch.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import nn

import isomorph as iso
from interleave import RESULTS, forward, interleaved, show, write

BATCHES, ROUNDS = (1, 8), 7
EXPORTS = (("onnx", "batch"), ("onnx", "batch,size"), ("pt2", "batch,size"))


def recast(name: str, rule: iso.Rule, where: str, **arguments: object) -> nn.Module:
    """A timm model, recast."""
    return iso.recast(timm.create_model(name, **arguments), rule, where)


FAMILIES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "cifar_resnet": ("cifar_resnet20", lambda: timm.create_model("cifar_resnet20")),
    "t_cifar_resnet": ("t_cifar_resnet20", lambda: timm.create_model("t_cifar_resnet20")),
    "convit": ("convit_ti", lambda: timm.create_model("convit_ti")),
    "tdrl": ("tdrl_vit_ti, fused", lambda: timm.create_model("tdrl_vit_ti")),
    "refined": ("refined_vit_s", lambda: timm.create_model("refined_vit_s")),
    "refined_released": (
        "refined_vit_s_released",
        lambda: timm.create_model("refined_vit_s_released"),
    ),
    "recast_cnn": (
        "resnet18, ConvToGPSA",
        lambda: recast("resnet18", iso.ConvToGPSA("exact"), "layer4.*.conv2"),
    ),
    "recast_vit": (
        "deit_tiny, AttentionToGPSA",
        lambda: recast(
            "deit_tiny_patch16_224",
            iso.AttentionToGPSA(),
            "blocks.[0-3].attn",
            dynamic_img_size=True,
        ),
    ),
    "recast_fixed_vit": (
        "deit_tiny of one size, AttentionToRefined",
        lambda: recast(
            "deit_tiny_patch16_224", iso.AttentionToRefined(ratio=2), "blocks.[89].attn"
        ),
    ),
    "t_resnet": ("t_resnet50d", lambda: timm.create_model("t_resnet50d")),
    "coatnet": ("coatnet_0", lambda: timm.create_model("coatnet_0")),
    "mobileone": ("mobileone_s0, fused", lambda: timm.create_model("mobileone_s0")),
}


def measure(name: str, model: nn.Module, path: Path, dynamic: str) -> dict[str, object]:
    """One row: the export's deviation and size, and the times of both forms."""
    row: dict[str, object] = {"model": name, "format": path.suffix[1:], "dynamic": dynamic}
    start = time.perf_counter()
    try:
        report = iso.export(model, path, dynamic=dynamic, overwrite=True)
    except iso.UserError as problem:
        return {**row, "problem": str(problem).splitlines()[0]}
    row["export_seconds"] = round(time.perf_counter() - start, 1)
    row["float32"], row["float64"] = report.deviation.fp32, report.deviation.fp64
    row["max_output"] = max(shape.scale for shape in report.deviation.inputs)
    row["megabytes"] = round(report.megabytes, 1)
    artefact, eager = iso.deployment.open_artefact(path), iso.fuse(model)
    for batch in BATCHES:
        images = torch.randn(batch, *artefact.metadata["input_size"])
        forms = {"eager": forward(eager, images), "exported": forward(artefact, images)}
        times = interleaved(forms, torch.device("cpu"), rounds=ROUNDS)
        row |= {f"{form}_ms_{batch}": round(times[form], 1) for form in times}
        row[f"speedup_{batch}"] = round(times["eager"] / times["exported"], 2)
    return row


def print_table(rows: list[dict[str, object]]) -> None:
    """Print the rows as the guide shows them."""
    heads = (
        "model",
        "ONNX: float32",
        "MB",
        "batch 1",
        "batch 8",
        "`.pt2`: float32",
        "batch 1",
        "batch 8",
    )
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    forms = {}  # of a format's rows that of one size, which is the fastest
    for row in rows:
        if "problem" not in row:
            forms.setdefault((row["model"], row["format"]), row)
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = [f"`{model}`"]
        for form in ("onnx", "pt2"):
            row = forms[model, form]
            cells += [f"{row['float32'] / row['max_output']:.1e}"]
            cells += [f"{row['megabytes']:.1f}"] * (form == "onnx")
            cells += [f"{row[f'speedup_{n}']:.2f}x" for n in BATCHES]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Measure the families asked for, writing after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help=", ".join(FAMILIES))
    parser.add_argument("--table", action="store_true", help="print the table of the guide")
    arguments = parser.parse_args()
    chosen = arguments.families or list(FAMILIES)
    torch.set_num_threads(1)
    result = RESULTS / "export.json"
    rows = json.loads(result.read_text())["exports"] if result.exists() else []
    if arguments.table:
        print_table(rows)
        return
    for family in chosen:
        name, build = FAMILIES[family]
        torch.manual_seed(0)
        model = build().eval()
        with tempfile.TemporaryDirectory() as folder:
            new = [
                measure(name, model, Path(folder) / f"m.{kind}", dynamic)
                for kind, dynamic in EXPORTS
            ]
            if "problem" in new[-1]:
                new.append(measure(name, model, Path(folder) / "m.pt2", "batch"))
        rows = [row for row in rows if row["model"] != name] + new
        names = [title for title, _ in FAMILIES.values()]
        rows.sort(key=lambda row: names.index(row["model"]))
        show(name, [{key: row.get(key, "") for key in new[-1] | new[0]} for row in new])
        write("export", {"exports": rows})


if __name__ == "__main__":
    main()
