"""Run an exported model, a .onnx or .pt2 file, as a model in evaluation; and what such a file says about itself."""

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from isomorph.checkpoints.header import DATA_KEYS, parse_data
from isomorph.checkpoints.model import describe_data
from isomorph.deployment.onnx_operations import onnx_operations, open_session
from isomorph.deployment.program import METADATA_FILE, quiet
from isomorph.deployment.pt2_operations import pt2_operations
from isomorph.deployment.shapes import INPUT, ExportShapes
from isomorph.errors import UserError, first_line, one_line, optional_module, short_reason
from isomorph.json_values import JsonObject
from isomorph.models.input_sizes import ImageSize, evaluation_config, fit_to_size
from isomorph.spec import spec_of
from isomorph.surgery import absorb
from isomorph.surgery.calls import Inputs, cast, describe_shape
from isomorph.surgery.comparison import Fidelity
from isomorph.surgery.first_difference import Operations

FORMATS = ("onnx", "pt2")
# The standard deviation of a file that takes pixels from 0 to 255, as `absorb` records it.
_PIXEL = 1 / 255
_KEYS = {
    *DATA_KEYS,
    "isomorph_version",
    "architecture",
    "num_classes",
    "class_names",
    "quantization",
    "dynamic",
    "size_multiple",
    "inputs",
    "length",
    "fidelity",
}


def require_packages(*names: str) -> None:
    """Import packages that write or run ONNX. Raises: UserError, with the command that installs it, without one."""
    for name in names:
        optional_module(name, f"ONNX needs {name}", "export")


def describe(model: nn.Module, shapes: ExportShapes) -> dict[str, str]:
    """Return the metadata of a model exported with these shapes, as JSON by key; keys without a value are left out."""
    first = shapes.shape
    data = {
        key: value for key, value in describe_data(model).items() if not key.startswith("test_")
    }
    if not shapes.named:
        config = evaluation_config(model, (first[1], first[2]))
        data |= {key: config[key] for key in DATA_KEYS if key in config}
    elif len(first) == 3:
        data["input_size"] = first
    elif "size" not in shapes.dynamic:
        data["length"] = first[0]
    values = {
        "isomorph_version": version("isomorph"),
        "architecture": spec_of(model).name or type(model).__name__,
        "num_classes": getattr(model, "num_classes", None),
        "class_names": data.pop("label_names", None),
        **data,
        "dynamic": [name for name in ("batch", "size") if name in shapes.dynamic],
        "size_multiple": shapes.size_multiple,
        "inputs": list(shapes.names) if shapes.named else None,
    }
    return {key: json.dumps(value) for key, value in values.items() if value is not None}


def preparation_notes(model: nn.Module, shapes: ExportShapes) -> tuple[str, ...]:
    """Return a note on the images of a model that does not say which it takes."""
    if shapes.named or getattr(model, "pretrained_cfg", None):
        return ()
    size = "{} x {} x {}".format(*shapes.shape)
    return (
        f"the file says that images are {size}, prepared as for ImageNet (its mean, std and crop), as the model has no "
        "pretrained_cfg; before, set model.pretrained_cfg = dict(input_size=(C, H, W), mean=..., std=...) for others",
    )


def _parse_metadata(texts: Any, path: object) -> JsonObject:
    is_complete = (
        isinstance(texts, Mapping)
        and "isomorph_version" in texts
        and ("input_size" in texts or "inputs" in texts)
    )
    if not is_complete:
        raise UserError(
            f"{path} does not say which images it expects; give a file that isomorph export wrote",
        )
    try:
        values = {key: json.loads(text) for key, text in texts.items() if key in _KEYS}
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"cannot read the metadata of {path}: {short_reason(error)}") from None
    if "class_names" in values:
        values["label_names"] = values.pop("class_names")
    return {"size_multiple": None, "dynamic": [], **parse_data(values, path, "artefact")}


