"""Commands that change a model or compare two: recast, verify, fuse."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter, Token

import isomorph as iso
from isomorph.checkpoints.open import open_model, open_trained
from isomorph.cli.app import Json, Model, Weights, Whole, app, bounded
from isomorph.data import eval_loader, open_source
from isomorph.errors import UserError
from isomorph.evaluation import count_parameters, training_config
from isomorph.evaluation.inputs import standard_normal
from isomorph.suites.test_data import default_data
from isomorph.surgery import build_rule, compare_outputs, edits_since, fusible


def option(text: str, **more: Any) -> Parameter:
    """What the help says about an option."""
    return Parameter(help=text, **more)


def _whole_number(_: type, tokens: Sequence[Token]) -> int:
    """A whole number as it was typed. Raises: UserError for a fraction, which would be rounded."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise UserError(f"{tokens[0].keyword} {tokens[0].value} must be a whole number") from None


@Parameter(name="*")
@dataclass(frozen=True)
class RuleFields:
    """Fields of the rules, as options; those of other rules than the one chosen are refused."""

    init: Annotated[
        Literal["exact", "same-function", "paper"] | None,
        option(
            "exact keeps the function, verified (of pyramids and refined attention: same-function); paper starts as "
            "the paper does, to be trained."
        ),
    ] = None
    locality: Annotated[float | None, option("Overrides the init's locality (gated attention).")] = None
    gate: Annotated[float | None, option("Overrides the init's gate (gated attention).")] = None
    layout: Annotated[str | None, option("P-W2S, R-D2W1S, naive-W8 and the like (pyramids).")] = None
    rectify: Annotated[
        str | None,
        option(
            "What keeps the sum of the branches in bounds: paper, batchnorm, rescale or none; or one for each layer by "
            "its last name, like q=none,v=rescale (pyramids)."
        ),
    ] = None
    rescale_by: Annotated[
        float | None, option("N of the division by sqrt(N), by default the number of branches (pyramids).")
    ] = None
    ratio: Annotated[
        int | None,
        option("Maps for every head: 1 is talking heads, 0 no expansion (refined attention).", converter=_whole_number),
    ] = None
    kernel: Annotated[
        int | None,
        option("Size of the kernel on the maps, odd; 1 is none (refined attention).", converter=_whole_number),
    ] = None
    reduce: Annotated[bool | None, option("Reduce the maps to one for every head again (refined attention).")] = None
    span: Annotated[
        Literal["map", "spatial", "row+column"] | None,
        option("Where the kernel runs: over the map, over the image, or as a row and a column (refined attention)."),
    ] = None
    recompute: Annotated[
        bool | None,
        option("Compute the maps again in the backward pass instead of keeping them (refined attention)."),
    ] = None


@app.command
@bounded
def recast(
    model: Model,
    /,
    *,
    where: list[str],
    out: Path,
    rule: Literal["ConvToGPSA", "AttentionToGPSA", "LinearToPyramid", "AttentionToRefined"] = "ConvToGPSA",
    fields: RuleFields = RuleFields(),
    unstride: str | None = None,
    weights: Weights = None,
    pretrained: bool = True,
    size: tuple[Whole, Whole] | None = None,
    json_: Json = False,
) -> None:
    """Recast modules of a model as gated or refined attention or as pyramids, verify, and save it.

    Parameters
    ----------
    where
        Glob over module names, like `layer4.*.conv2` or `blocks.*.attn`; may be given several times. LinearToPyramid
        takes parts of a joint qkv too: `blocks.[0-3].attn.v`.
    out
        The new checkpoint (.safetensors).
    rule
        ConvToGPSA for the convolutions of a CNN, AttentionToGPSA for the attention of a ViT, LinearToPyramid for linear
        layers and convolutions, AttentionToRefined for the attention of a ViT.
    unstride
        Glob of stages to keep at their input's resolution first; this changes the function.
    pretrained
        Use the model's public weights.
    size
        Height and width to verify at; by default the model's own.
    """
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} must end in .safetensors")
    if out.exists() and out.samefile(Path(model) if Path(model).exists() else out.parent):
        raise UserError(f"--out {out} is the model to recast; give another name")
    made = build_rule(rule, **asdict(fields))
    base = open_model(model, weights, pretrained)
    if unstride:
        base = iso.unstride(base, unstride)
    new = iso.recast(base, made, where)
    report = compare_outputs(base, new, [standard_normal(1, base, size)])
    if not report.passed and fields.init != "paper" and (fields.locality, fields.gate) == (None, None):
        raise UserError(str(report).splitlines()[0])
    iso.save(new, out)
    names = [name for edit in edits_since(new, base) for name in edit.names]
    if json_:
        print(json.dumps({"recast": names, "out": str(out), "report": report.as_dict()}))
    else:
        note = "" if report.passed else "\n(such dials do not keep the function: fine-tune it)"
        print(f"{iso.edits(new)[-1].rule} on {len(names)} modules\n{report}{note}\nwrote {out}")


