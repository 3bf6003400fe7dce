"""The command that shows a model corrupted pictures: robustness."""

import json
from pathlib import Path
from typing import Any

import isomorph as iso
from isomorph.checkpoints.open import check_pretrained_option, open_model
from isomorph.cli.app import (
    Device,
    Json,
    Model,
    Root,
    Weights,
    WholeNumber,
    app,
    check_limits,
    display_name,
    progress_bar,
)
from isomorph.data.corruptions.corrupt import SEVERITIES
from isomorph.distributed import open_runtime
from isomorph.report.terminal_tables import print_table
from isomorph.suites.robustness.published import open_published
from isomorph.suites.robustness.run import wanted_cells
from isomorph.suites.robustness.scores import robustness_table, summary_lines
from isomorph.suites.test_data import open_test_images


@app.command
@check_limits
def robustness(
    model: Model,
    /,
    *,
    suite: str = "imagenet-c",
    data: str | None = None,
    root: Root = None,
    folder: Path | None = None,
    corruption: tuple[str, ...] = (),
    severity: tuple[WholeNumber, ...] = (),
    extra: bool = False,
    out: Path | None = None,
    baseline: Path | None = None,
    cache: Path | None = None,
    limit: WholeNumber | None = None,
    partial: bool = False,
    seed: WholeNumber = 0,
    size: tuple[WholeNumber, WholeNumber] | None = None,
    classes: WholeNumber | None = None,
    weights: Weights = None,
    pretrained: bool = True,
    batch_size: WholeNumber = 100,
    workers: WholeNumber = 0,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Accuracy under ImageNet-C's corruptions: by corruption, category and severity, and mCE.

    Parameters
    ----------
    suite
        imagenet-c, or cifar-c: the published arrays of CIFAR-10-C or CIFAR-100-C, with --folder.
    data
        Clean images, corrupted on the fly: as in evaluate. With --folder: the clean images for the relative mCE.
    folder
        The published ImageNet-C (CORRUPTION/SEVERITY/WNID/*.JPEG), or CIFAR-C (CORRUPTION.npy, labels.npy), instead
        of corrupting on the fly.
    corruption
        Only these (--corruption fog --corruption snow).
    severity
        Only these, of 1 to 5.
    extra
        The four further corruptions too: speckle_noise, gaussian_blur, spatter, saturate.
    out
        File of finished cells, a line each; a second call goes on from there.
    baseline
        Another model's --out or --json file: the gain beside it.
    cache
        Folder that keeps corrupted pictures for the next model: 150 KB each at 224 px.
    limit
        Only so many images, evenly spaced.
    partial
        Allow a part of ImageNet's classes; labels go by the names of the classes.
    seed
        Of the corruptions.
    size
        Height and width of the pictures; by default 224 x 224 for 1000 classes, else the model's own.
    classes
        Only the first so many classes of the data, as data.classes in training.
    pretrained
        Use the model's public weights; --no-pretrained leaves it with random ones.
    batch_size
        Pictures per step.
    workers
        Processes that decode and corrupt.
    """
    check_pretrained_option(model, weights, pretrained)
    if published := open_published(suite, folder and folder.expanduser()):
        published.refuse_missing(wanted_cells(corruption or None, severity or SEVERITIES, extra))
    net = open_model(model, weights, pretrained)
    source = None if folder and data is None else open_test_images(net, data, root, classes)
    net.to(open_runtime(device).device)
    options: dict[str, Any] = dict(folder=folder, extra=extra, out=out, baseline=baseline, cache=cache, limit=limit)
    options |= dict(
        seed=seed,
        size=size,
        batch_size=batch_size,
        workers=workers,
        name=display_name(model, pretrained),
        partial=partial,
    )
    options |= {key: kept for key, kept in (("corruptions", corruption), ("severities", severity)) if kept}
    with progress_bar("cells") as tell:
        result = iso.robustness(net, source, suite, progress=tell, **options)
    if json_:
        print(json.dumps(result))
        return
    print_table(robustness_table(result))
    print("\n" + "\n".join(summary_lines(result)))
