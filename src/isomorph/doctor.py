"""What this machine offers, and what is wrong with it, in lines a user can act on."""

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("isomorph", "torch", "torchvision", "timm", "numpy", "safetensors", "pydantic", "cyclopts", "torchmetrics")
EXTRAS = {"datasets": "data", "imagecorruptions-imaug": "corruptions", "onnxruntime": "export"}
ENOUGH_DISK = 10 * 2**30


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torchvision_problem() -> str | None:
    """Whether torchvision was built for another torch: its operators are then missing."""
    try:
        import torch
        import torchvision

        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:
        return (
            f"torchvision does not work with this torch ({' '.join(str(error).split())[:120]}); reinstall both together"
        )
    return None


def examine() -> Iterator[tuple[str, str, bool]]:
    """Lines of (what, finding, fine or not)."""
    yield "python", platform.python_version(), True
    for package in PACKAGES:
        found = installed(package)
        yield package, found or "missing: pip install isomorph", found is not None
    for package, extra in EXTRAS.items():
        yield package, installed(package) or f"not installed (optional: pip install 'isomorph[{extra}]')", True
    problem = torchvision_problem()
    yield "torchvision operators", problem or "work", problem is None
    yield from devices()
    free = shutil.disk_usage(".").free
    yield (
        "free disk here",
        f"{free / 2**30:.1f} GiB" + ("" if free > ENOUGH_DISK else ": little for data and checkpoints"),
        free > ENOUGH_DISK,
    )


def devices() -> Iterator[tuple[str, str, bool]]:
    import torch

    yield "threads", str(torch.get_num_threads()), True
    if not torch.cuda.is_available():
        yield "GPU", "none: computing on the CPU", True
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True
