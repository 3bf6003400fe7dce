"""transformers: carry the weights of a DINOv2 to timm and to a ViT of one's own, without a table of names.

pip install 'isomorph[nlp]'; python examples/with/transformers_port.py
"""

import timm
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Dinov2Config, Dinov2Model

import isomorph as iso

WIDTH, HEADS, PATCH = 48, 3, 14


class Block(nn.Module):
    """A block of DINOv2 as one may write it, with packed queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, 1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.scales[0] * self.out(attended)
        return x + self.scales[1] * self.mlp(self.norms[1](x))


class OwnViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH, 1e-6)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.norm(self.blocks(x))[:, 0]


torch.manual_seed(0)
size = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, image_size=4 * PATCH)
theirs = Dinov2Model(Dinov2Config(**size, layer_norm_eps=1e-6)).eval()  # .from_pretrained for real weights
timms = timm.create_model(
    "vit_small_patch14_dinov2", embed_dim=WIDTH, depth=2, num_heads=HEADS, img_size=4 * PATCH, num_classes=0
)
image = torch.randn(1, 3, 4 * PATCH, 4 * PATCH)
for ours in (timms, OwnViT()):
    report = iso.port_weights(theirs, ours, image)
    print("equal:", report.equal, f"in float64 {report.difference:.0e}, left: {', '.join(report.left)}")
