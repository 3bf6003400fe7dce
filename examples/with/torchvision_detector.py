"""torchvision: put attention into a trained detector. Its outputs stay the same until it is trained.

python examples/with/torchvision_detector.py
"""

from copy import deepcopy

import torch
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

import isomorph as iso

torch.manual_seed(0)
detector = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=5).eval()
image = [torch.rand(3, 200, 260)]  # weights="DEFAULT" and a photo for a real one

# attention after the last block of the backbone, which reads a tensor of images
new = deepcopy(detector)
new.backbone = iso.insert(
    detector.backbone, iso.layers.MapAttention, after="body.16", example=torch.rand(1, 3, 224, 224)
)
before, after = detector(image)[0], new(image)[0]
print("same boxes:", all(torch.equal(before[name], after[name]) for name in before))

new.train()
boxes = torch.tensor([[20.0, 30.0, 120.0, 150.0]])
losses = new(image, [dict(boxes=boxes, labels=torch.tensor([1]))])
sum(losses.values()).backward()
optimizer = torch.optim.SGD(iso.training.parameter_groups(new, lr=1e-3, gamma_lr="10x"), momentum=0.9)
optimizer.step()
gamma = new.get_submodule("backbone.body.16.2").inserted.gamma
print("attention is used:", bool(gamma.abs().max() > 0))
