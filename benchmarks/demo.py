"""What could be gained in the demo: the candidates for its last step, by seed.

    python benchmarks/demo.py [FORM ...] [--seeds 0 1 2]    # adds to results/demo.json; every run takes about a minute

Forms: `digits_vit` and `digits_convit` are the demo's recipes; the others change one thing in them or fine-tune a CNN.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import isomorph as iso
from interleave import RESULTS, processor, show
from isomorph.training.build import data_config

PYRAMIDS = "model.recast={rule: LinearToPyramid, init: paper, where: ['blocks.*.attn.qkv', 'blocks.*.mlp.fc?']}"
REFINED = "model.recast={rule: AttentionToRefined, ratio: 3, where: 'blocks.*.attn'}"
OCCLUDED = ["augment.erasing=0.7", "augment.crop_padding=4", "epochs=4"]

FORMS = {
    "digits_vit": ("digits_vit", []),
    "digits_convit": ("digits_convit", []),
    "digits_vit, pyramids": ("digits_vit", [PYRAMIDS]),
    "digits_vit, refined": ("digits_vit", [REFINED]),
    "CNN, occluded": ("digits_finetune", OCCLUDED),
    "T-CNN near exact, occluded": ("digits_exact", OCCLUDED),
    "T-CNN paper, occluded": ("digits_paper", OCCLUDED),
}


def occluded(batch, share=0.15):
    """Images with a square of `share` of their area set to the mean colour, at a place that depends on the index."""
    for i, image in enumerate(batch):
        side = round(image.shape[-1] * share**0.5)
        top, left = np.random.default_rng(i).integers(image.shape[-1] - side + 1, size=2)
        image[:, top : top + side, left : left + side] = 0
    return batch


def measure(form, seed):
    """Train one form with one seed; return its accuracies."""
    name, changes = FORMS[form]
    with tempfile.TemporaryDirectory() as folder:
        if "CNN" in form:
            cnn = iso.train(
                iso.load_recipe("digits_cnn", [f"seed={seed}", "epochs=5", f"out={folder}/cnn"]), show=False
            )
            changes = [*changes, f"model.weights={cnn.folder / 'model.safetensors'}"]
        recipe = iso.load_recipe(name, [f"seed={seed}", f"out={folder}/run", *changes])
        begin = time.perf_counter()
        result = iso.train(recipe, show=False)
        seconds = time.perf_counter() - begin
    loader = iso.data.eval_loader(iso.data.open_source("digits", "test"), data_config(recipe, result.model), 450)
    hidden = [(occluded(images.clone()), labels) for images, labels in loader]
    found = {"top1": result.metrics["top1"], "nll": result.metrics["nll"]}
    return found | {"top1, 15% occluded": iso.evaluate(result.model, hidden)["top1"], "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", default=["digits_vit", "digits_convit"], help=f"of {', '.join(FORMS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(RESULTS) / "demo.json"
    for form in options.forms:
        for seed in options.seeds:
            row = {"form": form, "seed": seed, **measure(form, seed)}
            known = json.loads(path.read_text())["rows"] if path.is_file() else []
            rows = [old for old in known if (old["form"], old["seed"]) != (form, seed)] + [row]
            about = {"machine": processor(), "torch": torch.__version__, "threads": 1}
            path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            show("so far", [row])


if __name__ == "__main__":
    main()
