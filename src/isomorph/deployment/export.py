"""Export a model as a file that runs without isomorph, after running it and comparing it with the model."""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isomorph.checkpoints.files import write_atomically
from isomorph.checkpoints.paths import require_writable
from isomorph.deployment.artefact import (
    FORMATS,
    describe,
    load_artefact,
    preparation_notes,
    require_packages,
)
from isomorph.deployment.program import (
    less_dynamic,
    only_tensor,
    prepare,
    to_onnx,
    to_pt2,
    trace,
)
from isomorph.deployment.shapes import ExportShapes, plan_export, plan_shapes
from isomorph.errors import NotFinite, UserError
from isomorph.json_values import JsonObject, json_values
from isomorph.models.input_sizes import ImageSize
from isomorph.operations import copy_module, in_eval_mode
from isomorph.surgery import NotEqual, VerifyReport
from isomorph.surgery.calls import Inputs, cast_floats, map_floats, run_model
from isomorph.surgery.comparison import (
    TensorDifference,
    Tensors,
    compare_tensors,
    relative_difference,
    tensors_by_path,
)
from isomorph.surgery.fuse_report import describe_left
from isomorph.surgery.model_pair import normal_like
from isomorph.surgery.recast import check_model
from isomorph.surgery.verify import ATOL
from isomorph.surgery.verify_report import Difference
from isomorph.terminal_tables import count_of

Progress = Callable[[str], None]  # called with the name of each step


@dataclass(frozen=True)
class ExportReport:
    """What was exported, and how far its outputs are from the model's: `deviation` has both, shape by shape.

    `fused` and `merged` are the numbers of layers that were fused and of norms and scales that were merged into others,
    `axes` are the names of the axes that stay open; `notes` say what was taken for granted. `left` are the norms and
    layers that were not merged, with the reason.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten())
        >>> report = iso.export(net, "net.pt2", size=(8, 8))
        >>> report.axes, report.deviation.passed, len(report.deviation.inputs)
        (('batch',), True, 3)
    """

    path: str
    axes: tuple[str, ...]
    size_multiple: int | None
    megabytes: float
    fused: int
    merged: int
    deviation: VerifyReport
    notes: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> JsonObject:
        """Return the report as plain values for JSON, with None for what is not finite."""
        return json_values({**asdict(self), "deviation": self.deviation.as_dict()})

    def __str__(self) -> str:
        lines = []
        if self.fused:
            lines.append(f"fused {count_of(self.fused, 'layer')}")
        if self.merged:
            lines.append(f"merged {count_of(self.merged, 'norm')}")
        lines += describe_left(self.left)
        lines.append(str(self.deviation))
        dynamic = ", ".join(self.axes) or "nothing"
        if self.axes and (self.size_multiple or 1) > 1:
            dynamic += f" (multiples of {self.size_multiple})"
        lines.append(f"{self.megabytes:.2f} MB, dynamic: {dynamic}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def export(
    model: nn.Module,
    path: str | Path,
    *,
    dynamic: str = "batch",
    size: int | ImageSize | None = None,
    atol: float = ATOL,
    overwrite: bool = False,
    progress: Progress = lambda step: None,
) -> ExportReport:
    """Export a model as an ONNX file or a PyTorch program that runs without isomorph, and check what it computes.

    The model is fused (`iso.fuse`) and exported in float32 and eval mode. The result is run on random images of
    several shapes, and compared with the model in float32 and in float64; a file is written only if it agrees. It
    holds, as metadata, the images that the model expects and its classes. Text networks are exported with token ids,
    attention mask and, where the network has them, token types as inputs; a `ddpm_unet` with images and time steps.

    Args:
        path: File ending in .onnx (run by onnxruntime and others) or .pt2 (run by torch.export.load).
        dynamic: Axes that stay open: "batch", "batch,size" (also height and width, or the length of texts), "size" or
            "none".
        size: Height and width, or one number for both; by default the model's own, where it says one.
        atol: Largest difference of a tensor allowed, relative to its largest value.
        overwrite: Replace an existing file.
        progress: Called with the name of each step.

    Raises: UserError when a package is missing, the model cannot be exported, arguments are swapped, or the file exists
        or cannot be written; NotEqual, with the report, when the result differs.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
        >>> wide = iso.recast(net, iso.LinearToPyramid(), where="1")
        >>> report = iso.export(wide, "thin.pt2", size=(8, 8))
        >>> report.fused, report.deviation.passed
        (1, True)
    """
    path = check_path(path, "export(model, path)")
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise UserError(f"{path} must end in .onnx or .pt2, which says the format")
    model = check_exportable(model, path, overwrite)
    progress("choosing shapes")
    model, shapes = plan_export(model, dynamic, size)
    check_output(model, shapes)
    progress("fusing")
    prepared, report = prepare(model, shapes)
    if kind == "onnx":
        check_onnx_size(prepared)
    shapes, contents, deviation = encode(prepared, model, kind, shapes, atol, progress)
    if not deviation.passed:
        raise NotEqual(deviation)
    progress("writing")
    write_atomically(path, lambda file: file.write_bytes(contents), new=not overwrite)
    axes: list[str] = []
    for names in shapes.axes.values():
        axes += [name for name in names.values() if name not in axes]
    return ExportReport(
        path=str(path),
        axes=tuple(axes),
        size_multiple=shapes.size_multiple,
        megabytes=len(contents) / 1e6,
        fused=len(report.fused),
        merged=len(report.merged),
        deviation=deviation,
        notes=preparation_notes(model, shapes),
        left=report.left,
    )


