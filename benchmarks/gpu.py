"""All tables on a GPU, in float32 (no TF32) and under bfloat16 autocast, with batches that fill it.

    python benchmarks/gpu.py [--precisions float32 bfloat16] [--only TABLE ...] [--without TABLE ...]

Results are written after every table; a table that fails is named, and the others go on.
"""

import argparse
import sys
import time

import torch

import coatnet
import convit
import gpsa
import refiner
import tdrl
from interleave import show, update

SIZES = {
    gpsa: dict(scale=4),
    convit: {},
    tdrl: dict(batches=(128, 512)),
    refiner: dict(scale=4),
    coatnet: dict(batches=(1, 32, 128)),
}
"""Batches of each file's tables."""


def tables(only="", without=None):
    """Yield (title, table, its sizes)."""
    for module, sizes in SIZES.items():
        if only not in module.__name__:
            continue
        for title, table in module.TABLES.items():
            if without and title.startswith(without):
                continue
            yield title, table, dict(batches=(32, 64)) if table is convit.network_table else sizes


def exact_float32():
    """Turn TF32 off, so that equalities hold to float32's rounding and every contender has the same precision."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--precisions", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--only", default="", help="tables of files whose name contains this")
    parser.add_argument("--without", help="tables whose title begins with this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here; python benchmarks/gpsa.py measures the CPU")
    exact_float32()
    device, found, failed = torch.device("cuda"), {}, []
    for precision in options.precisions:
        for title, table, sizes in tables(options.only, options.without):
            name, start = f"{title} ({precision})", time.perf_counter()
            torch.manual_seed(0)
            try:
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
                    found[name] = table(device, rounds=7, **sizes)
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                print(failed[-1], file=sys.stderr)
                continue
            finally:
                torch.cuda.empty_cache()
            show(f"{name}, {time.perf_counter() - start:.0f} s", found[name])
            update("gpu", {name: found[name]})
    sys.exit("\n".join(failed) or None)


if __name__ == "__main__":
    main()
