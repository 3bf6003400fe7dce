"""Refine the attention maps of a DINOv2 ViT: train the refiners and a classifier, and keep the rest frozen.

    python examples/refine_a_dinov2.py                     # scikit-learn's digits, a tiny random ViT: a few seconds
    python examples/refine_a_dinov2.py PHOTOS              # PHOTOS/{train,val}/CLASS/*.jpg, DINOv2 ViT-S/14, pretrained

DINOv2's registers and layer scales are kept. `AttentionToRefined` also takes DINOv3, EVA and BEiT, whose attention
has rotary or relative positions.
"""

import sys

import timm
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import isomorph as iso

folder = sys.argv[1] if len(sys.argv) > 1 else None
small = dict(img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=4, init_values=None)
photos = dict(img_size=224, pretrained=True)

torch.manual_seed(0)
train, test = (iso.data.open_source(folder or "digits", split) for split in ("train", "test"))
vit = timm.create_model(
    "vit_small_patch14_reg4_dinov2", num_classes=len(train.classes), **(photos if folder else small)
)
config = timm.data.resolve_data_config({"input_size": (3, 224, 224) if folder else (3, 16, 16)}, model=vit)
train.transform = iso.data.eval_transform(config)
test_images = iso.data.eval_loader(test, config)

# Every second block gets a refiner: 3 maps for each head, each convolved 3 x 3, reduced to one map per head again.
refined = iso.recast(vit, iso.AttentionToRefined(ratio=3), where="blocks.*[13579].attn")
images = next(iter(test_images))[0][:8]
print(f"1. Recast {len(iso.edits(refined)[0].names)} of {len(vit.blocks)} attention layers")
print(f"   largest difference of the outputs: {iso.verify(vit, refined, images).fp32:.1e}")


def fine_tune(model, epochs=2, lr=3e-3):
    """Train what is not frozen."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=0.0)
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    for _ in range(epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    top1 = iso.evaluate(model.eval(), test_images)["top1"]
    print(f"   {sum(p.numel() for p in trained):,} trained parameters: loss {loss.item():.3f}, {top1:.1f} % top-1")


if folder:  # the random ViT for digits has nothing worth freezing: all of it is trained
    for model in (vit, refined):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head.") or ".refine." in name)

print("2. Train the ViT with plain attention")
fine_tune(vit)
print("3. Train the ViT with refined attention, with the same budget")
fine_tune(refined)

similarity = {
    name: iso.analysis.head_similarity(model, images) for name, model in {"plain": vit, "refined": refined}.items()
}
last = f"blocks.{len(vit.blocks) - 1}.attn"
print(
    f"4. Similarity between the heads of {last}: "
    + ", ".join(f"{n} {s[last].mean():.2f}" for n, s in similarity.items())
)
