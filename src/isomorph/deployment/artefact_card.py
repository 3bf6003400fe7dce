"""The model card of an exported file that is shared: what it expects, and how to run it without isomorph."""

from collections.abc import Mapping

import isomorph.deployment.model_card as cards
from isomorph.deployment.artefact import Artefact
from isomorph.deployment.metadata import FORMAT_KEY

_KINDS = {"onnx": "ONNX", "pt2": "a PyTorch program"}
_RUN = {
    "onnx": """```python
import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
metadata = session.get_modelmeta().custom_metadata_map
mean, std = (np.array(json.loads(metadata[key]), np.float32)[:, None, None] for key in ("mean", "std"))
images = (pixels / 255 - mean) / std  # pixels: N x {channels} x {height} x {width}
(logits,) = session.run(["logits"], {{"images": images.astype(np.float32)}})
```""",
    "pt2": """```python
import torch

program = torch.export.load("{file}").module()  # PyTorch may run code that the file contains
logits = program(images)  # normalised: N x {channels} x {height} x {width}
```""",
}
"""How a file of each format is run with its runtime alone."""


def artefact_card(
    artefact: Artefact, file: str, name: str, training: cards.Training | None, results: Mapping[str, float]
) -> str:
    """Return the text of the model card of an exported file.

    Its metrics are the given ones alone: those of a run were measured before exporting, and perhaps before rounding.
    """
    kind = file.rpartition(".")[2]
    channels, height, width = artefact.metadata["input_size"]
    usage = _RUN[kind].format(file=file, channels=channels, height=height, width=width)
    parts = [
        f"---\n{cards.card_metadata('isomorph', [kind] if kind == 'onnx' else [])}---",
        f"# {name.rpartition('/')[2]}",
        _summary(artefact, file),
        f"## Use\n\n```bash\nhf download {name} {file} --local-dir .\n```\n\nWithout isomorph:\n\n{usage}",
        f"To measure its accuracy:\n\n```bash\nisomorph evaluate {file}\n```",
        cards.results_section(artefact, results, None, results),
        cards.training_section(training),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _summary(artefact: Artefact, file: str) -> str:
    """Return what the file is, and the images that it takes."""
    known = artefact.metadata
    classes = f" for {artefact.num_classes:,} classes" if artefact.num_classes else ""
    rounded = f", rounded to 8-bit integers ({known['quantization']})" if "quantization" in known else ""
    numbers = "any number of images" if "batch" in known.get("dynamic", ()) else "one image at a time"
    multiple = known["size_multiple"] or 1
    steps = f", and other sizes in steps of {multiple} px" if "size" in known.get("dynamic", ()) else ""
    exported = f"exported as {_KINDS[file.rpartition('.')[2]]} by isomorph {known[FORMAT_KEY]}"
    return (
        f"`{file}`: a `{known.get('architecture', 'model')}`{classes}, {exported}{rounded}. It takes {numbers}: "
        f"{cards.describe_images(artefact)}{steps}."
    )
