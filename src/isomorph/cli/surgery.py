"""The recast, verify and fuse commands."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import isomorph as iso
from isomorph.checkpoints.open import open_model, open_trained
from isomorph.cli.app import Json, Model, Weights, WholeNumber, app, check_limits
from isomorph.cli.rule_options import with_rule_options
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.errors import UserError
from isomorph.evaluation.cost import count_parameters
from isomorph.evaluation.input_sizes import training_config
from isomorph.evaluation.random_inputs import random_images
from isomorph.suites.test_data import default_data
from isomorph.surgery import compare_outputs, edits_since, fusible_modules
from isomorph.surgery.recast import keeps_function
from isomorph.surgery.rules.registry import build_rule


@app.command
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
    pretrained: bool = True,
    size: tuple[WholeNumber, WholeNumber] | None = None,
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
    chosen = build_rule(rule, **asdict(fields))
    base = open_model(model, weights, pretrained)
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


@app.command
@check_limits
def verify(
    original: str,
    other: str,
    /,
    *,
    weights: Weights = None,
    size: list[tuple[WholeNumber, WholeNumber]] | None = None,
    batch: WholeNumber = 2,
    seeds: list[WholeNumber] | None = None,
    data: str | None = None,
    root: Path | None = None,
    atol: float | None = None,
    json_: Json = False,
) -> None:
    """Compare the outputs of two models on the same inputs, in float32 and float64; exit with 2 if they differ.

    Parameters
    ----------
    original
        A timm model or a checkpoint written by isomorph.
    other
        The model made from it.
    weights
        Checkpoint with the weights of ORIGINAL, instead of its public ones.
    size
        Height and width of the inputs; may be given several times. By default the model's own.
    batch
        Images per input.
    seeds
        Seeds of additional standard normal inputs, one input for each size and seed; by default 1.
    data
        Compare on the first test images of this data source instead of random inputs.
    root
        Folder of the data.
    atol
        Largest absolute difference allowed; by default that of the rule that made OTHER.
    """
    first, second = open_model(original, weights), open_model(other)
    if data:
        config = training_config(first)
        inputs = [next(iter(eval_loader(open_source(data, "test", root), config, max(batch, 1))))[0]]
    else:
        inputs = [random_images(batch, first, hw) for hw in size] if size else [random_images(batch, first)]
    report = compare_outputs(first, second, inputs, atol=atol, seeds=seeds or [1])
    print(json.dumps(report.as_dict()) if json_ else report)
    if not report.passed:
        raise UserError(str(report).splitlines()[0])


@app.command
@check_limits
def fuse(
    checkpoint: Path,
    /,
    *,
    out: Path | None = None,
    recalibrate: WholeNumber = 0,
    data: str | None = None,
    root: Path | None = None,
    batch_size: WholeNumber = 128,
    average: bool = True,
    json_: Json = False,
) -> None:
    """Fuse the branches of a trained model, verify and save the fused model, which can be fine-tuned again.

    Parameters
    ----------
    checkpoint
        A checkpoint written by isomorph, or the folder of a run, finished or not.
    out
        File for the fused checkpoint; by default NAME-fused.safetensors in the same folder.
    recalibrate
        Number of batches of training images to measure BatchNorm statistics on again before fusing; 0 for none.
    data
        Data source of these images; by default the one the model was trained on.
    root
        Folder of the data.
    batch_size
        Images per batch.
    average
        Of an unfinished run, fuse the averaged weights if it has any.
    """
    if recalibrate < 0 or batch_size < 2:
        raise UserError("--recalibrate must be at least 0 and --batch-size at least 2")
    if (data or root) and not recalibrate:
        raise UserError("--data and --root need --recalibrate, the number of batches to measure on")
    resolved = checkpoint.resolve()
    out = out or resolved.with_name(f"{resolved.name.removesuffix('.safetensors')}-fused.safetensors")
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} must end in .safetensors")
    if out.exists() and checkpoint.exists() and out.samefile(checkpoint):
        raise UserError(f"--out {out} is the model to fuse; give another file")
    model = open_trained(checkpoint, average)
    if not fusible_modules(model):
        raise UserError(
            f"{checkpoint} has nothing to fuse; models that can be fused have pyramids (LinearToPyramid, "
            "tdrl_vit_*), norms in convolutional blocks (coatnet_*) or norms on attention maps (refined_vit_*_released)"
        )
    if recalibrate:
        source = open_source(data or default_data(model), "train", root)
        shuffled = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
        sample = source.subset(shuffled[: recalibrate * batch_size].tolist())
        model = iso.recalibrate(model, eval_loader(sample, training_config(model), batch_size))
    fused = iso.fuse(model)
    report = compare_outputs(model, fused, [random_images(1, model)])
    if not report.passed:
        raise UserError(str(report).splitlines()[0])
    iso.save(fused, out)
    before, after = count_parameters(model), count_parameters(fused)
    if json_:
        print(json.dumps({"out": str(out), "before": before, "after": after, "report": report.as_dict()}))
    else:
        print(f"{report}\n{before:,} parameters before, {after:,} after fusing\nwrote {out}")
