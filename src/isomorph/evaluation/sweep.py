"""Cost tables: several models, batch sizes and resolutions, one row for each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from isomorph.errors import UserError
from isomorph.evaluation.cost import count_macs, count_parameters
from isomorph.evaluation.memory import peak_bytes, saved_bytes
from isomorph.evaluation.sizes import at_size, channels
from isomorph.evaluation.speed import speeds

Row = dict[str, Any]


def cost_rows(
    models: Mapping[str, nn.Module],
    sizes: Sequence[tuple[int, int]],
    batch_sizes: Sequence[int] = (32,),
    seconds: float = 2.0,
    peak: bool = True,
) -> Iterator[Row]:
    """One row for each resolution, batch size and model: what it costs, and its speed against the first model's.

    Keys: model, height, width, batch, parameters, macs (an image), saved_bytes (an image, kept for the backward pass),
    peak_bytes and training_peak_bytes (a pass of the batch, on top of the model; None where unavailable),
    images_per_second with its quartiles low and high and its runs, ratio (to the first model of the same row group).
    Models are timed in turns, within one process.

    Raises: UserError when a model does not take a size, or a size or batch is not positive.
    """
    if min((*batch_sizes, *(n for size in sizes for n in size)), default=0) < 1:
        raise UserError("sizes and batches must be positive, and there must be one of each at least")
    for size in sizes:
        sized = {name: at_size(model, size) for name, model in models.items()}
        inputs = {name: (channels(model), *size) for name, model in sized.items()}
        fixed = {name: fixed_cost(model, inputs[name]) for name, model in sized.items()}
        for batch in batch_sizes:
            found = speeds(sized, inputs, batch, seconds)
            first = next(iter(found.values())).median
            for name, model in sized.items():
                peaks = [
                    peak_bytes(model, inputs[name], batch, training) if peak else None for training in (False, True)
                ]
                speed = found[name]
                yield {
                    "model": name,
                    "height": size[0],
                    "width": size[1],
                    "batch": batch,
                    **fixed[name],
                    "peak_bytes": peaks[0],
                    "training_peak_bytes": peaks[1],
                    "images_per_second": speed.median,
                    "low": speed.low,
                    "high": speed.high,
                    "runs": speed.runs,
                    "ratio": speed.median / first,
                }


def fixed_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    """What does not depend on the batch."""
    return {
        "parameters": count_parameters(model),
        "macs": count_macs(model, input_size),
        "saved_bytes": saved_bytes(model, input_size, 2) if has_batch_norm(model) else saved_bytes(model, input_size),
    }


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a batch of one image may be too few to train on."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
