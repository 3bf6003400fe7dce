"""Recast a CNN as a T-CNN, check that it still computes the same, then fine-tune both with the same budget.

    python examples/recast_a_cnn.py                        # scikit-learn's digits: a few seconds
    python examples/recast_a_cnn.py PHOTOS resnet18        # PHOTOS/{train,val}/CLASS/*.jpg; any ResNet of timm

Writes tcnn.safetensors into the working folder.
"""

import sys

import timm
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import isomorph as iso

folder = sys.argv[1] if len(sys.argv) > 1 else None
name = sys.argv[2] if len(sys.argv) > 2 else "resnet18"
small = dict(layers=[1, 1, 1, 1], channels=[16, 32, 64, 128])  # a narrow ResNet for digits, recast where maps are 4 x 4
where = "layer4.*.conv?" if folder else "layer2.*.conv?"

# Images, and a CNN: pretrained for photos, random for digits (trained below).
torch.manual_seed(0)
train, test = (iso.data.open_source(folder or "digits", split) for split in ("train", "test"))
cnn = timm.create_model(name, num_classes=len(train.classes), **(dict(pretrained=True) if folder else small))
config = timm.data.resolve_data_config({} if folder else {"input_size": (3, 32, 32)}, model=cnn)
train.transform = iso.data.train_transform(config, crop_padding=config["input_size"][-1] // 8)
test_images = iso.data.eval_loader(test, config)


def fine_tune(model, epochs=3 if folder else 1, lr=1e-3 if folder else 3e-3):
    """Train with AdamW; gates and positions of attention have learning rates of their own."""
    groups = iso.training.parameter_groups(model, lr=lr, gate_lr="30x", position_lr="10x")
    optimizer = torch.optim.AdamW(groups)
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    model.train()
    for epoch in range(epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"  epoch {epoch + 1}: loss of the last batch {loss.item():.3f}")
    return model.eval()


def accuracy(model):
    return f"{iso.evaluate(model, test_images)['top1']:.1f} % top-1"


print(f"1. Train {name} on {len(train):,} images of {len(train.classes)} classes")
cnn = fine_tune(cnn)
print(f"   CNN: {accuracy(cnn)}")

print(f"2. Recast the convolutions {where} as gated self-attention")
tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=5.0, gate=6.0), where=where)  # nearly exact: heads can move
exact = iso.recast(cnn, iso.ConvToGPSA(), where=where)  # exact, to prove the principle
images = next(iter(test_images))[0]
print(f"   largest difference of the outputs: {iso.verify(cnn, exact, images[:8]).fp32:.1e} (exact initialisation)")
print(f"   T-CNN, not trained yet: {accuracy(tcnn)}")

print("3. Fine-tune both with the same budget")
print(f"   CNN: {accuracy(fine_tune(cnn))}")
print(f"   T-CNN: {accuracy(fine_tune(tcnn))}")
gates = torch.cat([gate.flatten() for gate in iso.gates(tcnn).values()])
print(f"   weight of positional attention, over all heads: {gates.min():.3f} to {gates.max():.3f}")

iso.save(tcnn, "tcnn.safetensors")
print(f"4. Saved, and loaded again: {accuracy(iso.load('tcnn.safetensors'))}")
