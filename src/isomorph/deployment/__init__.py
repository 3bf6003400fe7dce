"""Models that run elsewhere: export to ONNX and torch.export, and opening what was exported."""

from isomorph.deployment.artefact import Artefact, open_artefact
from isomorph.deployment.export import ExportReport, export
from isomorph.deployment.hub import push, save_for_hub
from isomorph.deployment.quantize import QuantizedLayer, QuantizeReport, quantize

__all__ = [
    "Artefact",
    "ExportReport",
    "QuantizeReport",
    "QuantizedLayer",
    "export",
    "open_artefact",
    "push",
    "quantize",
    "save_for_hub",
]


def __dir__() -> list[str]:
    return sorted(__all__)
