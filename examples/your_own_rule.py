"""A rule of your own: every nn.Linear becomes a LoRA layer, trained, and merged back into one linear layer.

    python examples/your_own_rule.py                       # on random images: a second; writes lora.safetensors

A rule says which modules it takes, what it makes of them, and how exact the result is. recast, verify, fuse, save and
load then work with it; with `register_rule` it is also an option of the command line and of recipes.
"""

from dataclasses import dataclass
from typing import ClassVar

import timm
import torch
from torch import nn

import isomorph as iso


class LowRankLinear(nn.Module):
    """y = W x + b + B A x, with A of shape (rank, in) and B of shape (out, rank), which starts at 0."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


@iso.surgery.register_rule
@dataclass(frozen=True)
class LinearToLowRank(iso.Rule):
    """Linear layers with a trainable update of low rank."""

    rank: int = 4
    """Rank of the update."""
    atol: ClassVar[float] = 1e-5
    kind: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    def reason(self, site: iso.surgery.Site) -> str | None:
        return None if type(site.module) is nn.Linear else "not a plain nn.Linear"

    def build(self, site: iso.surgery.Site) -> nn.Module:
        return LowRankLinear(site.module, self.rank)


torch.manual_seed(0)
images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10).eval()
lora = iso.recast(vit, LinearToLowRank(rank=8), where=["blocks.*.attn.qkv", "blocks.*.mlp.fc?"])
print("1.", iso.verify(vit, lora, images))

trained = [p.requires_grad_(".down." in n or ".up." in n) for n, p in lora.named_parameters()]
optimizer = torch.optim.AdamW([p for p in trained if p.requires_grad], lr=1e-2)
for _ in range(8):
    loss = nn.functional.cross_entropy(lora(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"2. Trained the updates alone: loss {loss.item():.3f} after 8 steps")

thin, report = iso.surgery.fuse_with_report(lora)  # finds W + B A by what the layer computes
print("3.", iso.verify(lora, thin, images))
before, after = report.parameters
print(f"   {before:,} parameters -> {after:,}, as in the ViT; {len(report.merged)} layers merged")

iso.save(lora, "lora.safetensors")
same = iso.load("lora.safetensors")
print("4. Saved and loaded again, rule included:", torch.equal(same(images), lora(images)))