def check_path(path: Any, call: str) -> Path:
    """Return a path. Raises: UserError with the `call` as it should be, for arguments in another order."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(
            f"the path is a {type(path).__name__}, not text; give the arguments in the order {call}",
        )
    return Path(path)


@torch.no_grad()
def check_output(model: nn.Module, shapes: ExportShapes) -> None:
    """Raise UserError unless the model returns one tensor, the same at each call, and NotFinite for NaN."""
    plain = in_eval_mode(copy_module(model).cpu().float())
    first, second = (only_tensor(run_model(plain, shapes.examples()[0][1])) for _ in range(2))
    if first.isnan().any():
        raise NotFinite("the model's outputs are NaN; check its weights and statistics")
    same_shape = first.shape == second.shape
    same_infinities = same_shape and torch.equal(first.isinf(), second.isinf())
    if not same_infinities or relative_difference([first], [second]) > ATOL:
        raise UserError(
            "the model gives other outputs when it is called again with the same inputs, so no file can equal it; "
            "leave out what is random in eval mode, like F.dropout without training=self.training, or what calls change"
        )


# Bytes that protobuf writes at most.
_LARGEST_ONNX = 2**31


def check_onnx_size(prepared: nn.Module, advice: str = "export a .pt2 file") -> None:
    """Raise UserError for a fused model whose weights do not fit into one .onnx file."""
    size = 4 * sum(parameter.numel() for parameter in prepared.parameters())
    if size > _LARGEST_ONNX:
        raise UserError(
            f"the fused model has {size / 1e9:.1f} GB of weights in float32, and an .onnx file holds at most 2.1 GB; "
            f"{advice}"
        )


def check_exportable(model: nn.Module, path: Path, overwrite: bool) -> nn.Module:
    """Return the model without wrappers. Raises: UserError for a file that exists or cannot be written."""
    if path.is_file() and not overwrite:
        raise UserError(f"{path} exists; give overwrite=True to replace it, or another file")
    require_writable(path)
    model = check_model(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"{name} has no values (device meta); load weights into the model first"
            )
    if path.suffix == ".onnx":
        require_packages("onnx", "onnxscript", "onnxruntime")
    return model


def encode(
    prepared: nn.Module,
    model: nn.Module,
    kind: str,
    shapes: ExportShapes,
    atol: float = ATOL,
    progress: Progress = lambda step: None,
) -> tuple[ExportShapes, bytes, VerifyReport]:
    """Return the contents of the file of a prepared model, the shapes that it is right for, and its deviation.

    A traced graph has no branches. Where it deviates on sizes near the model's own only, the network takes another way
    for these: the graph is traced again for multiples of a larger number.

    Raises: UserError when the model cannot be exported, or the graph is wrong for all other sizes.
    """
    while True:
        progress("tracing")
        program = trace(prepared, shapes)
        metadata = describe(model, shapes)
        progress(f"converting to {kind}")
        if kind == "onnx":
            contents = to_onnx(program, shapes, metadata).SerializeToString()
        else:
            contents = to_pt2(program, shapes, metadata)
        progress("comparing")
        deviation = _compare(model, contents, kind, shapes, atol)
        without_near = replace(
            deviation, inputs=deviation.inputs[: len(shapes.checks) - shapes.near]
        )
        if deviation.passed or not shapes.near or not without_near.passed:
            return shapes, contents, deviation
        height, width = shapes.shape[1:]
        shapes = plan_shapes(
            model, shapes.dynamic, (height, width), (shapes.size_multiple or 1) + 1
        )


@torch.no_grad()
def _compare(
    model: nn.Module,
    contents: bytes,
    kind: str,
    shapes: ExportShapes,
    atol: float,
) -> VerifyReport:
    """Return the deviation from the model on the inputs to check; infinite on a near size that cannot be run."""
    artefact = load_artefact(contents, kind)
    plain = in_eval_mode(copy_module(model).cpu().float())
    exact = copy_module(plain).double()
    rows: list[Difference] = []
    for shape, inputs in shapes.examples():
        double = _outputs(exact, cast_floats(inputs, torch.float64))
        try:
            outputs = _outputs(artefact, inputs)
        except UserError as error:
            if len(rows) < len(shapes.checks) - shapes.near:
                raise UserError(f"{error}{less_dynamic(shapes)}") from error
            row = TensorDifference("", (), "", math.inf, math.inf, 0.0, problem=str(error))
            rows.append(Difference.of(shape, [row], atol))
            continue
        redraw = partial(_redraw, exact, inputs)
        tensors = compare_tensors(
            (_outputs(plain, inputs), outputs), (double, outputs), atol, redraw
        )
        rows.append(Difference.of(shape, tensors, atol))
    return VerifyReport(atol, tuple(rows))


def _outputs(model: nn.Module, inputs: Inputs) -> Tensors:
    return tensors_by_path(only_tensor(run_model(model, inputs)))


def _redraw(exact: nn.Module, inputs: Inputs) -> list[Tensors]:
    """Return outputs for other inputs, to see which channels are on another scale."""
    generator = torch.Generator().manual_seed(0)
    others = [map_floats(inputs, partial(normal_like, generator=generator)) for _ in range(4)]
    return [_outputs(exact, cast_floats(other, torch.float64)) for other in others]
