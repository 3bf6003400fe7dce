"""Lightning: train a pyramid network, and hand over the plain one.

pip install lightning; python examples/with/lightning_module.py
"""

import lightning
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import isomorph as iso


class WideNet(lightning.LightningModule):
    """A ViT whose MLPs are pyramids in training."""

    def __init__(self):
        super().__init__()
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=4)
        self.model = iso.recast(vit, iso.LinearToPyramid("P-W2S"), where="blocks.*.mlp.fc?").train()

    def training_step(self, batch, _):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(iso.training.parameter_groups(self.model, lr=1e-3))


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 4, (64,)))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
net = WideNet()
trainer.fit(net, DataLoader(data, batch_size=16, shuffle=True))

wide = net.model.eval()
thin = iso.fuse(wide)
count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
print(f"parameters: {count(wide):,} trained, {count(thin):,} shipped")
print("equal:", iso.verify(wide, thin, torch.randn(2, 3, 32, 32)).passed)
