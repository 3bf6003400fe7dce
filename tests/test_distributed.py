"""Devices and processes of a run."""

import pytest
import torch

from isomorph.distributed import open_runtime, resolve_device
from isomorph.errors import UserError


@pytest.fixture
def gpu_machine(monkeypatch):
    """Make torch believe that there are GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize("local_rank", [0, 3])
def test_a_gpu_has_an_index(gpu_machine, name, local_rank):
    """torch.cuda.set_device refuses a device without an index."""
    assert resolve_device(name, local_rank) == torch.device("cuda", local_rank)


def test_the_named_gpu_is_taken(gpu_machine):
    assert resolve_device("cuda:1", 0) == torch.device("cuda", 1)


def test_without_a_gpu_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize("name", ["abacus", "cuda:99", "mps:7"])
def test_an_unknown_or_missing_device_is_one_line(name):
    with pytest.raises(UserError, match=f"device '{name}' is not available.*try device=cpu"):
        open_runtime(name)
