"""The export, quantize and push commands."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

import isomorph as iso
from isomorph.checkpoints.paths import NEW_PATHS, check_repository
from isomorph.cli import options as opt
from isomorph.cli.output import show, spinner, track_steps
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.terminal_tables import metric_table

Dynamic = Annotated[
    Literal["batch", "batch,size", "size", "none"],
    Parameter(
        help="What stays open: the number of images (batch), their height and width (size), both, or nothing (none); "
        "of texts their number and length."
    ),
]


@opt.command
def export(
    model: opt.Model,
    /,
    *,
    out: Path,
    size: opt.Size = None,
    dynamic: Dynamic = "batch",
    atol: opt.Atol = 1e-5,
    raw_images: opt.Flag = False,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Export a model as an ONNX file or a PyTorch program that runs without isomorph; fuse it first, and check it.

    The exported file is run on random images of several shapes and compared with the model in float32 and float64. It
    is written only if it agrees. `isomorph evaluate` measures the accuracy of an exported classifier of images.

    Example: isomorph export runs/tdrl --out thin.onnx --dynamic batch,size

    Parameters
    ----------
    out
        File to write: NAME.onnx (onnxruntime and other programs run it) or NAME.pt2 (PyTorch runs it, with
        torch.export.load).
    atol
        Largest difference of a tensor from the model's, relative to its largest value.
    raw_images
        The file takes pixels from 0 to 255 as they are: the normalisation goes into the first layer.
    """
    opt.check_out(out, overwrite, model, opt.EXPORTED)
    with opt.loading():
        from isomorph.cli.open_models import open_deployable
        from isomorph.models.input_sizes import evaluation_config, fit_to_size, random_inputs
        from isomorph.surgery import NotEqual
    with spinner("export") as show_step:
        show_step(f"loading {model}")
        net = open_deployable(model, opening)
        if raw_images:
            net = fit_to_size(net, size) if size else net
            prepared = evaluation_config(net, size)
            example: Any = random_inputs(1, net, size)
            net = iso.absorb(net, prepared["mean"], prepared["std"], images=example)
        try:
            report = iso.export(
                net,
                out,
                dynamic=dynamic,
                size=size,
                atol=atol,
                overwrite=overwrite,
                progress=show_step,
            )
        except NotEqual as error:
            raise UserError(
                f"{str(error.report).splitlines()[0]}; no file was written (see --atol)"
            ) from None
    show(json_, report.as_dict(), f"{report}\nwrote {out}")


@opt.command
def quantize(
    model: opt.Model,
    /,
    *,
    out: Path,
    test: opt.DataOptions = opt.DataOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    images: opt.Count = 512,
    classes: opt.Count | None = None,
    weights_only: opt.Flag = False,
    float_layers: list[str] | None = None,
    batch_size: opt.BatchSize = 100,
    dynamic: Dynamic = "batch",
    size: opt.Size = None,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Quantise a model to 8-bit integers, as an ONNX file; calibrate it on training images, and test it.

    The model is fused first. Printed are the layers with their precision, the norms that stay, top-1 before and after
    on test images, the signal-to-noise ratio of the outputs, size and speed. `isomorph evaluate` opens the file.

    Example: isomorph quantize runs/tdrl --images 512 --out thin-int8.onnx

    Parameters
    ----------
    out
        File to write (.onnx).
    images
        Number of training images of --data to calibrate on.
    classes
        Use only the first N classes of the data.
    weights_only
        Only weights are 8-bit integers, activations stay in float: a small file that computes in float.
    float_layers
        Globs over names of layers that stay in float.
    """
    opt.check_out(out, overwrite, model, (".onnx",))
    with opt.loading():
        from isomorph.cli.open_models import open_deployable
        from isomorph.models.input_sizes import fit_to_size
    with spinner("quantize") as show_step:
        show_step(f"loading {model}")
        net = open_deployable(model, opening)
        train, tested = _open_images(
            net, test, size, images, classes, batch_size if "batch" in dynamic else 1
        )
        report = iso.quantize(
            net,
            train,
            out,
            weights_only=weights_only,
            float_layers=float_layers or (),
            dynamic=dynamic,
            size=size,
            overwrite=overwrite,
            progress=show_step,
        )
    fitted = net
    if size:
        fitted = fit_to_size(net, size)
    before = _accuracy(fitted, tested, "float")
    after = _accuracy(iso.deployment.open_artefact(out), tested, "int8")
    facts = report.as_dict() | {"accuracy": {"float": before, "int8": after}}
    table = []
    for left, right in zip(metric_table("float", before), metric_table("int8", after), strict=True):
        table.append([*left, right[1]])
    show(json_, facts, str(report), table, f"wrote {report.path}")


def _accuracy(model: Any, images: Any, name: str) -> JsonObject:
    metrics = iso.evaluate(
        model, track_steps(images, f"{name} on test images, in batches", len(images))
    )
    return {key: round(metrics[key], 4) for key in ("top1", "nll", "images")}


def _open_images(
    net: Any,
    data_options: opt.DataOptions,
    size: opt.Size,
    images: int,
    classes: int | None,
    batch_size: int,
) -> tuple[Any, Any]:
    from isomorph.lab.data.loaders import eval_loader
    from isomorph.lab.data.sources import first_classes, spaced_images
    from isomorph.lab.evaluation.model_data import evaluation_data, open_split, sample_images

    test, config = evaluation_data(
        net, data_options.data, data_options.root, size, classes, data_options.split
    )
    train = open_split(net, "train", data_options.data, data_options.root, data_options.split)
    if classes:
        train = first_classes(train, classes)
    chosen = sample_images(train, images)
    tested = spaced_images(test, data_options.max_images)
    return eval_loader(chosen, config, batch_size), eval_loader(tested, config, batch_size)


@opt.command
def push(
    model: opt.Model,
    name: str,
    /,
    *,
    private: bool = False,
    out: Path | None = None,
    overwrite: opt.Overwrite = False,
    checkpoint: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    json_: opt.Json = False,
) -> None:
    """Upload a model to the Hugging Face hub, with a model card, for `hf-hub:OWNER/NAME` in every command and in timm.

    Example: isomorph push runs/tcnn me/tcnn --private

    Parameters
    ----------
    name
        Its name on the hub, OWNER/NAME.
    private
        Create the repository for its owner only.
    out
        Write the files to this folder instead of uploading them.
    """
    check_repository(name)
    if out and private:
        raise UserError("--out uploads nothing; leave --private out")
    if out and out.exists() and not _is_free(out, overwrite):
        raise UserError(
            f"--out {out} exists; give --overwrite to replace the files in it, or another folder"
        )
    with opt.loading():
        from isomorph.cli.open_models import find_recipe, open_given
        from isomorph.deployment.hub import push as upload
        from isomorph.deployment.hub import require_token, save_for_hub
    if out is None:
        require_token()
    if out and not overwrite:
        NEW_PATHS.add(out.absolute())
    net = open_given(model, checkpoint)
    run = Path(model) if find_recipe(Path(model)) else None
    if out:
        save_for_hub(net, out, name, run=run)
        show(json_, {"out": str(out)}, f"wrote {out}; upload it with `hf upload {name} {out}`")
        return
    url = upload(net, name, run=run, private=private)
    show(json_, {"url": url}, f"pushed to {url}; load it with iso.load('hf-hub:{name}')")


def _is_free(folder: Path, overwrite: bool) -> bool:
    """True for a folder that may be written to: an empty one, or one whose files may be replaced."""
    if not folder.is_dir():
        return False
    return overwrite or not any(folder.iterdir())
