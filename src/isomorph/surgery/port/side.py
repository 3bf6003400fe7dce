"""One of the two models of a port: its copy in float64, and the graph of what it computes on an image."""

import torch
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError
from isomorph.operations import copy_module, in_eval_mode, leaves
from isomorph.surgery.calls import Inputs, run_model
from isomorph.surgery.port.compare import TOLERANCE
from isomorph.surgery.port.graph import Graph
from isomorph.surgery.port.numbers import Numbers, random_numbers
from isomorph.surgery.port.watch import entries_of, watch


class Side:
    """A model, `source` or `target`; it is called once to see what it computes.

    For other numbers of its parameters the recorded operations are run, and `check` calls it again: it must give the
    same.
    """

    def __init__(self, name: str, model: nn.Module, image: Inputs) -> None:
        self.name = name
        self.original = model
        self.image = image
        self.model = _exact_copy(self.original)
        _perturb(self.model)
        clear_caches(self.model)
        self.graph = self.watch(image)
        if not self.graph.record.outputs:
            raise UserError(
                f"the output of the {name} has no tensors; give a model whose forward returns tensors"
            )

    def watch(self, inputs: Inputs) -> Graph:
        """Return the graph of what the model computes on inputs, with the numbers that it has."""
        try:
            return Graph(watch(self.model, inputs))
        except DoesNotRun as error:
            raise DoesNotRun(self._about(error)) from error

    def own_numbers(self) -> Numbers:
        """Return the numbers of the given model."""
        tensors = entries_of(self.original)
        own_tensors = {}
        for slot, names in self.graph.record.names.items():
            own_tensors[slot] = tensors[names[0]].detach().cpu().double()
        return Numbers(self.graph.entries, own_tensors)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def call(self, numbers: Numbers, inputs: Inputs | None = None) -> list[Tensor]:
        """Return all values, of which the outputs are those of the model itself with other numbers, or inputs."""
        write(self.graph, self.model, numbers)
        values = list(self.graph.values)
        if inputs is None:
            inputs = self.image
        if inputs is not self.image:  # of other inputs only the outputs are known
            values = [torch.empty(0)] * len(values)
        try:
            result = run_model(self.model, inputs)
        except DoesNotRun as error:
            raise DoesNotRun(self._about(error)) from error
        tensors = [leaf for _, leaf in leaves(result) if isinstance(leaf, Tensor)]
        outputs = self.graph.record.outputs
        if len(tensors) != len(outputs) and inputs is not self.image:
            raise UserError(
                f"the {self.name} returns {len(tensors)} tensors on them and {len(outputs)} on the first image"
            )
        if len(tensors) != len(outputs):
            self._cannot_be_followed()
        for slot, value in zip(outputs.values(), tensors, strict=True):
            values[slot] = value
        return values

    def check(self, numbers: Numbers, values: list[Tensor]) -> None:
        """Raise UserError if the model itself gives other outputs than the recorded operations."""
        called = self.call(numbers)
        for slot in self.graph.record.outputs.values():
            if not _is_same(called[slot], values[slot]):
                self._cannot_be_followed()

    def _about(self, error: DoesNotRun) -> str:
        return str(error).replace("the model", f"the {self.name}", 1)

    def _cannot_be_followed(self) -> None:
        raise UserError(
            f"the {self.name} computes something else for other weights, or not by torch's functions alone; it cannot "
            "be followed"
        )


def _exact_copy(model: nn.Module) -> nn.Module:
    """Return a copy in float64, in eval mode, whose operations are not in place."""
    exact = in_eval_mode(copy_module(model)).requires_grad_(False)
    exact = exact.to(torch.device("cpu")).double()
    for module in exact.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]
    return exact


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    """Give all numbers of a model other values, so that a value says where it comes from."""
    generator = torch.Generator().manual_seed(1)
    for tensor in model.parameters():
        if tensor.is_floating_point():
            tensor.add_(random_numbers(tensor.numel(), generator).view(tensor.shape), alpha=0.01)


def _is_same(value: Tensor, other: Tensor) -> bool:
    """True if two values are equal but for rounding."""
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    if not value.is_floating_point() or not value.numel():
        return torch.equal(value, other)
    scale = float(value.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(value, other, rtol=0, atol=TOLERANCE * scale, equal_nan=True)


@torch.no_grad()
def write(graph: Graph, model: nn.Module, numbers: Numbers) -> None:
    """Write numbers of all entries into a model's parameters and buffers."""
    state = model.state_dict(keep_vars=True)
    for slot, names in graph.record.names.items():
        state[names[0]].copy_(numbers.tensors[slot])
    clear_caches(model)


def clear_caches(model: nn.Module) -> None:
    """Let modules drop what they keep in eval mode, such as tables of positions read from parameters."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    for module, mode in modes.items():
        if module.training != mode:
            module.train(mode)
