"""Rule that splits packed projections of attention into plain linear layers."""

from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from isomorph.layers.unfused_multihead import JointLinears, MultiheadLinears, multihead_reason
from isomorph.surgery.plain_layers import (
    class_name,
    describe_stand_in,
    layer_mismatch,
    override_reason,
    projection_mismatch,
)
from isomorph.surgery.rule import Rule, register_rule
from isomorph.surgery.site import Site, call_joint_projection


@register_rule
@dataclass(frozen=True)
class AttentionToLinears(Rule):
    """Make queries, keys, values and the output of attention separate linear layers, which other tools can change.

    Accepts torch's `nn.MultiheadAttention`, whose packed `in_proj_weight` no tool for linear layers sees, and joint
    projections named qkv, qk or kv. Then LoRA, pruning, quantisation and the other rules apply to each layer:
    `q_proj`, `k_proj`, `v_proj` and `out_proj`, or `qkv.q`, `qkv.k`, `qkv.v`. Masks, `need_weights` and `batch_first`
    work as before, and torch's encoder layers call the layers instead of reading their weights. `iso.revert` packs
    them again.

    Source: not of a paper.
    Raises: UserError from `recast`, for a layer that it does not accept.

    Example:
        >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
        >>> new = iso.recast(encoder, iso.AttentionToLinears(), where="self_attn")
        >>> type(new.self_attn.q_proj).__name__
        'Linear'
        >>> iso.verify(encoder, new, torch.randn(2, 5, 16)).passed
        True
    """

    atol = 1e-5
    kind = (nn.MultiheadAttention,)

    def reason(self, site: Site) -> str | None:
        """Return why the projections cannot be split, or None if they can."""
        module = site.module
        if isinstance(module, MultiheadLinears):
            return "its projections are linear layers already"
        if isinstance(module, nn.MultiheadAttention):
            return _multihead_mismatch(module) or multihead_reason(module)
        parts = len(site.part_names)
        if not parts:
            return "it is neither an nn.MultiheadAttention nor a projection named qkv, qk or kv"
        if not isinstance(module, nn.Linear):
            return (
                f"it {describe_stand_in(module) or f'is a {class_name(module)}, not an nn.Linear'}"
            )
        if module.out_features % parts:
            return f"its {module.out_features} outputs cannot be split into {parts} equal parts"
        return layer_mismatch(module, nn.Linear)

    def build(self, site: Site) -> nn.Module:
        """Return the layer with separate projections. Raises: UserError as in `check`."""
        self.check(site)
        if isinstance(site.module, nn.MultiheadAttention):
            return MultiheadLinears(site.module)
        return JointLinears(site.module, site.part_names)

    def connect(self, site: Site) -> None:
        """Make attention with separate biases call its projection."""
        call_joint_projection(site)


def _multihead_mismatch(module: nn.MultiheadAttention) -> str | None:
    """Return how a module differs from nn.MultiheadAttention, or None."""
    reason = override_reason(module, nn.MultiheadAttention)
    if reason:
        return reason
    if is_parametrized(module):
        return "its weights are parametrized, which would be lost; make the parametrization permanent first"
    extra = [name for name in module._modules if name != "out_proj"]
    if extra:
        return f"it has {', '.join(extra)} besides its projections, which would be lost"
    return projection_mismatch(module, "out_proj")
