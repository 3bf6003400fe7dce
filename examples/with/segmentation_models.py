"""segmentation-models-pytorch: merge every BatchNorm of a trained U-Net, encoder and decoder.

pip install segmentation-models-pytorch; python examples/with/segmentation_models.py
"""

import segmentation_models_pytorch as smp
import torch
from torch import nn

import isomorph as iso

torch.manual_seed(0)
unet = smp.Unet("resnet18", encoder_weights=None, classes=3)
images = torch.randn(2, 3, 64, 64)
with torch.no_grad():
    for _ in range(3):  # statistics, as training leaves them
        unet.train()(torch.randn(4, 3, 64, 64))
unet.eval()

merged, report = iso.surgery.fuse_with_report(unet, images)
norms = lambda model: sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())  # noqa: E731
print(f"norms: {norms(unet)} before, {norms(merged)} after; left: {report.left or 'none'}")
print("equal:", iso.verify(unet, merged, images).passed)
