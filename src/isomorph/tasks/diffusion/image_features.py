"""Features of images by which sets of images are compared: of Inception-v3, as for FID, or of another network."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.checkpoints.open import open_model
from isomorph.errors import UserError, install_hint
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.evaluation.suites.robustness.results import weights_hash
from isomorph.models.download import is_connection_error, is_reachable

INCEPTION = "inception"
"""Name of the features of FID."""
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
"""Name of torch-fidelity's file with the weights of Inception-v3."""
NO_INCEPTION = (
    f"the weights of Inception-v3 cannot be downloaded; give torch-fidelity's file {INCEPTION_FILE} as --weights, or "
    "the features of another network as --features"
)
"""Message without a network and without the file."""


class Extractor(NamedTuple):
    """A network that turns images into features, with the name and a hash of its weights."""

    name: str
    network: nn.Module
    """Called with (B, 3, H, W) uint8; returns (B, features)."""
    fingerprint: str

    @torch.no_grad()
    def extract(self, batches: Iterable[Tensor]) -> Tensor:
        """Return the features of batches of images. Shape: (B, 3, H, W) uint8 each -> (N, features), float32"""
        device = next(self.network.parameters()).device
        return torch.cat([self.network(batch.to(device)).float().cpu() for batch in batches])


def open_extractor(features: str, weights: Path | None, device: torch.device) -> Extractor:
    """Open Inception-v3 (`inception`), or any classifier by its timm name, checkpoint or run.

    Raises: UserError without torch-fidelity, or when the weights are missing, damaged or cannot be downloaded.
    """
    if features == INCEPTION:
        network: nn.Module = InceptionFeatures(weights)
    else:
        network = PooledFeatures(open_model(features, weights))
    network = network.requires_grad_(False).eval().to(device)
    return Extractor(features, network, weights_hash(network))


class InceptionFeatures(nn.Module):
    """The pooled features of Inception-v3 in TensorFlow's form, in torch-fidelity's implementation and weights.

    Shape: (B, 3, H, W) uint8 -> (B, 2048)
    """

    def __init__(self, weights: Path | None) -> None:
        super().__init__()
        require_fidelity()
        from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3

        if weights is not None:
            _check_inception_file(weights)
        elif not (Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE).is_file() and not is_reachable(
            URL_INCEPTION_V3
        ):
            raise UserError(NO_INCEPTION)
        build = partial(FeatureExtractorInceptionV3, "inception-v3-compat", ["2048"], verbose=False)
        try:
            self.inception = build(feature_extractor_weights_path=None if weights is None else str(weights))
        except Exception as error:
            if weights is None and is_connection_error(error):
                raise UserError(NO_INCEPTION) from None
            raise UserError(f"{weights} does not have the weights of torch-fidelity's Inception-v3") from None

    def forward(self, x: Tensor) -> Tensor:
        return self.inception(x)[0]


def require_fidelity() -> None:
    """Raise UserError if torch-fidelity is missing."""
    try:
        import torch_fidelity  # noqa: F401
    except ImportError:
        raise UserError(f"comparing sets of images needs torch-fidelity; {install_hint('diffusion')}") from None


def _check_inception_file(path: Path) -> None:
    """Raise UserError unless the file holds tensors alone: torch-fidelity would run any code in it."""
    if not path.is_file():
        raise UserError(f"--weights {path} does not exist; give torch-fidelity's {INCEPTION_FILE}")
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except Exception:
        raise UserError(f"--weights {path} is not a file of weights; give torch-fidelity's {INCEPTION_FILE}") from None


class PooledFeatures(nn.Module):
    """The features before the classifier of a network, of images resized and normalised as it expects.

    Shape: (B, 3, H, W) uint8 -> (B, features)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not hasattr(model, "forward_head"):
            raise UserError(f"{type(model).__name__} has no features before a classifier; give a timm classifier")
        self.model, config = model, evaluation_config(model)
        self.size = tuple(config["input_size"][-2:])
        self.register_buffer("mean", torch.tensor(config["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(config["std"])[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x / 255
        if tuple(x.shape[-2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        model: Any = self.model
        return model.forward_head(model.forward_features((x - self.mean) / self.std), pre_logits=True)
