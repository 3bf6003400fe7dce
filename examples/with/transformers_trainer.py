"""transformers: gate the attention of a DINOv2 classifier, and fine-tune it with the Trainer.

pip install 'isomorph[nlp]' accelerate; python examples/with/transformers_trainer.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Dinov2Config, Dinov2ForImageClassification, Trainer, TrainingArguments

import isomorph as iso


class Squares(Dataset):
    """Noise with a bright square on the left (class 0) or the right (class 1)."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(index))
        label = index % 2
        image[:, 8:20, 2 + 14 * label : 12 + 14 * label] += 3
        return {"pixel_values": image, "labels": label}


torch.manual_seed(0)
config = Dinov2Config(
    image_size=28, patch_size=7, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_labels=2
)
model = Dinov2ForImageClassification(config).eval()  # .from_pretrained("facebook/dinov2-small") for real weights
# near: equal within 0.05, with gates that training moves; with the exact initialisation they would stay at 3e-7
gated = iso.recast(model, iso.AttentionToGPSA(init="near"), where="dinov2.encoder.layer.*.attention")
print("equal:", iso.verify(model, gated, torch.rand(2, 3, 28, 28)).passed)
before = {name: gate.clone() for name, gate in iso.gates(gated).items()}

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=12, per_device_train_batch_size=16, report_to=[], use_cpu=True
    )
    optimizer = torch.optim.AdamW(iso.training.parameter_groups(gated, lr=3e-3, gate_lr=0.1))
    trainer = Trainer(gated.train(), arguments, train_dataset=Squares(), optimizers=(optimizer, None))
    trainer.train()
moved = max(float((gate - before[name]).abs().max()) for name, gate in iso.gates(gated).items())
print(f"gates moved: {moved > 1e-3} (by up to {moved:.3f} of the attention)")
