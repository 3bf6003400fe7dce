"""OpenVINO: convert a model whose convolutions have become attention, and compare.

pip install openvino; python examples/with/openvino_model.py
"""

import openvino
import timm
import torch

import isomorph as iso

torch.manual_seed(0)
cnn = timm.create_model("cifar_resnet20").eval()
tcnn = iso.recast(cnn, iso.ConvToGPSA(), where="layer3.*.conv2")
images = torch.rand(2, 3, 32, 32)

program = torch.export.export(tcnn, (images,))
# by default the runtime computes in bfloat16 on CPUs that have it, as far off as bfloat16's rounding
exact = {"INFERENCE_PRECISION_HINT": "f32"}
compiled = openvino.compile_model(openvino.convert_model(program), "CPU", exact)
logits = torch.from_numpy(compiled(images.numpy())[0])
print("equal:", torch.allclose(logits, tcnn(images), atol=1e-4))