@app.command
@bounded
def verify(
    original: str,
    other: str,
    /,
    *,
    weights: Weights = None,
    size: list[tuple[Whole, Whole]] | None = None,
    batch: Whole = 2,
    seeds: list[Whole] | None = None,
    data: str | None = None,
    root: Path | None = None,
    atol: float | None = None,
    json_: Json = False,
) -> None:
    """Compare two models on the same inputs, in float32 and float64; exit 2 when they differ.

    Parameters
    ----------
    original
        A timm model or a checkpoint written by isomorph.
    other
        The model made from it.
    weights
        Weights of `original`.
    size
        Height and width of an input; may be given several times. By default the model's own.
    batch
        Images per input.
    seeds
        Further standard normal inputs of every size.
    data
        Verify on the first test images of this source instead of noise.
    root
        Folder of the data.
    atol
        Largest difference allowed; by default the rule's.
    """
    a, b = open_model(original, weights), open_model(other)
    if data:
        config = training_config(a)
        inputs = [next(iter(eval_loader(open_source(data, "test", root), config, max(batch, 1))))[0]]
    else:
        inputs = [standard_normal(batch, a, hw) for hw in size] if size else [standard_normal(batch, a)]
    report = compare_outputs(a, b, inputs, atol=atol, seeds=seeds or [1])
    print(json.dumps(report.as_dict()) if json_ else report)
    if not report.passed:
        raise UserError(str(report).splitlines()[0])


@app.command
@bounded
def fuse(
    checkpoint: Path,
    /,
    *,
    out: Path | None = None,
    recalibrate: Whole = 0,
    data: str | None = None,
    root: Path | None = None,
    batch_size: Whole = 128,
    average: bool = True,
    json_: Json = False,
) -> None:
    """Fuse a trained model into its thin form, verify, and save it; it can be fine-tuned again.

    Parameters
    ----------
    checkpoint
        A checkpoint written by isomorph, or the folder of a run, complete or not.
    out
        The fused checkpoint; by default beside the other, as NAME-fused.safetensors.
    recalibrate
        First take the BatchNorm statistics anew from so many batches of training images.
    data
        Source of these images; by default what the model was trained on.
    root
        Folder of the data.
    batch_size
        Images per batch.
    average
        Take the averaged weights of an unfinished run, where it has any.
    """
    if recalibrate < 0 or batch_size < 2:
        raise UserError("--recalibrate must not be negative and --batch-size be at least 2")
    if (data or root) and not recalibrate:
        raise UserError("--data and --root go with --recalibrate, which says from how many batches")
    whole = checkpoint.resolve()
    out = out or whole.with_name(f"{whole.name.removesuffix('.safetensors')}-fused.safetensors")
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} must end in .safetensors")
    if out.exists() and checkpoint.exists() and out.samefile(checkpoint):
        raise UserError(f"--out {out} is the model to fuse; give another name")
    wide = open_trained(checkpoint, average)
    if not fusible(wide):
        raise UserError(
            f"{checkpoint} has nothing to fuse; fused forms exist of pyramids (LinearToPyramid, "
            "tdrl_vit_*), of norms in convolutional blocks (coatnet_*) and of norms on maps (refined_vit_*_released)"
        )
    if recalibrate:
        source = open_source(data or default_data(wide), "train", root)
        shuffled = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
        drawn = source.subset(shuffled[: recalibrate * batch_size].tolist())
        config = training_config(wide)
        wide = iso.recalibrate(wide, eval_loader(drawn, config, batch_size))
    thin = iso.fuse(wide)
    report = compare_outputs(wide, thin, [standard_normal(1, wide)])
    if not report.passed:
        raise UserError(str(report).splitlines()[0])
    iso.save(thin, out)
    before, after = count_parameters(wide), count_parameters(thin)
    if json_:
        print(json.dumps({"out": str(out), "before": before, "after": after, "report": report.as_dict()}))
    else:
        print(f"{report}\n{before:,} parameters became {after:,}\nwrote {out}")
