"""How far variances of BatchNorms are from those of all tokens when covariances are measured on a quarter of them.

    python benchmarks/tdrl_sampling.py [--epochs 1] [--rate 8e-3] [--draws 3]

Needs ISOMORPH_DATA with cifar10. Trains MobileOne-S0 with pyramids on 20,000 images, and runs it on a batch of 256
validation images in train mode, with statistics of all tokens. For every BatchNorm that follows linear maps of a
layer's input, the variance that a quarter of the tokens gives is compared with the true one, as the logarithm of their
ratio, for several limits of the factor by which values of the quarter are scaled (layers/marginals.py).
"""

import argparse
import math
import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

import isomorph.layers.affine_chain as affine_chain
import isomorph.layers.branched_conv as branched_conv
import isomorph.layers.moments as moments
import isomorph.layers.pyramid as pyramid
import isomorph.layers.pyramid_conv as pyramid_conv
from interleave import show, write
from isomorph.layers.tokens import Window, count_tokens
from parallel_arms import Arm, Images
from tdrl_study import Job

PART, BATCH = 0.25, 256
LIMITS = {"none: variances of the part": None, "at most 1": 1.0, "at most 1.5": 1.5, "at most 2": 2.0, "at most 4": 4.0}
"""What scales values of the part, at most so far."""


def measured_part(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a quarter of the tokens, drawn anew."""
    read, drawn = moments._draw_part(x, window, PART)
    if drawn is None and moments.has_patch_moments(window, x.shape[1]):
        return moments.measure_patches(read, window)
    count = count_tokens(read, window) if drawn is None else len(drawn)
    reading = moments._Reading(window, False, count, None)
    return moments.MeasureMoments.apply(read, drawn, x.dtype, reading)[1:]


class Watch:
    """Runs a network with statistics of all tokens, and notes the variances that quarters would give."""

    def __init__(self, draws: int) -> None:
        self.draws, self.covariances = draws, dict[int, Any]()
        self.ratios: dict[tuple[str, str], list[Tensor]] = defaultdict(list)

    def measure(self, x: Tensor, window: Window, group: Any = None, part: float = 1.0) -> moments.Moments:
        """In the place of `measure_moments`."""
        exact = MEASURE(x, window, group, 1.0)
        variance = exact.covariance.diagonal(dim1=-2, dim2=-1)
        found: dict[str, list[Tensor]] = {name: [] for name in LIMITS}
        for _ in range(self.draws):
            mean, covariance = measured_part(x, window)
            for name, limit in LIMITS.items():
                whole = None if limit is None else (covariance, mean, exact.mean, variance, limit**2)
                found[name].append(covariance if whole is None else moments.complete_covariance(*whole))
        self.covariances[id(exact.covariance)] = exact.covariance, found, window
        return exact

    def apply(self, norms: Any, maps: Any, given: Any) -> Any:
        """In the place of `apply_batchnorms`."""
        exact, found, window = self.covariances[id(given.covariance)]
        weights = [each.weight for each in maps]
        true = affine_chain.row_variances(weights, exact)
        kind = "1 x 1" if window.is_pointwise else "3 x 3"
        for name, each in found.items():
            estimates = torch.stack([affine_chain.row_variances(weights, covariance) for covariance in each])
            ratios = (estimates.clamp(min=1e-12) / true).log()[:, true > 1e-6]
            self.ratios[kind, name].append(ratios.flatten())
        return APPLY(norms, maps, given)

    def rows(self) -> list[dict[str, object]]:
        """One row for each kind of layer and limit."""
        rows = []
        for (kind, name), parts in sorted(self.ratios.items(), key=lambda item: item[0][0]):
            values = torch.cat(parts).double()
            figures = dict(mean=values.mean(), std=values.std(), lowest=values.min(), highest=values.max())
            rows.append(dict(layers=kind, scaled=name) | {k: round(float(v), 3) for k, v in figures.items()})
        return rows


MEASURE, APPLY = moments.measure_moments, affine_chain.apply_batchnorms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rate", type=float, default=8e-3)
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    images = Images(torch.device("cpu"))
    arm = Arm("mobileone_s0", "P-W2S", options.epochs, options.rate, 0)
    net: nn.Module = Job([arm], images, time.time() + math.inf).train(0, options.epochs)[0].trained()[0]
    watch = Watch(options.draws)
    branched_conv.measure_moments = pyramid_conv.measure_moments = watch.measure  # type: ignore[assignment]
    for module in (branched_conv, affine_chain, pyramid):
        module.apply_batchnorms = watch.apply  # type: ignore[assignment]
    torch.manual_seed(0)
    with torch.no_grad():
        net.train()(images.normalise(images.splits["val"][0][:BATCH]))
    rows = watch.rows()
    show("Logarithm of estimated by true variance", rows)
    print("wrote", write("tdrl_sampling", {"ratios": rows}))


if __name__ == "__main__":
    main()
