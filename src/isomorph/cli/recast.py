"""The recast command. It is imported when it is called, as its options are those of the registered rules."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import isomorph as iso
from isomorph.cli.app import loading
from isomorph.cli.json_output import print_json
from isomorph.cli.options import CheckpointOptions, Json, Model, Overwrite, Pretrained, Weights, check_limits, check_out
from isomorph.cli.rule_options import with_rule_options
from isomorph.cli.sizes import Size
from isomorph.errors import UserError
from isomorph.terminal_tables import count_of


@check_limits
@with_rule_options
def recast(
    model: Model,
    /,
    *,
    where: list[str],
    out: Path,
    rule: str = "ConvToGPSA",
    fields: Any = None,
    unstride: str | None = None,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    size: Size | None = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Recast modules of a model as gated attention, refined attention or pyramids; verify and save the new model.

    Example: isomorph recast resnet18 --where "layer4.*.conv2" --out t.safetensors

    Parameters
    ----------
    where
        Glob over module names, for example `layer4.*.conv2` or `blocks.*.attn`. May be given several times.
        LinearToPyramid also recasts q, k or v of a joint qkv layer: `blocks.[0-3].attn.v`.
    out
        File for the new checkpoint (.safetensors).
    unstride
        Glob over stages that lose their stride before recasting; this changes the model's function.
    size
        Height and width of the input to verify on; by default the model's own.
    """
    check_out(out, overwrite, Path(model))
    with loading():
        from isomorph.cli.open_models import open_given
        from isomorph.cli.progress import spinner
        from isomorph.evaluation.input_sizes import random_inputs
        from isomorph.surgery import compare_outputs, edits_since
        from isomorph.surgery.rule import build_rule
    chosen = build_rule(rule, **asdict(fields))
    with spinner("recast") as show_step:
        show_step(f"loading {model}")
        base = open_given(model, checkpoint, weights, pretrained)
        show_step(f"replacing {' '.join(where)}")
        if unstride:
            base = iso.unstride(base, unstride)
        new = iso.recast(base, chosen, where)
        show_step("comparing the outputs of both models in float32 and float64")
        report = compare_outputs(base, new, [random_inputs(1, base, size)])
    if not report.passed and chosen.keeps_function:
        raise UserError(str(report).splitlines()[0])
    iso.save(new, out)
    names = [name for edit in edits_since(new, base) for name in edit.names]
    if json_:
        print_json({"recast": names, "out": str(out), "report": report.as_dict()})
    else:
        note = "" if report.passed else "\n(with these options the outputs change: fine-tune the new model)"
        print(f"{iso.edits(new)[-1].rule} on {count_of(len(names), 'module')}\n{report}{note}\nwrote {out}")
