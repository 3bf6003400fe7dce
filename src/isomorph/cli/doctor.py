"""The doctor command."""

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import isomorph as iso
from isomorph.cli.options import Json, command
from isomorph.cli.output import show

PACKAGES = ("isomorph", "torch", "torchvision", "timm", "numpy", "safetensors", "pydantic", "cyclopts")
EXTRAS = {"datasets": "data", "imagecorruptions-imaug": "corruptions", "tensorboard": "track"}
MIN_FREE_DISK = 10 * 2**30


@command
def doctor(*, json_: Json = False) -> None:
    """Check versions, devices, free disk space, and that torchvision matches torch; exit with 1 on a problem."""
    lines = list(_examine_environment())
    table = [["", "", ""], *([what, finding, "" if ok else "PROBLEM"] for what, finding, ok in lines)]
    show(json_, {what: {"finding": finding, "ok": ok} for what, finding, ok in lines}, table)
    if not all(ok for _, _, ok in lines):
        sys.exit(1)


def _examine_environment() -> Iterator[tuple[str, str, bool]]:
    """Yield what was checked, the result, and True if it is good enough to run isomorph."""
    yield "python", platform.python_version(), True
    for package in PACKAGES:
        installed = _installed_version(package)
        yield package, installed or "missing: pip install -e .", installed is not None
    for package, extra in EXTRAS.items():
        yield package, _installed_version(package) or f"not installed (optional: pip install -e '.[{extra}]')", True
    try:
        iso.prepare()
    except ImportError as error:
        yield "torchvision operators", str(error), False
    else:
        yield "torchvision operators", "work", True
        yield from _device_lines()
    free = shutil.disk_usage(".").free
    enough = free > MIN_FREE_DISK
    yield "free disk here", f"{free / 2**30:.1f} GiB{'' if enough else ': too little for data and checkpoints'}", enough


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_lines() -> Iterator[tuple[str, str, bool]]:
    """Yield the lines on threads and GPUs."""
    import torch

    yield "threads", str(torch.get_num_threads()), True
    if not torch.cuda.is_available():
        yield "GPU", "none: computing on the CPU", True
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True
