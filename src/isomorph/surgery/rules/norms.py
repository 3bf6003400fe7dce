"""Rule that gives the convolutions of a fused network norms again, for fine-tuning."""

from dataclasses import dataclass

from torch import nn

from isomorph.layers import ConvNorm
from isomorph.surgery.plain_layers import layer_mismatch
from isomorph.surgery.rule import Rule, check_number, register_rule
from isomorph.surgery.site import Site


@register_rule
@dataclass(frozen=True)
class ConvToConvNorm(Rule):
    """Give a convolution a BatchNorm that is the identity, to fine-tune or quantise a network whose norms were merged.

    Accepts `nn.Conv2d`, and classes derived from it that compute the same.
    The norm has mean 0, variance 1 and weight sqrt(1 + eps), so that the function stays; its bias is that of the
    convolution. Then `iso.recalibrate(model, loader)` measures its statistics, and changes weight and bias so that the
    function still stays: train mode then computes nearly what eval mode does. `fuse` converts back.

    Raises: UserError for an eps out of range, and from `recast` for a module that it does not accept.

    Example:
        >>> cnn = iso.fuse(timm.create_model("cifar_resnet20").eval())
        >>> normed = iso.recast(cnn, iso.ConvToConvNorm())
        >>> normed = iso.recalibrate(normed, [torch.randn(8, 3, 32, 32)])
        >>> iso.verify(cnn, normed, torch.randn(1, 3, 32, 32)).passed
        True
    """

    eps: float = 1e-5
    """What BatchNorm adds to the variance."""

    atol = 1e-4
    is_reverted = False
    kind = (nn.Conv2d,)

    def __post_init__(self) -> None:
        check_number("eps", self.eps, (1e-12, 1.0))

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        module = site.module
        if not isinstance(module, nn.Conv2d):
            return f"{type(module).__name__} is not an nn.Conv2d"
        return layer_mismatch(module, nn.Conv2d)

    def build(self, site: Site) -> ConvNorm:
        """Return the convolution with a norm. Raises: UserError with the reason if the module is not accepted."""
        self.check(site)
        return ConvNorm.from_conv(site.module, self.eps)
