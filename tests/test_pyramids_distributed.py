"""Pyramids on two processes: the same numbers as on one."""

import copy
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from command_line import SERVER
from isomorph.layers import JointPyramid, PyramidConv2d, PyramidLinear

SHARES = (3, 5)


def build(kind):
    """A layer and its whole batch, the same in every process."""
    torch.manual_seed(0)
    if kind == "conv":
        return PyramidConv2d(3, 6, 4, 4, rectify="batchnorm").double(), torch.randn(
            8, 3, 8, 8, dtype=torch.float64
        ) + 1
    layer = JointPyramid([PyramidLinear(5, 7, rectify="batchnorm"), PyramidLinear(5, 6)]).double()
    return layer, torch.randn(8, 4, 5, dtype=torch.float64) + 1


def step(layer, x):
    """Output, input gradient, parameter gradients, buffers of a training step; the loss is a sum over samples."""
    x = x.clone().requires_grad_()
    y = layer(x)
    weights = torch.linspace(-1, 2, y[0].numel(), dtype=y.dtype).view(y.shape[1:])
    (y * weights).square().sum().backward()
    return (
        y.detach(),
        x.grad,
        [p.grad for p in layer.parameters()],
        [b.clone() for b in layer.buffers()],
    )


def work(rank, kind, sync, port, folder):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    layer, batch = build(kind)
    if sync:
        layer = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
        # DDP lets SyncBatchNorm onto GPUs only, for its own forward pass, which no pyramid calls
        DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None
    parts = batch.split(SHARES)
    torch.manual_seed(rank)
    found = step(DistributedDataParallel(layer), parts[rank])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def on_two_processes(kind, sync, folder):
    """What each process found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(
        work, (kind, sync, port, folder), nprocs=2, start_method=SERVER.get_start_method()
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_synchronised_statistics_are_those_of_one_process(kind, tmp_path):
    layer, batch = build(kind)
    y, dx, grads, buffers = step(layer, batch)
    found = on_two_processes(kind, True, tmp_path)
    close(torch.cat([part[0] for part in found]), y)
    close(torch.cat([part[1] for part in found]), dx)
    for _, _, got, seen in found:
        close(got, [grad / 2 for grad in grads])  # DDP averages over processes
        close(seen, buffers)


@pytest.mark.slow
def test_without_synchronisation_each_process_has_its_own(tmp_path):
    layer, batch = build("linear")
    twins = [copy.deepcopy(layer) for _ in SHARES]
    alone = [step(twin, part) for twin, part in zip(twins, batch.split(SHARES), strict=True)]
    mean = [sum(grads) / 2 for grads in zip(*(part[2] for part in alone), strict=True)]
    for (y, dx, grads, buffers), own in zip(
        on_two_processes("linear", False, tmp_path), alone, strict=True
    ):
        close([y, dx, buffers], [own[0], own[1], own[3]])
        close(grads, mean)
