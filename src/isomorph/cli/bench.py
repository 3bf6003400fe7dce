"""The command that measures what models cost: bench."""

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from isomorph.checkpoints.open import open_model
from isomorph.cli.app import Device, Json, Weights, WholeNumber, app, check_limits, progress_bar
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.evaluation.cost_tables import cost_table
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.report.cost_tables import batch_cost_table, cost_problems, fixed_cost_table, pass_cost_table
from isomorph.report.terminal_tables import print_table


@app.command
@check_limits
def bench(
    model: str,
    /,
    *,
    against: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    batch_size: Annotated[list[WholeNumber], Parameter(consume_multiple=True)] = [32],  # noqa: B006 (cyclopts shows it)
    size: tuple[tuple[WholeNumber, WholeNumber], ...] = (),
    seconds: float = 2.0,
    peak: bool = True,
    weights: Weights = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """What a model costs: parameters, MACs, activations, peak memory, images a second, by batch and resolution.

    Parameters
    ----------
    model
        A timm model (weights do not matter here), a checkpoint written by isomorph, or the folder of a run.
    against
        Other models, timed in turns with it in the same process; ratios are to the first.
    batch_size
        Images per batch, one or several.
    size
        Height and width of the images, one pair or several (--size 160 160 --size 224 320); by default the model's own.
    seconds
        Time for each model at each size and batch, at least five passes.
    peak
        Measure peak memory too, on a CPU in a process of its own.
    """
    names = [model, *(against or [])]
    if len(set(names)) < len(names):
        raise UserError(f"{max(names, key=names.count)} is named twice; give --against other models")
    nets = {name: open_model(name, weights if name == model else None, pretrained=False) for name in names}
    sizes = size or [evaluation_config(nets[model])["input_size"][-2:]]
    for net in nets.values():
        net.to(open_runtime(device).device)
    with progress_bar("measuring") as tell:
        rows = list(cost_table(nets, sizes, batch_size, seconds, peak, tell))
    if json_:
        print(json.dumps(rows))
    else:
        for table in filter(None, (fixed_cost_table(rows), pass_cost_table(rows))):
            print_table(table)
            print()
        print_table(batch_cost_table(rows))
    for problem in cost_problems(rows):
        print(f"isomorph: {problem}", file=sys.stderr)
