"""Train a ViT with pyramids of branches in place of qkv and its MLPs' layers, then fuse each into one layer (TDRL).

    python examples/train_wide_ship_thin.py                # scikit-learn's digits: half a minute
    python examples/train_wide_ship_thin.py PHOTOS         # PHOTOS/{train,val}/CLASS/*.jpg: a pretrained ViT at 224 px

The run is in runs/wide and resumes there if it is interrupted. Writes thin.safetensors.
"""

import sys
from pathlib import Path

import torch

import isomorph as iso
from isomorph.lab.evaluation import count_parameters, evaluation_config

folder = sys.argv[1] if len(sys.argv) > 1 else None
small = dict(img_size=24, patch_size=4, embed_dim=48, depth=2, num_heads=4)

# A recipe is a checked dataclass: `isomorph train` takes the same fields from a YAML file.
recipe = iso.Recipe(
    name="wide",
    model=dict(
        name="vit_tiny_patch16_224",
        pretrained=bool(folder),
        kwargs={} if folder else small,
        recast=dict(rule="LinearToPyramid", where=["blocks.*.attn.qkv", "blocks.*.mlp.fc?"], layout="P-W2S"),
    ),
    data=dict(source="imagefolder", root=folder)
    if folder
    else dict(source="digits", size=[24, 24], test_crop="whole", batch_size=32),
    augment=dict(scale=(0.5, 1.0), hflip=0.5) if folder else dict(scale=(1.0, 1.0), hflip=0.0),
    optim=dict(lr=1e-4 if folder else 3e-3, branch_lr="0.1x", warmup_epochs=0.5),
    epochs=10 if folder else 8,
)

print("1. Train the ViT with pyramids (2 branches and a skip for qkv and both layers of the MLP)")
result = iso.train(recipe)
wide = result.model

print("2. Fuse every pyramid into one nn.Linear")
thin = iso.fuse(wide)
images = torch.randn(8, *evaluation_config(wide, recipe.data.size)["input_size"])
report = iso.verify(wide, thin, images)
print(f"   parameters: {count_parameters(wide):,} in training, {count_parameters(thin):,} to ship")
print(f"   largest difference of the outputs: {report.fp32:.1e}; equal: {report.passed}")

print("3. Measure the network that you ship")
test = iso.data.open_source(recipe.data.source, "test", recipe.data.root)
config = evaluation_config(thin, recipe.data.size)
print(f"   wide: {result.metrics['top1']:.1f} % top-1 at the end of training")
print(f"   thin: {iso.evaluate(thin, iso.data.eval_loader(test, config))['top1']:.1f} % top-1")

iso.save(thin, "thin.safetensors")
megabytes = [Path(path).stat().st_size / 1e6 for path in (result.folder / "model.safetensors", "thin.safetensors")]
print(f"4. Files: {megabytes[0]:.1f} MB wide, {megabytes[1]:.1f} MB thin; layers are plain again:")
print(f"   {thin.blocks[0].mlp.fc1}")
