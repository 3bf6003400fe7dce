"""onnxruntime: fuse a pyramid network, export it, and run it without PyTorch.

pip install 'isomorph[export]'; python examples/with/onnxruntime_session.py
"""

import tempfile
from pathlib import Path

import onnxruntime
import timm
import torch

import isomorph as iso

torch.manual_seed(0)
wide = timm.create_model("tdrl_vit_ti", img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=4, num_classes=4)
with torch.no_grad():
    wide.train()(torch.randn(16, 3, 32, 32))  # statistics, as training leaves them
wide.eval()

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "thin.onnx")
    iso.export(iso.fuse(wide), file)  # compared with the model before it is written
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images = torch.randn(2, 3, 32, 32)
    (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    print("equal:", torch.allclose(torch.from_numpy(logits), wide(images), atol=1e-4))
    print(f"{file.stat().st_size // 1024} KB for {sum(p.numel() for p in wide.parameters()):,} trained parameters")