class Artefact(nn.Module):
    """An exported model as a module: `iso.evaluate` and `isomorph evaluate` take it as any classifier.

    It runs on the CPU, one example at a time if its batch is not dynamic, and has no parameters to train. `metadata`
    says which images it expects and what it was exported with; `pretrained_cfg` is the same, where timm looks for it. A
    text network or denoiser takes the inputs that `metadata["inputs"]` lists, by name. Of an int8 file `fidelity` says
    how close it was to its model when it was made, which `iso.verify` compares. Make one with `open_artefact`.

    Shape: images (B, C, H, W) -> (B, num_classes); text: input_ids, attention_mask (B, N) and for some token_type_ids
        (B, N) -> (B, num_classes), or (B, N, V); a denoiser: x (B, C, H, W), t (B,) -> (B, C, H, W)
    Raises: UserError for other names, or sizes that were not left dynamic when the model was exported.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten())
        >>> report = iso.export(net, "net.pt2", size=(8, 8))
        >>> artefact = iso.deployment.open_artefact("net.pt2")
        >>> artefact(torch.randn(5, 3, 8, 8)).shape
        torch.Size([5, 4])
        >>> artefact.metadata["dynamic"]
        ['batch']
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        metadata: Mapping[str, Any],
        digest: bytes,
        watch: Callable[[Mapping[str, Tensor]], Operations],
    ) -> None:
        super().__init__()
        self._run = run
        self._watch = watch
        self.metadata = self.pretrained_cfg = self.default_cfg = dict(metadata)
        if "num_classes" in self.metadata:  # otherwise the outputs are counted
            self.num_classes = self.metadata["num_classes"]
        self.in_chans = (self.metadata.get("input_size") or [None])[0]
        # stands for the weights, which are in the file: results are stored with a hash of a model's state
        self.register_buffer("digest", torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        # modules of torch say by a parameter where they run
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)
        self.eval()

    @property
    def own_size(self) -> ImageSize | None:
        """Height and width of the images that the file was made for; of texts 1 and their length; None if not known."""
        metadata = self.metadata
        if "length" in metadata:
            return 1, metadata["length"]
        size = metadata.get("input_size")
        return (size[1], size[2]) if size else None

    @property
    def fidelity(self) -> Fidelity | None:
        """How close an int8 file was to its model, on the images that it was calibrated on; None for other files."""
        stored = self.metadata.get("fidelity")
        return Fidelity(**stored) if stored else None

    def operations(self, inputs: Inputs) -> Operations:
        """Return what every node of the file computes."""
        if isinstance(inputs, Tensor):
            inputs = {self._input_names[0]: inputs}
        return self._watch({name: _plain(x) for name, x in inputs.items()})

    @property
    def _input_names(self) -> list[str]:
        return self.metadata.get("inputs", [INPUT])

    @torch.no_grad()
    def forward(self, images: Tensor | None = None, **inputs: Tensor) -> Tensor:
        names = self._input_names
        if images is not None:
            inputs[names[0] if len(names) == 1 else INPUT] = images
        if sorted(inputs) != sorted(names):
            names_given = ", ".join(inputs) or "none"
            raise UserError(f"the inputs are {names_given}; give {', '.join(names)} by name")
        first = inputs[names[0]]
        self._check_size(names[0], list(first.shape[1:]))
        batch = {name: _plain(inputs[name]) for name in names}
        try:
            if "batch" in self.metadata["dynamic"]:
                output = self._run(**batch)
            else:
                output = self._run_in_parts(batch, len(first))
        except Exception as error:  # onnxruntime and torch raise errors of their own
            shape = describe_shape(first)
            raise UserError(
                f"the exported model does not run on {names[0]} of {shape}: {first_line(error)}",
            ) from error
        return output.to(first.device)

    def _run_in_parts(self, batch: Mapping[str, Tensor], count: int) -> Tensor:
        """Return the outputs of a file for batches of one size; the last part is filled with its last example."""
        size = self.metadata.get("batch", 1)
        outputs = []
        for start in range(0, count, size):
            rows = torch.arange(start, start + size).clamp(max=count - 1)
            outputs.append(self._run(**{name: x[rows] for name, x in batch.items()}))
        return torch.cat(outputs)[:count]

    def _check_size(self, name: str, sides: list[int]) -> None:
        metadata = self.metadata
        if "input_size" not in metadata and "length" not in metadata:
            return
        own_sides = list(metadata.get("input_size") or [metadata["length"]])
        size = "x".join(map(str, sides))
        own_size = "x".join(map(str, own_sides))
        free = "size" in metadata["dynamic"] and len(sides) == len(own_sides)
        if len(own_sides) > 1:  # the channels are never free
            free = free and sides[0] == own_sides[0]
        if not free and sides != own_sides:
            raise UserError(
                f"{name} has the size {size}, and the file takes {own_size}: give that size, or export with dynamic "
                "batch,size"
            )
        multiple = metadata["size_multiple"] or 1
        for side, own_side in zip(sides[1:], own_sides[1:], strict=True):
            if (side - own_side) % multiple:
                raise UserError(
                    f"{name} has the size {size}; sides differ from {own_size} by multiples of {multiple}",
                )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Return itself: a file computes in its own precision, on the CPU, whatever the module is moved to."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        digest = self.get_buffer("digest").numpy().tobytes()
        return type(self)(self._run, self.metadata, digest, self._watch)


def as_exported(model: nn.Module, artefact: Artefact) -> nn.Module:
    """Return the model that an artefact was made from, before it was traced: of its image size, and for raw pixels.

    Raises: UserError if the model does not take images of this size.
    """
    size = artefact.own_size
    if size is None or hasattr(model, "example_inputs"):
        return model
    if size != evaluation_config(model)["input_size"][1:]:
        model = fit_to_size(model, size)
    config = evaluation_config(model, size)
    raw = evaluation_config(artefact)
    if not any(raw["mean"]) and raw["std"] == (_PIXEL,) * len(raw["std"]) != config["std"]:
        return absorb(
            model, config["mean"], config["std"], images=torch.zeros(1, *config["input_size"])
        )
    return model


def _plain(x: Tensor) -> Tensor:
    """Return a tensor on the CPU, numbers with a fraction in float32."""
    return cast(x.detach().cpu(), torch.float32)


def open_artefact(path: str | Path, to_compare: bool = False) -> Artefact:
    """Open an exported model; the suffix of its file, .onnx or .pt2, says which format it has.

    Open only .pt2 files that you trust: as any PyTorch program, they may run code when they are opened. With
    `to_compare` a .onnx file that another program wrote is opened too, for `iso.verify`: it need not say which images
    it expects.

    Raises: UserError when the file is missing, damaged or not isomorph's, or onnxruntime is not installed.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten())
        >>> report = iso.export(net, "net.pt2", size=(8, 8))
        >>> iso.deployment.open_artefact("net.pt2").pretrained_cfg["input_size"]
        (3, 8, 8)
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise UserError(f"{path} is not an exported model; give a file that ends in .onnx or .pt2")
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    if kind == "onnx":
        require_packages("onnxruntime")
    if kind == "onnx" and to_compare:
        return load_artefact(_read_whole(path), kind, path, to_compare)
    return load_artefact(path.read_bytes(), kind, path)


