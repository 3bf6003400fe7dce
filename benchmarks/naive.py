"""Layers as one would write them first.

GPSA2d: padded tokens, every map dense, positions recomputed for every image. Pyramids: every branch on every token.
Refiners: three convolutions of the map.
"""

import copy
from functools import partial, reduce

import torch
import torch.nn.functional as F
from timm.models.byobnet import MobileOneBlock
from torch import nn

from isomorph.layers import GPSA2d, JointPyramid, PyramidConv2d, PyramidLinear
from isomorph.layers.refined.refiner import Refiner
from isomorph.surgery.mobileone import PyramidBlock


class NaiveGPSA2d(nn.Module):
    """The same function as a stride-1 GPSA2d, on its parameters. Shape: (B, C, H, W) -> (B, C_out, H, W)"""

    def __init__(self, layer: GPSA2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        layer, nh, k = self.layer, self.layer.num_heads, self.layer.kernel_size
        p = k // 2
        padded = F.pad(x, (p, p, p, p))
        B, C, H, W = padded.shape
        tokens = padded.flatten(2).transpose(1, 2)
        queries = x.flatten(2).transpose(1, 2)
        hd = -(-C // nh)

        def heads(tokens, weight):
            spread = F.pad(tokens @ weight.T, (0, nh * hd - C))  # row r belongs to head r mod nh
            return spread.unflatten(-1, (hd, nh)).permute(0, 3, 1, 2)  # (B, nh, N, hd)

        q, key = heads(queries, layer.query.weight), heads(tokens, layer.key.weight)
        content = (q @ key.transpose(-2, -1) * hd**-0.5).softmax(-1)
        ys, xs = torch.meshgrid(
            torch.arange(H, device=x.device), torch.arange(W, device=x.device), indexing="ij"
        )
        keys = torch.stack([ys.flatten(), xs.flatten()], -1).to(x.dtype)
        inner = keys.view(H, W, 2)[p:-p, p:-p].reshape(-1, 2)
        delta = keys[None] - inner[:, None]  # (Nq, Nk, 2)
        encoding = torch.cat([delta, delta.square().sum(-1, keepdim=True)], -1).expand(
            B, -1, -1, -1
        )
        vector = layer.locality[:, None] * torch.cat(
            [2 * layer.centre, -torch.ones_like(layer.centre[:, :1])], -1
        )
        position = (encoding @ vector.T).permute(0, 3, 1, 2).softmax(-1)  # (B, nh, Nq, Nk)
        gate = torch.sigmoid(layer.gate)[:, None, None]
        attention = (1 - gate) * content + gate * position
        values = layer.value(tokens)[:, None].expand(-1, nh, -1, -1)
        mixed = (attention @ values).permute(0, 2, 3, 1).flatten(2)  # (B, Nq, C nh)
        out = F.linear(mixed, layer.weight.flatten(1), layer.bias)
        return out.transpose(1, 2).unflatten(-1, x.shape[-2:])


def branch_by_branch(model):
    """A copy of the model in which the tokens run through every branch of every pyramid: TDRL as it is written."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, PyramidLinear):
            module.forward = partial(run_branches, [module])
        elif isinstance(module, PyramidConv2d):
            module.forward = partial(sum_chains, module)
        elif isinstance(module, JointPyramid):
            module.forward = partial(run_branches, list(module.pyramids))
        elif isinstance(module, PyramidBlock):
            module.forward = partial(MobileOneBlock.forward, module)
    return model


def run_branches(pyramids, x):
    """Shape: x (*, C) -> (*, sum of out)"""
    tokens, outputs = x.flatten(0, -2), []
    for pyramid in pyramids:
        if type(pyramid) is nn.Linear:
            outputs.append(pyramid(tokens))
            continue
        outputs.append(sum_chains(pyramid, tokens))
    return torch.cat(outputs, -1).view(*x.shape[:-1], -1)


def sum_chains(pyramid, x):
    """The branches of one pyramid, layer by layer. Shape: x (M, C) or (B, C, H, W)"""
    total = (
        sum(reduce(lambda y, layer: layer(y), chain, x) for chain in pyramid.chains)
        * pyramid.output_scale
    )
    return total if pyramid.norm is None else pyramid.norm(total)


def three_convolutions(model):
    """A copy of the model in which maps are expanded, convolved and reduced one after the other: Refiner as written."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Refiner):
            module.forward = partial(refine_in_turn, module)
    return model


def refine_in_turn(refiner, maps):
    """Shape: maps (B, H, N, N) -> (B, H, N, N)"""
    taps = refiner.local()
    y = F.conv2d(maps, refiner.expand[:, :, None, None])
    y = F.conv2d(y, taps[:, None], padding=taps.shape[-1] // 2, groups=len(taps))
    return F.conv2d(y, refiner.reduce[:, :, None, None])
