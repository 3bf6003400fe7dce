"""How large attention logits grow with each rectification of queries and keys (TDRL Fig. 3, in small).

    python benchmarks/tdrl_logits.py      (about a minute; writes benchmarks/results/tdrl_logits.json)

A ViT of width 24 and two blocks on 8 x 8 digits, four branches R-D1W4 in q, k, v and the MLP, AdamW at 1e-2, 24 steps.
"""

import json
import tempfile
from pathlib import Path

import isomorph as iso
from interleave import show, write
from isomorph.training.recipe.recipe import validate

KWARGS = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, weight_init="jax", num_classes=10)


def monitored(rectify):
    """What a run's monitor has seen, every three steps."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = dict(
            model=dict(name="tdrl_vit_ti", kwargs=KWARGS | dict(layout="R-D1W4", rectify=rectify)),
            data=dict(source="digits", fraction=0.3, size=[32, 32], batch_size=32),
            optim=dict(lr=1e-2, warmup_epochs=0),
            monitor_every=3,
            epochs=2,
            out=folder,
        )
        iso.train(validate(recipe), show=False)
        return [json.loads(line) for line in (Path(folder) / "monitor.jsonl").read_text().splitlines()]


def main():
    rows = []
    for rectify in ("none", "rescale", "batchnorm"):
        seen = monitored(rectify)
        first, last = (max(row["max_logit"].values()) for row in (seen[0], seen[-1]))
        lowest = min(seen[-1]["entropy"].values())
        rows.append({"rectify": rectify, "first": first, "last": last, "lowest entropy": lowest})
    show("Largest attention logit of the worst head", rows)
    print(f"\nwrote {write('tdrl_logits', {'table': rows})}")


if __name__ == "__main__":
    main()
