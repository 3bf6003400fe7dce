"""The bench command."""

import sys
from typing import Annotated

from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show
from isomorph.errors import UserError
from isomorph.terminal_tables import say


@opt.command
def bench(
    model: str,
    /,
    *,
    against: Annotated[list[str] | None, opt.Several] = None,
    batch_size: Annotated[list[opt.WholeNumber], opt.Several] = [32],  # noqa: B006 (cyclopts shows it)
    size: opt.Sizes = None,
    seconds: float = 2.0,
    peak: bool = True,
    opening: opt.WeightsOptions = opt.WeightsOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Measure parameters, MACs, activations, peak memory and images per second, by batch size and image size.

    Example: isomorph bench resnet18 --against t.safetensors --batch-size 1 32

    Parameters
    ----------
    model
        Name of a timm model (its weights are not loaded), a checkpoint, or the folder of a run.
    against
        Further models. All are timed by turns in one process; the ratios are relative to MODEL.
    batch_size
        Images per batch; several values give several rows.
    size
        Height and width of the images; may be given several times (--size 160 --size 224 320). By default the
        model's own.
    seconds
        Seconds of timing for each model, image size and batch size; at least five passes are timed.
    peak
        Also measure peak memory.
    """
    names = [model, *(against or [])]
    if len(set(names)) < len(names):
        raise UserError(f"{max(names, key=names.count)} is given twice; --against takes models other than MODEL")
    with opt.loading():
        from isomorph.cli.open_models import open_given
        from isomorph.distributed import open_runtime
        from isomorph.evaluation.cost import cost_table
        from isomorph.evaluation.input_sizes import evaluation_config
        from isomorph.report.analyze_page import batch_cost_table, cost_problems, fixed_cost_table, pass_cost_table
    models = {name: open_given(name, opening, pretrained=False, among=names) for name in names}
    sizes = size or [evaluation_config(models[model])["input_size"][-2:]]
    for net in models.values():
        net.to(open_runtime(device).device)
    with progress_bar("measuring") as update:
        rows = list(cost_table(models, sizes, batch_size, seconds, peak, update))
    tables = filter(None, (fixed_cost_table(rows), pass_cost_table(rows)))
    show(json_, rows, *(part for table in tables for part in (table, "")), batch_cost_table(rows))
    for problem in cost_problems(rows):
        say(f"isomorph: {problem}", sys.stderr)
