"""TensorFlow's "same" padding of timm's convolutions, in arithmetic that exported graphs can hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from timm.layers import padding


@contextmanager
def integer_same_padding() -> Iterator[None]:
    """Let timm's layers compute their padding from integers within the block.

    timm divides sizes to floats and rounds up, which a .pt2 file with open height and width cannot hold.
    """
    with patch.object(padding, "get_same_padding", _same_padding):
        yield


def _same_padding(size: int, kernel_size: int, stride: int, dilation: int) -> int | torch.SymInt:
    """Return the rows or columns to add for ceil(size / stride) outputs: (outputs - 1) stride + extent - size."""
    outputs = (size + stride - 1) // stride  # -(-size // stride) is rounded the other way by ONNX
    extent = (kernel_size - 1) * dilation + 1
    return torch.sym_max((outputs - 1) * stride + extent - size, 0)
