"""peft: LoRA on the projections of attention that torch packs into one parameter.

pip install peft; python examples/with/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import isomorph as iso

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()  # open_clip's and many others have these
unpacked = iso.recast(encoder, iso.AttentionToLinears(), where="layers.*.self_attn")
x = torch.randn(2, 5, 32)
print("equal:", iso.verify(encoder, unpacked, x).passed)

tuned = get_peft_model(unpacked, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
before = tuned(x).detach()
optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
for _ in range(5):
    optimizer.zero_grad()
    (tuned(x) - x.flip(1)).square().mean().backward()
    optimizer.step()
print("LoRA changes the output:", not torch.allclose(before, tuned(x)))

packed = iso.revert(tuned.merge_and_unload().eval())  # in_proj_weight again, with the adapters in it
print(type(packed.layers[0].self_attn).__name__, torch.allclose(packed(x), tuned(x), atol=1e-5))
