"""All tables on a GPU, in float32 and under bfloat16 autocast, in under ten minutes.

python benchmarks/gpu.py
"""

import sys

import torch

import coatnet
import convit
import gpsa
import refiner
import tdrl
from interleave import show, write


def main():
    if not torch.cuda.is_available():
        sys.exit("no GPU here; python benchmarks/gpsa.py measures the CPU")
    torch.manual_seed(0)
    device, found = torch.device("cuda"), {}
    for precision in ("float32", "bfloat16"):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            for title, table in (gpsa.TABLES | convit.TABLES | tdrl.TABLES | refiner.TABLES | coatnet.TABLES).items():
                batched = table in (*tdrl.TABLES.values(), *coatnet.TABLES.values())
                sizes = dict(batches=(32, 128)) if batched else {}
                found[f"{title} ({precision})"] = table(device, rounds=5, **sizes)
                show(f"{title} ({precision})", found[f"{title} ({precision})"])
    print(f"\nwrote {write('gpu', found)}")


if __name__ == "__main__":
    main()
