"""Seeds for the generators of Python, NumPy and torch."""

import random
import zlib

import numpy as np
import torch


def seed_generators(seed: int, devices: bool = True) -> None:
    """Seed the generators of Python, NumPy and torch; without `devices` only on the CPU, which is much faster."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed for a purpose and some numbers: NumPy's SeedSequence hash, 63 bits."""
    entropy = (zlib.crc32(purpose.encode()), len(numbers), *numbers)  # the length, as SeedSequence ignores final zeros
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
