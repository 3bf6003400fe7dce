"""Carry the weights of a model to another implementation of the same function, and prove that both are equal."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from isomorph.errors import UserError
from isomorph.operations import copy_module, unwrap
from isomorph.surgery.calls import Inputs, cast_floats, check_not_empty, run_model
from isomorph.surgery.port.compare import OutputRow, Place, compare_outputs, compare_steps
from isomorph.surgery.port.graph import Graph
from isomorph.surgery.port.pair import Joint, Pairing, joints_of, pair
from isomorph.surgery.port.report import (
    NotPorted,
    PortReport,
    is_equal,
    names_kept,
    names_left,
    settings_in,
    ways_of,
)
from isomorph.surgery.port.solve import COMPUTED, NEUTRAL, Solution, draw, part_orders, solve, write
from isomorph.surgery.port.watch import Watch, watch
from isomorph.surgery.recast import check_model

# Most runs of the target in which layers are exchanged that structure cannot tell apart.
_TRIALS = 12


def port_weights(
    source: nn.Module, target: nn.Module, images: Inputs, partial: bool = False
) -> PortReport:
    """Give a copy of the target the weights of the source, which computes the same function in other code.

    Names play no part: the operations that read parameters are found in one run of each model, and brought together by
    what they are, what they read and what reads them. Packed and separate queries, keys and values, linear layers and
    1 x 1 convolutions, attention as one operation or as several, class tokens, positions and tables of relative
    positions are the same for it. Both models are then compared in float64, step by step and by their outputs, with
    random weights (fresh ones hide faults: a LayerScale of 0, statistics of 0 and 1), and with the source's own.

    Args:
        source: the model with the weights.
        target: the model that gets them; it is unchanged.
        images: a batch (B, C, H, W) that both models take, or a dict of the tensors that they take by name.
        partial: return the report, with a model that has what could be carried, where the models are not equal.

    Raises: NotPorted (a UserError with the report) if the outputs differ and not `partial`; UserError for what is not a
        model, or no batch.

    Example:
        >>> theirs = torchvision.models.resnet18(num_classes=10).eval()
        >>> ours = timm.create_model("resnet18", num_classes=10)
        >>> report = iso.port_weights(theirs, ours, torch.randn(1, 3, 64, 64))
        >>> report.equal, report.tensors[0].target, report.tensors[0].sources
        (True, 'conv1.weight', ('conv1.weight',))
    """
    check_not_empty(images)
    pair_of_models = _Port(check_model(source), check_model(target), images)
    report = pair_of_models.report()
    if not report.equal and not partial:
        raise NotPorted(report)
    return report


def _exact_copy(model: nn.Module) -> nn.Module:
    exact = copy_module(unwrap(model)).eval().requires_grad_(False)
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
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.add_(noise.mul_(0.01).abs_())


@dataclass
class _Trial:
    """Numbers for the target, and what a run with them showed."""

    solution: Solution
    places: list[Place]
    rows: list[OutputRow]
    explained: bool = True

    @property
    def equal(self) -> bool:
        return is_equal(self.rows, "target") or is_equal(self.rows, "source")

    @property
    def rank(self) -> tuple[bool, int]:
        return not self.equal, len(self.places)


class _Port:
    """Two models in float64 on one image, their graphs, and which steps belong together."""

    def __init__(self, source: nn.Module, target: nn.Module, images: Inputs) -> None:
        self.given = source
        self.wanted = target
        self.images = cast_floats(tree_map_only(Tensor, lambda x: x.cpu(), images), torch.float64)
        self.image = tree_map_only(Tensor, lambda x: x[:1], self.images)
        self.source = _exact_copy(source)
        self.target = _exact_copy(target)
        own = copy.deepcopy(self.source.state_dict())
        for model in (self.source, self.target):  # which may keep what it computes in a first call
            with torch.no_grad():
                run_model(model, self.image)
        _perturb(self.source)
        _perturb(self.target)
        self.a = Graph(watch(self.source, self.image))
        self.b = Graph(watch(self.target, self.image))
        self.own = own
        self.pairing = pair(joints_of(self.a), joints_of(self.b))
        self.notes: list[str] = []

    def report(self) -> PortReport:
        """Return the target with the source's weights, and what was found."""
        self._draw()
        drawn = self._try_all()
        self.source.load_state_dict(self.own)
        self.a.refresh(watch(self.source, self.image))
        final = self._trial(self.pairing)
        model = copy_module(unwrap(self.wanted))
        equal = drawn.equal and final.equal and self._may_keep()
        if not equal and self.pairing.only_target:
            final = replace(final, solution=solve(self.a, self.b, self.pairing, neutral=False))
        self._write(model, final.solution)
        rows = max(drawn.rows, final.rows, key=_largest)
        relevant = "target" if is_equal(rows, "target") else ""
        relevant = relevant or ("source" if equal else "target")
        difference = max(row.difference for row in rows if row.own == relevant)
        settings = settings_in(drawn.places)
        explained = not equal and drawn.explained and final.explained and bool(settings)
        explained = explained and not final.solution.lost and self._is_paired()
        return PortReport(
            model=model,
            equal=equal,
            difference=difference,
            outputs=tuple(row for row in rows if row.own == relevant),
            tensors=ways_of(self.a, self.b, final.solution),
            left=names_left(self.a, final.solution),
            kept=names_kept(self.b, final.solution),
            settings=settings,
            explained=explained,
            places=tuple(drawn.places),
            notes=tuple(dict.fromkeys([*self.notes, *final.solution.lost])),
        )

    def _draw(self) -> None:
        """Give the source random weights; neutral ones stay where the target has no place for others."""
        self.source.load_state_dict(self.own)
        self.a.refresh(watch(self.source, self.image))
        own = self.a.numbers(torch.arange(self.a.count))
        numbers = draw(self.a)
        write(self.a, self.source, numbers)
        self.a.refresh(watch(self.source, self.image))
        unplaced = solve(self.a, self.b, self.pairing).unplaced
        if unplaced:
            entries = torch.cat(unplaced)
            numbers[entries] = own[entries]
            write(self.a, self.source, numbers)
            self.a.refresh(watch(self.source, self.image))

    def _try_all(self) -> _Trial:
        best = self._trial(self.pairing)
        return best

    def _trial(self, pairing: Pairing) -> _Trial:
        solution = solve(self.a, self.b, pairing)
        write(self.b, self.target, solution.numbers)
        places, run = compare_steps(self.a, self.b, pairing, self.target, self.image)
        rows = compare_outputs(self.a, self.b, run)
        if not places:
            return _Trial(solution, places, rows)
        explained = is_equal(rows, "target") and all(place.settings for place in places)
        rows = compare_outputs(self.a, self.b, watch(self.target, self.image))
        return _Trial(solution, places, rows, explained)

    def _may_keep(self) -> bool:
        return True

    def _is_paired(self) -> bool:
        """True if neither model has a step that the other has not, apart from heads."""
        return not (self.pairing.only_source or self.pairing.only_target)

    def _write(self, model: nn.Module, solution: Solution) -> None:
        write(self.b, model, solution.numbers)


def _largest(rows: list[OutputRow]) -> float:
    return max((row.difference for row in rows), default=0.0)
