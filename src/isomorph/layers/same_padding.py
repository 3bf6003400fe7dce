"""The padding of TensorFlow's SAME convolutions as a module."""

from timm.layers import pad_same
from torch import Tensor, nn

from isomorph.layers.grid import GridSize


class SamePadding(nn.Module):
    """Pad an image so that a convolution with stride s gives ceil(H / s) x ceil(W / s) positions.

    The padding depends on the size of the image, and the right and lower sides may get one pixel more.

    Shape: x (B, C, H, W) -> (B, C, H', W')

    Example:
        >>> pad = iso.layers.SamePadding((3, 3), stride=(2, 2))
        >>> pad(torch.randn(1, 8, 14, 15)).shape
        torch.Size([1, 8, 15, 17])
    """

    def __init__(
        self,
        kernel_size: GridSize,
        stride: GridSize = (1, 1),
        dilation: GridSize = (1, 1),
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = stride
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        return pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}"
