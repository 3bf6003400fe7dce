"""Predict hours and memory of the papers' runs on eight H100, by the model of gpu_model.py.

    python benchmarks/gpu_hours.py [PAPER ...]   # prints the tables of docs/guides/reproduce.md; writes the result file

A step is the forward pass, the loss, the backward pass and AdamW, each GPU with an eighth of the recipe's batch. Data
loading, communication and evaluation take no time, and a teacher takes its own forward pass.
Memory is what the backward pass keeps, with weights, gradients and AdamW's two moments.
"""

import json
import sys
import time
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isomorph as iso
from gpu_model import BANDWIDTH, RESULTS, Costs, OnGPU, Recorder, imitate_autocast
from interleave import show
from isomorph.lab.training.build import build_model
from isomorph.models.masked_autoencoder import MaskedAutoencoder

GPUS, IMAGES = 8, 1_281_167
RUNS = {
    "T-CNN": (
        "finetune_resnetrs50",
        "tcnn_resnetrs50",
        "tcnn_resnetrs101",
        "tcnn_resnetrs152",
        "tcnn_late_400",
    ),
    "ConViT": ("deit_ti", "convit_ti", "deit_s", "convit_s", "convit_s_10pct", "convit_b"),
    "TDRL": (
        *(
            "tdrl_plain_g2sd",
            "tdrl_vit_ti_g2sd",
            "tdrl_plain_100ep",
            "tdrl_vit_ti_100ep",
            "tdrl_vit_ti_300ep",
        ),
        *("tdrl_vit_ti_100ep_distilled", "tdrl_plain_swin_t", "tdrl_swin_t"),
    ),
    "Refiner": (
        "refiner_plain_b",
        "refiner_b",
        "refined_vit_s",
        "refined_vit_m",
        "refined_vit_l",
        "refined_vit_s_384",
    ),
    "CoAtNet": (
        "coatnet_0",
        "coatnet_1",
        "coatnet_2",
        "coatnet_3",
        "coatnet_0_384",
        "coatnet_2_512",
    ),
}


def meta_step(recipe: Any) -> tuple[Any, nn.Module, list[Tensor]]:
    """The training step of a recipe on the meta device, its model, and the tensors that the backward pass keeps."""
    part = recipe.model.model_copy(update=dict(pretrained=False, weights=None))
    model = build_model(part, 1000, recipe.drop_path or 0.0)
    size = recipe.data.size or (224, 224)
    if recipe.mask:
        model = MaskedAutoencoder(model, *recipe.mask.decoder)
    model = model.to("meta").train()
    images = torch.empty(recipe.data.batch_size // GPUS, 3, *size, device="meta")
    teacher: nn.Module | None = None
    if recipe.distill:
        teacher = (
            timm.create_model(recipe.distill.teacher, **recipe.distill.kwargs).to("meta").eval()
        )
    elif recipe.mask and recipe.mask.teacher:
        teacher = MaskedAutoencoder(timm.create_model("vit_base_patch16_224")).to("meta").eval()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if teacher is not None:
                with torch.no_grad():
                    teacher(images)
            if isinstance(model, MaskedAutoencoder):
                loss = model.loss(images)
            else:
                outputs = model(images)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                loss = sum(
                    F.cross_entropy(out, torch.empty(*out.shape, device="meta")) for out in outputs
                )
        loss.backward()

    return step, model, kept


def predict(name: str, costs: Costs) -> dict[str, Any]:
    recipe, recorder = iso.load_recipe(name), Recorder()
    with OnGPU.set_casting(bool(recipe.amp)):
        step, model, kept = meta_step(recipe)
        recorder.record(step)
    weights = sum(p.numel() for p in model.parameters())
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    steps = recipe.epochs * IMAGES * (recipe.data.fraction or 1) / recipe.data.batch_size
    # bytes of the update: weight, gradient and two moments are read, all but the gradient written
    moved = 28 * weights
    update = 1e3 * moved / BANDWIDTH / costs.reach

    def hours(costs: Costs) -> float:
        return round(steps * (recorder.passes[0].milliseconds(costs) + update) / 3.6e6, 1)

    return {
        "recipe": name,
        "row": recipe.source,
        "epochs": recipe.epochs,
        "batch a GPU": recipe.data.batch_size // GPUS,
        "hours": hours(costs),
        "hours as a CUDA graph": hours(costs._replace(inference=0.0, training=0.0)),
        "GiB a GPU": round((sum(storages.values()) + 16 * weights) / 2**30, 1),
        "expected": recipe.expected or "",
    }


def main() -> None:
    imitate_autocast()
    path = RESULTS / "gpu_hours.json"
    costs = Costs(**json.loads((RESULTS / "gpu_model.json").read_text())["costs"])
    for paper in sys.argv[1:] or RUNS:
        rows = []
        for name in RUNS[paper]:
            start = time.perf_counter()
            rows.append(predict(name, costs))
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        shown = ("recipe", "row", "epochs", "hours", "hours as a CUDA graph", "GiB a GPU")
        show(paper, [{key: row[key] for key in shown} for row in rows])
        found = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(found | {paper: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