def _read_whole(path: Path) -> bytes:
    """Return the contents of an ONNX file, with the weights that it keeps in another one."""
    require_packages("onnx")
    import onnx

    try:
        return onnx.load(str(path)).SerializeToString()
    except Exception as error:  # protobuf's own errors, and those of onnx for other files
        raise UserError(f"{path} is not a readable .onnx file: {first_line(error)}") from None


def load_artefact(
    contents: bytes, file_format: str, path: object = "the artefact", to_compare: bool = False
) -> Artefact:
    """Return the artefact in the bytes of a file. Raises: as `open_artefact`."""
    load = _load_onnx if file_format == "onnx" else _load_pt2
    try:
        with quiet():
            run, texts = load(contents)
    except Exception as error:  # onnxruntime and torch raise errors of their own for damaged files
        reason = one_line(error)[:200]
        raise UserError(f"{path} is not a readable .{file_format} file: {reason}") from None
    operations = onnx_operations if file_format == "onnx" else pt2_operations
    watch = partial(operations, contents)
    is_foreign = to_compare and file_format == "onnx" and "isomorph_version" not in texts
    metadata = _foreign_metadata(contents) if is_foreign else _parse_metadata(texts, path)
    return Artefact(run, metadata, hashlib.sha256(contents).digest(), watch)


def _foreign_metadata(contents: bytes) -> JsonObject:
    """Return what a file that another program wrote says of its inputs."""
    import onnx

    graph = onnx.load_from_string(contents).graph
    weights = {initializer.name for initializer in graph.initializer}
    # old exporters list weights among the inputs too
    inputs = [value for value in graph.input if value.name not in weights]
    if not inputs:
        raise UserError("the file has no inputs")
    # a named axis, which is open, has a dim_value of 0
    shapes = [[axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in inputs]
    is_open = all(shape and not shape[0] for shape in shapes)
    metadata: JsonObject = {
        "inputs": [value.name for value in inputs],
        "dynamic": ["batch"] if is_open else [],
        "batch": max([1, *(size for shape in shapes for size in shape[:1])]),
        "size_multiple": None,
    }
    image = tuple(shapes[0][1:])
    if len(inputs) == 1 and len(image) == 3 and all(image):
        metadata["input_size"] = image
    return metadata


def _load_onnx(contents: bytes) -> tuple[Callable[..., Any], Any]:
    session = open_session(contents)
    if session.get_modelmeta().custom_metadata_map.get("quantization") == '"int8 weights"':
        # weights become floats once, not every time
        session = open_session(contents, disable_quant_qdq="1")

    def run(**inputs: Tensor) -> Tensor:
        arrays = {name: x.numpy() for name, x in inputs.items()}
        return torch.from_numpy(session.run(None, arrays)[0])

    return run, session.get_modelmeta().custom_metadata_map


def _load_pt2(contents: bytes) -> tuple[Callable[..., Any], Any]:
    files = {METADATA_FILE: ""}
    module = torch.export.load(io.BytesIO(contents), extra_files=files).module()
    texts = json.loads(files[METADATA_FILE] or "{}")
    if "inputs" in texts:
        # a module of the artefact would follow its train()
        return (lambda **inputs: module(**inputs)), texts
    return (lambda **inputs: module(*inputs.values())), texts
