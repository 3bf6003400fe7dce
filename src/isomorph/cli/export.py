"""The export, quantize and push commands."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

import isomorph as iso
from isomorph.checkpoints.paths import NEW_PATHS, check_repository, require_writable
from isomorph.cli import options as opt
from isomorph.cli.output import show, spinner, track_steps
from isomorph.errors import UserError
from isomorph.terminal_tables import metric_table


@opt.group
class FileOptions:
    """The form of an exported file.

    Parameters
    ----------
    dynamic
        What stays open: the number of images (batch), their height and width (size), both, or nothing (none); of texts
        their number and length.
    opset
        Operator set of the ONNX file; by default 20.
    """

    dynamic: Literal["batch", "batch,size", "size", "none"] = "batch"
    opset: Literal[18, 19, 20, 21, 22, 23] | None = None
    overwrite: opt.Overwrite = False


@opt.command
def export(
    model: opt.Model,
    /,
    *,
    format_: Literal["onnx", "pt2"] | None = None,
    out: Path | None = None,
    size: opt.Size | None = None,
    atol: float = 1e-4,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    file: FileOptions = FileOptions(),  # noqa: B008
    json_: opt.Json = False,
) -> None:
    """Export a model as an ONNX file or a PyTorch program that runs without isomorph; fuse it first, and check it.

    The exported file is run on random images of several shapes and compared with the model in float32 and float64. It
    is written only if it agrees. `isomorph evaluate` measures the accuracy of an exported classifier of images.

    Example: isomorph export runs/tdrl --format onnx --dynamic batch,size

    Parameters
    ----------
    format_
        onnx (onnxruntime and other programs run it) or pt2 (PyTorch runs it, with torch.export.load); by default that
        of --out, else onnx.
    out
        File to write; by default the name of MODEL, with .onnx or .pt2, in its folder.
    size
        Height and width of the images; by default the model's own.
    atol
        Largest difference from the model's outputs, relative to the largest output.
    """
    if Path(model).suffix in opt.EXPORTED:
        raise UserError(f"{model} is an exported model; give the checkpoint that it was made from")
    path = out or opt.out_next_to(model, f".{format_ or 'onnx'}")
    if format_ and path.suffix != f".{format_}":
        raise UserError(f"--out {path} must end in .{format_}, or leave --format out")
    if file.opset and path.suffix == ".pt2":
        raise UserError("--opset is for ONNX files; leave it out, or give --format onnx")
    if not atol > 0:
        raise UserError(f"--atol {atol:g} must be above 0")
    opt.check_out(path, file.overwrite, Path(model), opt.EXPORTED)
    with spinner("export") as show_step:
        net = _open(model, opening, path, file, show_step)
        report = _export(net, path, size=size, atol=atol, progress=show_step, **vars(file))
    show(json_, report.as_dict(), f"{report}\nwrote {path}")


def _open(model: str, opening: opt.OpenOptions, path: Path, file: FileOptions, show_step: Any) -> Any:
    """Open the model to export, after checking that the file can be written."""
    if path.exists() and not file.overwrite:
        raise UserError(f"{path} exists; give --overwrite to replace it, or another file")
    require_writable(path)
    with opt.loading():
        from isomorph.cli.open_models import open_classifier
    show_step(f"loading {model}")
    return open_classifier(model, opening)


def _export(net: Any, path: Path, **given: Any) -> Any:
    """Export a model, and return the report. Raises: UserError of one line when the file deviates."""
    from isomorph.surgery import NotEqual

    try:
        return iso.export(net, path, **given)
    except NotEqual as error:
        raise UserError(f"{str(error.report).splitlines()[0]}; no file was written (see --atol)") from None


@opt.command
def quantize(
    model: opt.Model,
    /,
    *,
    test: opt.DataOptions = opt.DataOptions(),  # noqa: B008
    images: opt.WholeNumber = 512,
    weights_only: opt.Flag = False,
    float_layers: Annotated[list[str] | None, Parameter(negative="")] = None,
    weight_bits: Literal[7, 8] | None = None,
    batch_size: opt.WholeNumber = 100,
    out: Path | None = None,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008
    file: FileOptions = FileOptions(),  # noqa: B008
    json_: opt.Json = False,
) -> None:
    """Quantise a model to 8-bit integers, as an ONNX file; calibrate it on training images, and test it.

    The model is fused first. Printed are the layers with their precision, top-1 before and after on test images, the
    signal-to-noise ratio of the outputs, size and speed. `isomorph evaluate` opens the file.

    Example: isomorph quantize runs/tdrl --images 512 --out thin-int8.onnx

    Parameters
    ----------
    images
        Number of training images of --data to calibrate on.
    weights_only
        Only weights are 8-bit integers, activations stay in float: a small file that computes in float.
    float_layers
        Globs over names of layers that stay in float; may be given several times.
    weight_bits
        Bits of weights. 7, the default, is exact on every processor; 8 needs one that multiplies 8-bit integers
        without overflow (VNNI, ARM), and is the default with --weights-only.
    batch_size
        Images per batch.
    out
        File to write; by default NAME-int8.onnx in the folder of MODEL.
    """
    path = out or opt.out_next_to(model, "-int8.onnx")
    opt.check_out(path, file.overwrite, Path(model), (".onnx",))
    chosen = dict(weights_only=weights_only, float_layers=float_layers or (), weight_bits=weight_bits)
    with spinner("quantize") as show_step:
        net = _open(model, opening, path, file, show_step)
        train, tested = _open_images(net, test, images, batch_size if "batch" in file.dynamic else 1)
        report = iso.quantize(net, train, path, progress=show_step, **vars(file), **chosen)  # type: ignore[arg-type]
    accuracy = {}
    for name, each in (("float", net), ("int8", iso.deployment.open_artefact(path))):
        found = iso.evaluate(each, track_steps(tested, f"{name} on test images", len(tested)))
        accuracy[name] = {key: round(found[key], 4) for key in ("top1", "nll", "images")}
    before, after = (metric_table(name, row) for name, row in accuracy.items())
    table = [[*left, right] for left, (_, right) in zip(before, after, strict=True)]
    show(json_, report.as_dict() | {"accuracy": accuracy}, str(report), table, f"wrote {report.path}")


def _open_images(net: Any, given: opt.DataOptions, images: int, batch_size: int) -> tuple[Any, Any]:
    """Return loaders of random training images to calibrate on, and of test images, prepared as for a test.

    Raises: UserError when there are no such images, or the data has other classes than the model.
    """
    from isomorph.data.loaders import eval_loader
    from isomorph.data.sources import spaced_images
    from isomorph.evaluation.model_data import evaluation_data, open_split, sample_images

    test, config = evaluation_data(net, given.data, given.root, test_fraction=given.split)
    train = sample_images(open_split(net, "train", given.data, given.root, given.split), images)
    return eval_loader(train, config, batch_size), eval_loader(
        spaced_images(test, given.max_images), config, batch_size
    )


@opt.command
def push(
    model: str,
    name: str,
    /,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    replace_card: bool = False,
    out: Path | None = None,
    overwrite: opt.Overwrite = False,
    checkpoint: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    json_: opt.Json = False,
) -> None:
    """Upload a model to the Hugging Face hub, with a model card, for `hf-hub:OWNER/NAME` in every command and in timm.

    Example: isomorph push runs/tcnn me/tcnn --private

    Parameters
    ----------
    model
        The folder of a run, or a checkpoint of isomorph or of another program.
    name
        Its name on the hub, OWNER/NAME.
    private
        Create the repository for its owner only.
    revision
        Branch to upload to; created if there is none. By default main.
    message
        Message of the commit.
    replace_card
        Replace a model card (README.md) that is there already; without it, one is kept as it is.
    out
        Write the files to this folder instead of uploading them.
    """
    check_repository(name)
    _check_out(out, overwrite, {"--private": private, "--revision": revision, "--message": message})
    with opt.loading():
        from isomorph.cli.open_models import find_recipe, open_given
        from isomorph.deployment.hub import push as upload
        from isomorph.deployment.hub import require_token, save_for_hub
    if out is None:
        require_token(None)
    net = open_given(model, checkpoint)
    run = Path(model) if find_recipe(Path(model)) else None
    if out:
        save_for_hub(net, out, name, run=run)
        text, result = f"wrote {out}; upload it with `hf upload {name} {out}`", {"out": str(out)}
    else:
        options = dict(private=private, revision=revision, message=message, replace_card=replace_card)
        url = upload(net, name, run=run, **options)  # type: ignore[arg-type]
        text, result = f"pushed to {url}; load it with iso.load('hf-hub:{name}')", {"url": url}
    show(json_, result, text)


def _check_out(out: Path | None, overwrite: bool, others: dict[str, object]) -> None:
    """Raise UserError for a folder that has files, or with options that are for uploading."""
    if out is None:
        return
    given = [option for option, value in others.items() if value]
    if given:
        raise UserError(f"--out uploads nothing; leave {' and '.join(given)} out")
    if out.exists() and not (out.is_dir() and (overwrite or not any(out.iterdir()))):
        raise UserError(f"--out {out} exists; give --overwrite to replace the files in it, or another folder")
    if not overwrite:
        NEW_PATHS.add(out.absolute())
