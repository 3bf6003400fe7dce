"""Report on the Python environment and the machine, for `isomorph doctor`."""

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("isomorph", "torch", "torchvision", "timm", "numpy", "safetensors", "pydantic", "cyclopts")
EXTRAS = {"datasets": "data", "imagecorruptions-imaug": "corruptions", "tensorboard": "track"}
MIN_FREE_DISK = 10 * 2**30


def _installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torchvision_problem() -> str | None:
    """Return a message if torchvision's operators are missing, as when it was built for another torch; else None."""
    try:
        import torch
        import torchvision

        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:
        return (
            f"torchvision does not work with this torch ({' '.join(str(error).split())[:120]}); reinstall both together"
        )
    return None


def examine_environment() -> Iterator[tuple[str, str, bool]]:
    """Yield what was checked, the result, and True if it is good enough to run isomorph."""
    yield "python", platform.python_version(), True
    for package in PACKAGES:
        installed = _installed_version(package)
        yield package, installed or "missing: pip install -e .", installed is not None
    for package, extra in EXTRAS.items():
        yield package, _installed_version(package) or f"not installed (optional: pip install -e '.[{extra}]')", True
    problem = torchvision_problem()
    yield "torchvision operators", problem or "work", problem is None
    yield from _device_lines()
    free = shutil.disk_usage(".").free
    yield (
        "free disk here",
        f"{free / 2**30:.1f} GiB" + ("" if free > MIN_FREE_DISK else ": too little for data and checkpoints"),
        free > MIN_FREE_DISK,
    )


def _device_lines() -> Iterator[tuple[str, str, bool]]:
    """Yield the lines on threads and GPUs."""
    import torch

    yield "threads", str(torch.get_num_threads()), True
    if not torch.cuda.is_available():
        yield "GPU", "none: computing on the CPU", True
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True
