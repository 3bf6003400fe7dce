"""Measure models under corruptions of ImageNet-C, and write the result as one HTML page.

    python examples/robustness_page.py                     # a CNN and its T-CNN, trained on scikit-learn's digits
    python examples/robustness_page.py PHOTOS a.safetensors b.safetensors      # your models, on PHOTOS/CLASS/*.jpg

Needs pip install 'isomorph[corruptions]'. Writes robustness.html, which loads nothing and can be mailed as it is.
"""

import sys
from pathlib import Path

import isomorph as iso

CORRUPTIONS = ["gaussian_noise", "fog", "pixelate"]  # iso.data.IMAGENET_C_CORRUPTIONS has 15
SEVERITIES = [1, 3, 5]


def train_on_digits(name, **model):
    """Return a small CNN, trained for one epoch."""
    recipe = iso.Recipe(
        name=name,
        model=dict(name="resnet18", kwargs=dict(layers=[1, 1, 1, 1], channels=[16, 32, 64, 128]), **model),
        data=dict(source="digits", size=[32, 32], fraction=0.6, batch_size=32),
        augment=dict(crop_padding=2, hflip=0.0),
        optim=dict(lr=3e-3),
        epochs=1,
    )
    result = iso.train(recipe, show=False)
    print(f"   {name}: {result.metrics['top1']:.1f} % top-1 on clean images")
    return result.model


print("1. Open the images and the models")
folder, *files = sys.argv[1:] or [None]
test = iso.data.open_source(folder or "digits", "test")
models = {Path(file).stem: iso.load(file) for file in files}
if not models:
    train_on_digits("CNN, first")
    start = "runs/CNN, first/model.safetensors"
    models["CNN"] = train_on_digits("CNN", weights=start)
    near_exact = dict(where="layer2.*.conv2", locality=5.0, gate=6.0)
    models["T-CNN"] = train_on_digits("T-CNN", weights=start, recast=near_exact)  # the same budget

print(f"2. Corrupt {min(len(test), 40)} images in {len(CORRUPTIONS)} ways, at severities {SEVERITIES}")
results = {}
for name, model in models.items():
    results[name] = iso.robustness(model, test, corruptions=CORRUPTIONS, severities=SEVERITIES, limit=40, name=name)
    print(f"   {name}: {results[name]['mean_top1']:.1f} % top-1, mean over corruptions and severities")

print("3. Write robustness.html")
by_corruption = {name: result["by_corruption"] for name, result in results.items()}
by_severity = {
    name: iso.report.Line(SEVERITIES, list(result["by_severity"].values())) for name, result in results.items()
}
rows = [["top-1 (%)", *results]]
rows += [[corruption, *(f"{by_corruption[name][corruption]:.1f}" for name in results)] for corruption in CORRUPTIONS]
charts = [
    iso.report.Bars("By corruption", "top-1 (%)", by_corruption),
    iso.report.Panel("By severity", "severity", "top-1 (%)", by_severity),
]
sections = [iso.report.Section("Accuracy under corruptions", "Corruptions as in ImageNet-C.", rows, charts=charts)]
best = max(results, key=lambda name: results[name]["mean_top1"])
lead = f"{best} has the highest mean: {results[best]['mean_top1']:.1f} % top-1."
size = iso.report.write_page(Path("robustness.html"), "Robustness", lead, sections)
print(f"   {size / 1e3:.0f} KB; open it in a browser")
