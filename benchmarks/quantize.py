"""Int8 against float32 on CIFAR-10, for networks with fused branches and others: tables of docs/guides/quantise.md.

    python benchmarks/quantize.py [--images 4000] [--calibration 256] [--out runs/quantize] [--only vit]

Needs ISOMORPH_DATA with cifar10 and weights. Networks that are not trained yet are trained first (quantize_models.py).
Every finished row is stored in the folder, so that a second call only completes the tables.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import isomorph as iso
from interleave import RESULTS, show, write
from isomorph.lab.evaluation.model_data import sample_images
from isomorph.models.input_sizes import evaluation_config
from quantize_models import trained

FORMS: dict[str, dict[str, Any]] = {
    "int8": {},
    "weights only": dict(weights_only=True),
}
"""Arguments of `iso.quantize` by form; "int8" is the default."""
NETWORKS = ("cnn", "tcnn", "mobileone_pyramids", "vit_pyramids")
SLOW = ("tcnn",)
"""Networks that are tested on half of the images."""
Row = dict[str, Any]


def images(
    model: nn.Module, calibration: int, test: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of calibration and test images."""
    config = evaluation_config(model)
    train = sample_images(iso.data.open_source("cifar10", "train"), calibration)
    held_out = sample_images(iso.data.open_source("cifar10", "test"), test)
    return iso.data.eval_loader(train, config, 64), iso.data.eval_loader(held_out, config, 100)


def measure(name: str, form: str, options: argparse.Namespace) -> Row:
    """Return the accuracy of a network in a form, and for a quantised one its size, speed and noise."""
    model = trained(name, options.out)
    count = tested(name, options)
    calibration, test = images(model, options.calibration, count)
    row: Row = dict(network=name, form=form, images=count, calibration=options.calibration)
    if form == "float":
        return row | dict(top1=round(iso.evaluate(model, test)["top1"], 2))
    path = options.out / f"{name} {form}.onnx"
    report = iso.quantize(model, calibration, path, overwrite=True, **FORMS[form])
    row |= {key: value for key, value in report.as_dict().items() if key not in ("path", "images")}
    return row | dict(top1=round(iso.evaluate(iso.deployment.open_artefact(path), test)["top1"], 2))


def tested(name: str, options: argparse.Namespace) -> int:
    """Return the number of test images of a network."""
    return options.images // 2 if name in SLOW else options.images


def complete(options: argparse.Namespace) -> list[Row]:
    """Measure what is not stored yet, and return all rows."""
    store = options.out / "quantize.jsonl"
    rows = [json.loads(line) for line in store.read_text().splitlines()] if store.is_file() else []
    fields = ("network", "form", "images", "calibration")
    done = {tuple(row[key] for key in fields) for row in rows}
    for name in NETWORKS:
        for form in ("float", *FORMS) if options.only in name else ():
            if (name, form, tested(name, options), options.calibration) in done:
                continue
            rows.append(measure(name, form, options))
            with store.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"  {name}, {form}: {rows[-1]['top1']}", flush=True)
    return [
        row
        for row in rows
        if row["images"] == tested(row["network"], options)
        and row["calibration"] == options.calibration
    ]


def accuracy_table(rows: list[Row]) -> list[Row]:
    """Return top-1 of every network in every form, with size and speed of the default one."""
    found = {(row["network"], row["form"]): row for row in rows}
    table = []
    for name in dict.fromkeys(row["network"] for row in rows):
        tops = {form: found[name, form]["top1"] for form in ("float", *FORMS)}
        best, small = found[name, "int8"], found[name, "weights only"]
        table.append(
            {
                "network": name,
                "images": best["images"],
                **tops,
                "float - int8": round(tops["float"] - tops["int8"], 2),
                "MB float": round(best["float_megabytes"], 2),
                "MB int8": round(best["megabytes"], 2),
                "MB weights only": round(small["megabytes"], 2),
                "speed of int8 / float": round(
                    best["images_per_second"] / best["float_images_per_second"], 2
                ),
                "speed of weights only / float": round(
                    small["images_per_second"] / small["float_images_per_second"], 2
                ),
                "output dB": round(best["output_sqnr"], 1),
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=4000, help="random test images")
    parser.add_argument("--calibration", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("runs/quantize"))
    parser.add_argument(
        "--only", default="", help="measure networks whose name contains this, and write no tables"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = complete(options)
    if options.only:
        return
    accuracy = accuracy_table(rows)
    show(f"top-1, calibrated on {options.calibration} training images", accuracy)
    write("quantize", {"table": accuracy, "rows": rows})
    print(f"\nwrote {RESULTS / 'quantize.json'}")


if __name__ == "__main__":
    main()
