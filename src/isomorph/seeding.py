"""Seeds for the generators of Python, NumPy and torch."""

import random
import zlib

import numpy as np
import torch


def seed_generators(seed: int, devices: bool = True) -> None:
    """Seeds Python's, NumPy's and torch's global generators: on every device, or (much faster) on the CPU alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def mixed_seed(purpose: str, *numbers: int) -> int:
    """One seed for a purpose and some numbers: far apart for neighbours. (SeedSequence's hash, 63 bits.)"""
    entropy = (zlib.crc32(purpose.encode()), len(numbers), *numbers)  # it takes no notice of zeros at the end
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
