"""Measure the cost table of models: one row for each image size, batch size and model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from isomorph.errors import UserError
from isomorph.evaluation.cost import count_branches, count_parameters, count_pass, has_pyramids
from isomorph.evaluation.input_sizes import fit_to_size, input_channels
from isomorph.evaluation.memory import peak_bytes, saved_bytes
from isomorph.evaluation.speed import measure_speeds

TableRow = dict[str, Any]
_PEAK_COLUMNS = {"peak_bytes": False, "training_peak_bytes": True}
"""Columns of peak memory; True for a forward and backward pass in training, False for an inference pass."""
T = TypeVar("T")
TableProgress = Callable[[float, int, str], None]
"""Called with the steps done, the number of steps, and the current step's description."""


def cost_table(
    models: Mapping[str, nn.Module],
    sizes: Sequence[tuple[int, int]],
    batch_sizes: Sequence[int] = (32,),
    seconds: float = 2.0,
    peak: bool = True,
    progress: TableProgress = lambda done, total, description: None,
) -> Iterator[TableRow]:
    """Yield one row for each image size, batch size and model: its cost, and its speed relative to the first model's.

    `models` maps names to models, `sizes` are (height, width). `seconds` is the time spent on timing one model at one
    batch size; `peak=False` skips peak memory. Keys of a row:

    - model, height, width, batch
    - parameters
    - macs, step_macs: multiply-accumulates of inference, per image and per pass; those per pass are products of
      weights and do not depend on the batch size
    - saved_bytes: memory per image that a training step saves for its backward pass
    - peak_bytes, training_peak_bytes: of a pass over the batch, without the model itself; None if not measured
    - images_per_second (median), its quartiles low and high, runs (number of passes)
    - ratio: images per second relative to the first model's at the same image and batch size
    - problem: why peak memory could not be measured; only if it failed
    - for a model with pyramids, training_macs and training_step_macs: those of a forward pass in training mode;
      and branch_macs: those per image in training when every branch is computed separately

    The models are timed in turn, in one process.

    Raises: UserError when a model does not accept an image size, or an image or batch size is not positive.

    >>> models = {"resnet20": timm.create_model("cifar_resnet20")}
    >>> rows = list(iso.cost_table(models, sizes=[(32, 32)], batch_sizes=[1], seconds=0, peak=False))
    >>> rows[0]["parameters"], rows[0]["macs"], rows[0]["ratio"]
    (269722, 40551040, 1.0)
    """
    if min((*batch_sizes, *(n for size in sizes for n in size)), default=0) < 1:
        raise UserError("sizes and batch sizes must be positive; give at least one of each")
    steps = _ProgressSteps(progress, len(sizes) * (len(models) + len(batch_sizes) * (1 + 2 * peak * len(models))))
    for size in sizes:
        size_text = "{} x {}".format(*size)
        resized = {name: fit_to_size(model, size) for name, model in models.items()}
        inputs = {name: (input_channels(model), *size) for name, model in resized.items()}
        static = {
            name: steps.run(f"{name} {size_text}: counting", static_cost, model, inputs[name])
            for name, model in resized.items()
        }
        for batch in batch_sizes:
            at = f"{size_text}, batch {batch}"
            speeds = steps.run(f"{at}: timing", measure_speeds, resized, inputs, batch, seconds)
            first = next(iter(speeds.values())).median
            for name, model in resized.items():
                row = {"model": name, "height": size[0], "width": size[1], "batch": batch} | static[name]
                median, low, high, runs = speeds[name]
                row |= {"images_per_second": median, "low": low, "high": high, "runs": runs, "ratio": median / first}
                row |= dict.fromkeys(_PEAK_COLUMNS)
                for column, training in _PEAK_COLUMNS.items() if peak else ():
                    description = f"{name} {at}: {'training ' * training}memory"
                    row |= steps.run(description, _peak_cell, column, model, inputs[name], batch, training)
                yield row


class _ProgressSteps:
    """A counter that reports progress before and after each step."""

    def __init__(self, report: TableProgress, total: int) -> None:
        self.report, self.total, self.done = report, total, 0

    def run(self, description: str, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work(*arguments)` as one step and return its result."""
        self.report(self.done, self.total, description)
        result = work(*arguments)
        self.done += 1
        self.report(self.done, self.total, description)
        return result


def _peak_cell(key: str, model: nn.Module, input_size: tuple[int, ...], batch: int, training: bool) -> TableRow:
    """Return the cell of one peak-memory column, and the problem if it could not be measured."""
    try:
        return {key: peak_bytes(model, input_size, batch, training)}
    except UserError as error:
        return {key: None, "problem": str(error)}


def static_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    """Return the costs that do not depend on the batch size: parameters, multiply-accumulates, saved memory."""
    macs = count_pass(model, input_size)
    # BatchNorm can fail to train on a batch of one image
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return {
        "parameters": count_parameters(model),
        "macs": macs.per_image,
        "step_macs": macs.per_pass,
        **(pyramid_cost(model, input_size) if has_pyramids(model) else {}),
        "saved_bytes": saved_bytes(model, input_size, 2 if has_batch_norm else 1),
    }


def pyramid_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    """Return the multiply-accumulates of a training forward pass with pyramids, in closed form and branch by branch."""
    macs = count_pass(model, input_size, training=True)
    return {
        "training_macs": macs.per_image,
        "training_step_macs": macs.per_pass,
        "branch_macs": count_branches(model, input_size),
    }
