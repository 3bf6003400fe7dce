"""Cost tables: several models, batch sizes and resolutions, one row for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from isomorph.errors import UserError
from isomorph.evaluation.cost import count_branches, count_parameters, count_pass, has_pyramids
from isomorph.evaluation.input_sizes import fit_to_size, input_channels
from isomorph.evaluation.peak_memory import PeakMeter, peak_bytes
from isomorph.evaluation.saved_memory import saved_bytes
from isomorph.evaluation.speed import Speed, measure_speeds

CostRow = dict[str, Any]
_PEAK_COLUMNS = {"peak_bytes": False, "training_peak_bytes": True}
"""Of which pass: of one in training mode, with its backward pass, or of inference."""
T = TypeVar("T")
TableProgress = Callable[[float, int, str], None]
"""Told steps done, steps in all, and what is being done."""


def cost_table(
    models: Mapping[str, nn.Module],
    sizes: Sequence[tuple[int, int]],
    batch_sizes: Sequence[int] = (32,),
    seconds: float = 2.0,
    peak: bool = True,
    progress: TableProgress = lambda done, total, doing: None,
) -> Iterator[CostRow]:
    """One row for each resolution, batch size and model: what it costs, and its speed against the first model's.

    Keys: model, height, width, batch, parameters, macs (inference, an image), step_macs (inference, a pass, whatever
    its batch: products of weights), saved_bytes (an image, kept for the backward pass),
    peak_bytes and training_peak_bytes (a pass of the batch, on top of the model; None where unavailable),
    images_per_second with its quartiles low and high and its runs, ratio (to the first model of the same row group);
    problem: why a peak could not be measured, where one failed. Of a model with pyramids also training_macs and
    training_step_macs (its forward pass in training mode) and branch_macs (an image, in training branch by branch).
    Models are timed in turns, within one process.

    Raises: UserError when a model does not take a size, or a size or batch is not positive.
    """
    if min((*batch_sizes, *(n for size in sizes for n in size)), default=0) < 1:
        raise UserError("sizes and batches must be positive, and there must be one of each at least")
    steps = _ProgressSteps(progress, len(sizes) * (len(models) + len(batch_sizes) * (1 + 2 * peak * len(models))))
    with PeakMeter() as meter:
        for size in sizes:
            at = "{} x {}".format(*size)
            sized = {name: fit_to_size(model, size) for name, model in models.items()}
            inputs = {name: (input_channels(model), *size) for name, model in sized.items()}
            fixed = {
                name: steps.run(f"{name} {at}: counting", static_cost, model, inputs[name])
                for name, model in sized.items()
            }
            for batch in batch_sizes:
                found = steps.run(f"{at}, batch {batch}: timing", measure_speeds, sized, inputs, batch, seconds)
                first = next(iter(found.values())).median
                for name, model in sized.items():
                    place = {"model": name, "height": size[0], "width": size[1], "batch": batch}
                    row = place | fixed[name] | _speed_cells(found[name], first) | dict.fromkeys(_PEAK_COLUMNS)
                    for key, training in _PEAK_COLUMNS.items() if peak else ():
                        doing = f"{name} {at}, batch {batch}: memory{' to train' * training}"
                        row |= steps.run(doing, _peak_cell, key, model, inputs[name], batch, training, meter)
                    yield row


class _ProgressSteps:
    """Tells of each step of the work before it is done, and of the end."""

    def __init__(self, tell: TableProgress, total: int) -> None:
        self.tell, self.total, self.done = tell, total, 0

    def run(self, doing: str, work: Callable[..., T], *arguments: Any) -> T:
        """What the work gives."""
        self.tell(self.done, self.total, doing)
        found = work(*arguments)
        self.done += 1
        self.tell(self.done, self.total, doing)
        return found


def _peak_cell(
    key: str, model: nn.Module, input_size: tuple[int, ...], batch: int, training: bool, meter: PeakMeter
) -> CostRow:
    """A peak of a row, or why it could not be measured."""
    try:
        return {key: peak_bytes(model, input_size, batch, training, meter)}
    except UserError as error:
        return {key: None, "problem": str(error)}


def _speed_cells(speed: Speed, first: float) -> CostRow:
    """The speed of a row, and beside the first model's."""
    return {
        "images_per_second": speed.median,
        "low": speed.low,
        "high": speed.high,
        "runs": speed.runs,
        "ratio": speed.median / first,
    }


def static_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    """What does not depend on the batch."""
    macs = count_pass(model, input_size)
    return {
        "parameters": count_parameters(model),
        "macs": macs.image,
        "step_macs": macs.step,
        **(pyramid_cost(model, input_size) if has_pyramids(model) else {}),
        "saved_bytes": saved_bytes(model, input_size, 2) if _has_batch_norm(model) else saved_bytes(model, input_size),
    }


def pyramid_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    """Multiply-accumulates of a forward pass in training, in closed form and branch by branch."""
    macs = count_pass(model, input_size, training=True)
    return {
        "training_macs": macs.image,
        "training_step_macs": macs.step,
        "branch_macs": count_branches(model, input_size),
    }


def _has_batch_norm(model: nn.Module) -> bool:
    """Whether a batch of one image may be too few to train on."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
