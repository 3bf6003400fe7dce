"""Compare the outputs of two models in float32 and float64."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from isomorph.errors import UserError
from isomorph.operations import copy_module, count_calls, in_eval_mode, tensors_in
from isomorph.surgery.calls import (
    Inputs,
    batches_of,
    cast_floats,
    cast_model,
    check_not_empty,
    describe_shape,
    first_of,
    map_floats,
    relative,
    run_model,
    sides_of_images,
    with_other_count,
    with_other_lengths,
    with_other_size,
    with_sides,
)
from isomorph.surgery.comparison import (
    TensorDifference,
    compare_tensors,
    measure_fidelity,
    tensors_by_path,
)
from isomorph.surgery.entry_points import names_not_given
from isomorph.surgery.first_difference import FirstDifference, Operations, first_difference
from isomorph.surgery.model_pair import ModelPair, NotCompared, normal_like
from isomorph.surgery.modules import list_names
from isomorph.surgery.recast import check_model
from isomorph.surgery.rule import edits_since, notes
from isomorph.surgery.verify_report import Difference, NotEqual, VerifyReport

# Largest difference of exported files and of models without rules, relative to the largest output.
ATOL = 1e-5
# Sides up to which images are tried at twice the size too.
_DOUBLED = 256
# Sizes of images, of which no other is tried once one has shown that sizes matter.
_SIZES = ("another size", "half the size", "twice the size")


def verify(
    original: nn.Module,
    recast: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    atol: float | None = None,
    seeds: Sequence[int] = (),
    thorough: bool = False,
) -> VerifyReport:
    """Check that two models compute the same function on the given inputs, and return the differences.

    Arguments as in `compare_outputs`. Outputs are compared in float32 and float64, in eval mode, and so is each recast
    module on the original's input.

    Raises: NotEqual (a UserError with the report as its text) if a difference is above `atol` times the largest output
        or not finite, or if the model reads the weights of a recast module and does not call it.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
    >>> iso.verify(cnn, tcnn, torch.randn(2, 3, 32, 32)).passed
    True
    """
    report = compare_outputs(original, recast, inputs, atol, seeds, thorough=thorough)
    if not report.passed:
        raise NotEqual(report)
    return report


def compare_outputs(
    original: nn.Module,
    recast: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    atol: float | None = None,
    seeds: Sequence[int] = (),
    what: str = "",
    thorough: bool = False,
) -> VerifyReport:
    """Compare two models on the same inputs, in eval mode, in float32 and float64; `verify` without the error.

    Copies are compared, on copies of the inputs: models and inputs are unchanged, and compiled models are unwrapped.
    Every tensor is compared by its own scale, and channels by theirs where it is smaller by orders of magnitude. Where
    outputs differ and a model chooses among its numbers, as detectors do, the other repeats the choices of the first:
    then the numbers that these are made from are compared, and the outputs one by one.

    Args:
        original: the model before surgery.
        recast: the model made from it.
        inputs: a batch (B, C, H, W) or several, of any sizes that the models accept. A batch may also be a dict of the
            tensors that the models take by name, as the tokenisers of transformers return.
        atol: largest difference of a tensor, relative to its largest value; by default the largest `atol` of the rules
            that made `recast`, or that a revert removed, or 1e-5 without rules, as for exported files. An int8 file is
            compared with what it was when it was made, unless `atol` is given.
        seeds: each seed adds a standard normal batch of the shape of every given batch; tensors of integers stay.
        what: what the given batches are, for the report.
        thorough: try the first batch a second time too, with the other sign, 100 times as large, as zeros, at other
            sizes of images or numbers of tokens and another batch size, in float16, under autocast to bfloat16, and in
            channels_last.

    Raises: UserError if there is no batch or an empty one, for a negative `atol`, for what is not a model, or if the
        outputs differ in structure or shapes.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.surgery.compare_outputs(cnn, iso.unstride(cnn, where="layer3"), torch.randn(1, 3, 32, 32)).passed
    False
    """
    original, recast = check_model(original), check_model(recast)
    batches = _check_batches(inputs, atol)
    if atol is None and getattr(recast, "fidelity", None) is not None:
        if thorough:
            raise UserError(
                "an int8 file is compared only on images like those that it was calibrated on; leave thorough=True "
                "out, or give `atol` too"
            )
        return _compare_int8(original, recast, batches)
    if atol is None:
        own_edits = edits_since(recast, original)
        if not hasattr(recast, "fidelity"):  # not an exported file: what a revert has removed
            own_edits += edits_since(original, recast)
        atol = max((edit.rule.accepted_difference for edit in own_edits), default=ATOL)
    named = [(what, batch) for batch in batches]
    for seed in seeds:
        redraw = partial(normal_like, generator=torch.Generator().manual_seed(seed))
        named += [(f"random, seed {seed}", map_floats(batch, redraw)) for batch in batches]
    pair = ModelPair(original, recast, atol)
    with count_calls(pair.models[torch.float32][1], pair.edited) as calls:
        rows = [pair.difference(batch, name) for name, batch in named]
    not_called, unused = pair.uncalled(
        [name for name in pair.edited if not calls[name]], batches[0]
    )
    remarks = [*notes(recast)[len(notes(original)) :], *unused]
    if thorough:
        more_rows, skipped = _try_further(pair, batches[0])
        rows += more_rows
        remarks += skipped
    else:
        remarks.append(
            "not tried: other sizes, batch sizes, signs and precisions, or a second call; thorough=True tries them"
        )
    targets = pair.targets(cast_floats(batches[0], torch.float64))
    report = VerifyReport(atol, tuple(rows), targets, not_called=not_called)
    first = None if report.passed else _locate_difference(report, pair, batches)
    return replace(
        report, first=first, notes=(*remarks, *pair.notes(), *_caveats(report, pair, batches[0]))
    )


def _check_batches(inputs: Inputs | Sequence[Inputs], atol: float | None) -> list[Inputs]:
    batches = list(batches_of(inputs))
    if isinstance(atol, str) or (atol is not None and not atol >= 0):
        raise UserError(f"atol {atol!r} must be a number of at least 0")
    for batch in batches:
        check_not_empty(batch)
    return batches


@torch.no_grad()
def _compare_int8(
    original: nn.Module, recast: nn.Module, batches: Sequence[Inputs]
) -> VerifyReport:
    """Compare a file with rounded weights by how close it was to its model when it was made."""
    model = in_eval_mode(cast_model(copy_module(original), torch.float32))
    pairs = []
    rows = []
    for batch in batches:
        x = cast_floats(batch, torch.float32)
        outputs = (tensors_by_path(run_model(model, x)), tensors_by_path(run_model(recast, x)))
        tensors = compare_tensors(outputs, outputs, ATOL, by_channel=False)
        rows.append(Difference.of(describe_shape(batch), tensors, ATOL))
        pairs.append(outputs)
    stored: Any = recast.fidelity
    fidelity = measure_fidelity(pairs, getattr(original, "num_classes", None))
    remarks = []
    if not fidelity.is_like(stored):
        remarks = [
            "give images as those that it was calibrated on, or `atol`",
            "layers of an int8 file are rounded, so no operation is the first after which it differs; with atol it is "
            "the first that differs by more",
        ]
    return VerifyReport(ATOL, tuple(rows), notes=tuple(remarks), fidelity=fidelity, stored=stored)


def _try_further(pair: ModelPair, batch: Inputs) -> tuple[list[Difference], list[str]]:
    """Return the differences for what a batch cannot show, and notes on what was not compared, and on what is left."""
    rows: list[Difference] = []
    remarks: list[str] = []
    attempts = [
        (name, partial(pair.difference, inputs, name, extra=True))
        for name, inputs in _further_inputs(batch)
    ]
    attempts += [(mode, partial(pair.difference_in_mode, batch, mode)) for mode in _modes(batch)]
    size_differs = False
    for name, attempt in attempts:
        if name in _SIZES and size_differs:
            continue
        try:
            rows.append(attempt())
        except NotCompared as error:
            remarks.append(f"{name} was not compared: {error}")
            continue
        if name in _SIZES and not rows[-1].is_within(pair.atol):
            size_differs = True
    sizes = [row.name.partition(",")[0] for row in rows]
    names = names_not_given(pair.models[torch.float64][0], batch)
    arguments = f"arguments of forward ({list_names(names)}), " if names else ""
    largest = f" than {', '.join(dict.fromkeys(sizes))}" if sizes else ""
    remarks.append(
        f"not tried: larger inputs and batches{largest}, images of one colour but zeros, train mode and gradients, "
        f"buffers that calls change, {arguments}and other methods than forward"
    )
    return rows, remarks


def _locate_difference(
    report: VerifyReport, pair: ModelPair, batches: Sequence[Inputs]
) -> FirstDifference | None:
    """Return the first operation after which the outputs differ, for the first batch for which they do.

    One image is enough where the models differ on it.
    """
    original, recast = pair.models[torch.float64]
    for row, batch in zip(report.inputs, batches, strict=False):
        if row.is_within(report.atol):
            continue
        difference = relative(row.fp64, row.scale)
        for inputs in (first_of(batch), batch):
            x = cast_floats(inputs, torch.float64)
            try:
                original_run = Operations.of(original, x)
                operations = getattr(recast, "operations", None)
                recast_run = operations(x) if callable(operations) else Operations.of(recast, x)
                difference_found = first_difference(
                    original_run, recast_run, difference, report.atol
                )
            except Exception:
                if inputs is batch:  # it cannot be watched, as one that resizes its inputs
                    return None
                continue  # it may take batches of one size
            if difference_found is not None:
                return difference_found
    return None


def _further_inputs(batch: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield a batch again, and with other values and sizes."""
    yield "a second call", batch
    has_floats = any(x.is_floating_point() for x in tensors_in(batch))
    if has_floats:
        yield "negative inputs", map_floats(batch, torch.neg)
        yield "values 100 times as large", map_floats(batch, lambda x: 100 * x)
    yield "another batch size", with_other_count(batch)
    other = with_other_size(batch)
    sides = sides_of_images(batch)
    if other is not None and sides is not None:
        H, W = sides
        yield "another size", other
        if min(sides) > 1:
            yield "half the size", with_sides(batch, H // 2, W // 2)
        if max(sides) <= _DOUBLED:
            yield "twice the size", with_sides(batch, 2 * H, 2 * W)
    yield from with_other_lengths(batch)
    if has_floats:
        yield "zeros", map_floats(batch, torch.zeros_like)


def _modes(batch: Inputs) -> list[str]:
    modes = ["float16", "autocast to bfloat16"]
    if any(x.ndim == 4 for x in tensors_in(batch)):
        modes.append("channels_last")
    return modes


def _caveats(report: VerifyReport, pair: ModelPair, batch: Inputs) -> Iterator[str]:
    """Yield what makes a report prove less than it seems to, and why models may differ."""
    scale = max(row.scale for row in report.inputs)
    if report.passed and scale < 1e-3:
        yield f"all outputs are at most {scale:.1g}: a head with small weights hides what the layers before it do"
    hidden = list_names([row.name for row in report.targets if row.fp64 > 1e-12 * row.scale])
    if hidden and not any(row.deviation for row in report.inputs if not row.mode):
        yield f"the outputs do not depend on {hidden} here (a zero weight, as by zero_init_last?); give trained weights"
    if report.passed:
        return
    if pair.is_random(batch):
        yield "the original is random: it differs from itself in a second call"
    differing: list[TensorDifference] = []
    for difference in report.inputs:
        if not difference.mode:
            differing += [row for row in difference.tensors if not row.is_within(report.atol)]
    agree = [row for row in differing if row.fp64 <= 1e-7 * row.scale]
    if agree and len(agree) == len(differing):
        names = list_names([row.path or "the output" for row in agree])
        yield (
            f"{names}: equal in float64, not in float32. Either rounding decides, as between almost equal numbers, or "
            "the model has code for float32 alone, such as torch's fast path of encoders (0 for padded tokens)"
        )
