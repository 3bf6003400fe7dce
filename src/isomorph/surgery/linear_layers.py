"""What is a plain linear layer, convolution or BatchNorm, whose values can be moved into another layer."""

from timm.layers import BatchNormAct2d, SyncBatchNormAct, to_2tuple
from torch import nn

from isomorph.surgery.plain_layers import layer_mismatch

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d, SyncBatchNormAct)


def is_plain_norm(module: nn.Module) -> bool:
    """True for BatchNorm with running statistics and no activation or dropout, which timm's may have."""
    extras = (getattr(module, name, None) for name in ("act", "drop"))
    plain = type(module) in _BATCH_NORMS and module.running_mean is not None
    return plain and all(extra is None or type(extra) is nn.Identity for extra in extras)


def linear_mismatch(module: nn.Module) -> str | None:
    """Return why a layer is not a plain linear layer or convolution, or None if it is."""
    if isinstance(module, nn.Linear):
        return layer_mismatch(module, nn.Linear, "nn.Linear")
    if not isinstance(module, nn.Conv2d):
        return f"{type(module).__name__} is not a linear layer or convolution"
    if reason := layer_mismatch(module, nn.Conv2d, "nn.Conv2d"):
        return reason
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r} is not 'zeros'"
    if conv_padding(module) is None:
        return f"padding={module.padding!r} pads one side more than the other"
    return None


def conv_padding(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Return the padding of a convolution in pixels, or None if it differs between sides."""
    if conv.padding == "valid":
        return (0, 0)
    if conv.padding == "same":
        total = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        return None if any(t % 2 for t in total) else (total[0] // 2, total[1] // 2)
    return to_2tuple(conv.padding)
