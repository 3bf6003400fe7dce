"""The recast command. It is imported when it is called, as its options are those of the registered rules."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import isomorph as iso
from isomorph.cli.app import loading
from isomorph.cli.options import CheckpointOptions, Json, Model, Weights, check_limits
from isomorph.cli.rule_options import with_rule_options
from isomorph.cli.sizes import Size
from isomorph.errors import UserError


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
    pretrained: bool = True,
    size: Size | None = None,
    json_: Json = False,
) -> None:
    """Recast modules of a model as gated attention, refined attention or pyramids; verify and save the new model.

    Parameters
    ----------
    where
        Glob over module names, for example `layer4.*.conv2` or `blocks.*.attn`. May be given several times.
        LinearToPyramid also recasts q, k or v of a joint qkv layer: `blocks.[0-3].attn.v`.
    out
        File for the new checkpoint (.safetensors).
    unstride
        Glob over stages that lose their stride before recasting; this changes the model's function.
    pretrained
        Load the model's public weights; --no-pretrained starts from random ones.
    size
        Height and width of the input to verify on; by default the model's own.
    """
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} must end in .safetensors")
    if out.exists() and out.samefile(Path(model) if Path(model).exists() else out.parent):
        raise UserError(f"--out {out} is the model to recast; give another file")
    with loading():
        from isomorph.cli.open_models import open_given
        from isomorph.evaluation.random_inputs import random_images
        from isomorph.surgery import compare_outputs, edits_since
        from isomorph.surgery.recast import keeps_function
        from isomorph.surgery.rules.registry import build_rule
    chosen = build_rule(rule, **asdict(fields))
    base = open_given(model, checkpoint, weights, pretrained)
    if unstride:
        base = iso.unstride(base, unstride)
    new = iso.recast(base, chosen, where)
    report = compare_outputs(base, new, [random_images(1, base, size)])
    if not report.passed and keeps_function(chosen):
        raise UserError(str(report).splitlines()[0])
    iso.save(new, out)
    names = [name for edit in edits_since(new, base) for name in edit.names]
    if json_:
        print(json.dumps({"recast": names, "out": str(out), "report": report.as_dict()}))
    else:
        note = "" if report.passed else "\n(with these options the outputs change: fine-tune the new model)"
        print(f"{iso.edits(new)[-1].rule} on {len(names)} modules\n{report}{note}\nwrote {out}")
