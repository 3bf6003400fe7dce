"""Carry the weights of a model to another implementation of the same function, and prove that both are equal."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from isomorph.errors import DoesNotRun, UserError
from isomorph.operations import copy_module, unwrap
from isomorph.surgery.absorb import layers_that_read
from isomorph.surgery.calls import (
    Inputs,
    cast_floats,
    check_not_empty,
    describe_shape,
    run_model,
    to_model,
)
from isomorph.surgery.modules import list_names
from isomorph.surgery.port.compare import (
    OutputRow,
    Place,
    SourceSettings,
    compare_outputs,
    compare_steps,
    run_with,
)
from isomorph.surgery.port.graph import Graph
from isomorph.surgery.port.pair import Joint, joints_of, pair
from isomorph.surgery.port.report import (
    NotPorted,
    PortReport,
    is_equal,
    names_kept,
    names_left,
    settings_in,
    ways_of,
)
from isomorph.surgery.port.solve import (
    Solution,
    clear_caches,
    draw,
    fill_leftovers,
    part_orders,
    solve,
    write,
)
from isomorph.surgery.port.watch import watch
from isomorph.surgery.recast import check_model
from isomorph.surgery.resize import OtherSize

# Most runs of the target in which layers are exchanged that structure cannot tell apart.
_TRIALS = 12
# Most parameters of one size that one model may have for each of the other's where structure says nothing.
_SHARING = 2


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
        images: a batch (B, C, H, W) that both models take, or a dict of the tensors that they take by name. If one of
            them is a vision transformer of timm for other images or patches, it is compared at the size of the other;
            its filters and positions are resized, which a note says.
        partial: return the report, with a model that has what could be carried, where the models are not equal.

    Raises: NotPorted (a UserError with the report) if the outputs differ and not `partial`; UserError for what is not a
        model, or no batch.

    Example:
        >>> import torchvision
        >>> theirs = torchvision.models.resnet18(num_classes=10).eval()
        >>> ours = timm.create_model("resnet18", num_classes=10)
        >>> report = iso.port_weights(theirs, ours, torch.randn(1, 3, 64, 64))
        >>> report.equal, report.tensors[0].target, report.tensors[0].sources
        (True, 'conv1.weight', ('conv1.weight',))
    """
    check_not_empty(images)
    source = check_model(source)
    target = check_model(target)
    try:
        report = _Port(source, target, images).report()
    except DoesNotRun as error:
        resized = _resized_model(source, target, images) if isinstance(images, Tensor) else None
        if resized is None or not isinstance(images, Tensor):
            raise error
        report = _port_resized(source, target, images, resized)
    if not report.equal and not partial:
        raise NotPorted(report)
    return report


def _port_resized(
    source: nn.Module, target: nn.Module, images: Tensor, resized: "_Resized"
) -> PortReport:
    """Port at the size of the model that takes the images."""
    if resized.of_target:
        report = _Port(source, resized.size.model, images).report()
        new = resized.size.back(report.model)
        note = resized.note(source, new, images)
        return replace(report, model=new, notes=(*report.notes, note))
    report = _Port(resized.size.model, target, images).report()
    note = resized.note(resized.size.model, source, images)
    return replace(report, notes=(*report.notes, note))


class _Resized(NamedTuple):
    """One of two models for the size of the images that the other takes."""

    size: OtherSize
    of_target: bool

    def note(self, original: nn.Module, resized: nn.Module, images: Tensor) -> str:
        which = "target" if self.of_target else "source"
        shift = self.size.shift(original, resized, images)
        moved = f"; outputs on these images move by {shift}" if shift else ""
        return (
            f"the models are for {self.size.describe(images)}: compared at the first size; positions of the {which} "
            f"are interpolated to the other, which is not exact{moved}"
        )


def _resized_model(source: nn.Module, target: nn.Module, images: Tensor) -> _Resized | None:
    """Return the model that does not take the images, in the size of the other; None if both take them."""
    takes = [_takes(model, images) for model in (source, target)]
    if all(takes) or not any(takes):
        return None
    of_target = takes[0]
    given, other = (target, source) if of_target else (source, target)
    patch = _patch_of(other, images)
    try:
        return _Resized(OtherSize.of(given, images, patch), of_target)
    except UserError as error:
        which = "target" if of_target else "source"
        raise UserError(
            f"the {which} does not take images of {describe_shape(images[0])}, and cannot be fitted to them: give "
            f"images of its own `size`; {error}"
        ) from error


@torch.no_grad()
def _takes(model: nn.Module, images: Tensor) -> bool:
    plain = copy_module(unwrap(model)).eval()
    try:
        run_model(plain, to_model(images[:1], plain))
    except UserError:
        return False
    return True


def _patch_of(model: nn.Module, images: Tensor) -> tuple[int, int] | None:
    """Return the size of the patches that a model embeds; None for a model that embeds overlapping ones."""
    for name in layers_that_read(model, to_model(images[:1], model)):
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == layer.stride:
            return layer.kernel_size[0], layer.kernel_size[1]
    return None


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
            noise = torch.rand(tensor.shape, generator=generator)
            tensor.add_(noise.to(tensor.dtype), alpha=0.01)


@dataclass
class _Trial:
    """Numbers for the target, and what a run with them showed."""

    solution: Solution
    places: list[Place]
    rows: list[OutputRow]
    settings: SourceSettings


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
            clear_caches(model)
        _perturb(self.source)
        _perturb(self.target)
        self.a = Graph(watch(self.source, self.image))
        self.b = Graph(watch(self.target, self.image))
        self.own = own
        self.pairing = pair(joints_of(self.a), joints_of(self.b))
        self.orders: dict[int, int] = {}
        self.leftovers: int | None = None
        self.tried: list[str] = []

    def report(self) -> PortReport:
        """Return the target with the source's weights, and how it compares with the source."""
        self._draw()
        drawn = self._try_all()
        explained = not self._is_equal(drawn) and self._is_setting_alone(drawn)
        self.source.load_state_dict(self.own)
        clear_caches(self.source)
        self.a.refresh(watch(self.source, self.image))
        final = self._trial()
        equal = self._is_equal(drawn) and self._is_equal(final)
        solution = final.solution
        if not equal and self.pairing.only_target:
            solution = solve(self.a, self.b, self.pairing, self.orders, neutral=False)
        model = copy_module(unwrap(self.wanted))
        write(self.b, model, solution.numbers)
        worst = max(drawn, final, key=lambda trial: _largest(trial.rows))
        relevant = "target"
        if equal and not is_equal(worst.rows, "target"):
            relevant = "source"
        rows = [row for row in worst.rows if row.own == relevant]
        more = []
        if relevant == "source":
            more = [_not_compared(row) for row in worst.rows if row.other == "nothing"]
        explained = explained and not solution.lost and self._is_paired()
        return PortReport(
            model=model,
            equal=equal,
            difference=_largest(rows),
            outputs=tuple(rows),
            tensors=ways_of(self.a, self.b, solution),
            left=names_left(self.a, solution),
            kept=names_kept(self.b, solution),
            settings=() if equal else settings_in(drawn.places),
            explained=explained,
            places=() if equal else tuple(drawn.places),
            ambiguous=tuple(dict.fromkeys(self.tried)),
            notes=(*dict.fromkeys(solution.lost), *self._without_counterpart(equal), *more),
        )

    def _without_counterpart(self, equal: bool) -> Iterator[str]:
        sides = ("source", self.pairing.only_source), ("target", self.pairing.only_target)
        for name, joints in sides if not equal else ():
            modules = list(dict.fromkeys(joint.module or "the model" for joint in joints))
            if modules:
                yield f"of the {name} alone: {list_names(modules)}"

    def _draw(self) -> None:
        """Give the source random weights; its own stay where the target cannot hold others."""
        own = self._own_numbers()
        numbers = draw(self.a)
        write(self.a, self.source, numbers)
        self.a.refresh(watch(self.source, self.image))
        solution = solve(self.a, self.b, self.pairing)
        if solution.unplaced:
            entries = torch.cat(solution.unplaced)
            numbers[entries] = own[entries]
            write(self.a, self.source, numbers)
            self.a.refresh(watch(self.source, self.image))

    def _own_numbers(self) -> Tensor:
        names = [self.a.seen.names[number][0] for number in self.a.first]
        flat = [self.own[name].flatten() for name in names]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)

    def _trial(self) -> _Trial:
        """Run the target with the source's numbers and compare."""
        solution = solve(self.a, self.b, self.pairing, self.orders)
        if self.leftovers is not None:
            fill_leftovers(self.a, self.b, solution, self.leftovers)
        write(self.b, self.target, solution.numbers)
        compared = compare_steps(self.a, self.b, self.pairing, self.target, self.image)
        places, settings, run = compared
        if places:
            run = watch(self.target, self.image)
        rows = compare_outputs(self.a, self.b, run)
        return _Trial(solution, places, rows, settings)

    def _is_setting_alone(self, trial: _Trial) -> bool:
        """True if the target equals the source once it computes with the source's settings."""
        if not trial.settings.calls and not trial.settings.constants:
            return False
        write(self.b, self.target, trial.solution.numbers)
        run = run_with(trial.settings, self.a, self.b, self.target, self.image)
        if run is None:
            return False
        rows = compare_outputs(self.a, self.b, run)
        return is_equal(rows, "target")

    def _try_all(self) -> _Trial:
        """Return the best trial; layers that structure cannot tell apart are exchanged where the first is not equal."""
        best = self._trial()
        for choice in self._choices(best.solution) if not self._is_equal(best) else ():
            if self._is_equal(best) or len(self.tried) == _TRIALS:
                break
            before = dict(self.orders), self.pairing, self.leftovers
            self.tried.append(choice.take(self))
            trial = self._trial()
            if len(trial.places) < len(best.places) or self._is_equal(trial):
                best = trial
            else:
                self.orders, self.pairing, self.leftovers = before
        return best

    def _choices(self, solution: Solution) -> "Iterator[_Parts | _Exchange | _Leftovers]":
        """Yield other orders of the parts of layers, then exchanges of steps that look alike."""
        if names_left(self.a, solution) and solution.has_free_numbers:
            yield from map(_Leftovers, range(_SHARING))
        labels: dict[tuple[object, ...], list[int]] = {}
        counts: dict[tuple[object, ...], int] = {}
        for one, other in self.pairing.pairs:
            signs = [part.read_by for part in one.parts], [part.read_by for part in other.parts]
            is_clear = len(set(signs[0])) == len(signs[0]) and set(signs[0]) == set(signs[1])
            if len(one.parts) > 1 and not is_clear:
                labels.setdefault(one.label, []).append(one.index)
                counts[one.label] = len(part_orders(one, other))
        for label, joints in labels.items():
            for choice in range(1, counts[label]):
                yield _Parts(tuple(joints), choice)
        for group in self.pairing.alike:
            for order in list(permutations(group))[1:6]:
                yield _Exchange(tuple(group), order)

    def _is_equal(self, trial: _Trial) -> bool:
        """True if all outputs are equal; a head that only one side has is no part of the other's function."""
        if is_equal(trial.rows, "target"):
            inner = any(not row.other.startswith("output") for row in trial.rows)
            return not inner or self._are_heads(self.a, self.pairing.only_source)
        if not is_equal(trial.rows, "source"):
            return False
        if _are_outputs(trial.rows):
            return True
        only = self.pairing.only_target
        has_head = any(joint.first.kind == "layer" for joint in only)
        return has_head and self._are_heads(self.b, only)

    def _are_heads(self, graph: Graph, joints: list[Joint]) -> bool:
        """True if steps that one model alone has are heads: at most one layer deep, with one vector an image."""
        alone = {joint.index for joint in joints}
        for joint in joints:
            if joint.first.kind == "layer" and graph.seen.values[joint.first.output].ndim != 2:
                return False
            if joint.readers - alone:
                return False
        layers = [joint for joint in joints if joint.first.kind == "layer"]
        inner = {joint.index for joint in layers}
        return not any(joint.sources & inner for joint in layers)

    def _is_paired(self) -> bool:
        """True if neither model has a step that the other has not, apart from heads."""
        mine = self._are_heads(self.a, self.pairing.only_source)
        return mine and not self.pairing.only_target


@dataclass(frozen=True)
class _Parts:
    """Another order of the parts of some layers, such as queries and keys."""

    joints: tuple[int, ...]
    choice: int

    def take(self, port: _Port) -> str:
        port.orders = {**port.orders, **dict.fromkeys(self.joints, self.choice)}
        first = next(one for one, _ in port.pairing.pairs if one.index == self.joints[0])
        return f"the order of the parts of {first.module}"


@dataclass(frozen=True)
class _Exchange:
    """Another order of the targets of pairs that look alike."""

    group: tuple[int, ...]
    order: tuple[int, ...]

    def take(self, port: _Port) -> str:
        pairs = list(port.pairing.pairs)
        for here, there in zip(self.group, self.order, strict=True):
            pairs[here] = pairs[here][0], port.pairing.pairs[there][1]
        port.pairing = replace(port.pairing, pairs=pairs)
        return f"which of the steps like {pairs[self.group[0]][0].module} are which"


@dataclass(frozen=True)
class _Leftovers:
    """Parameters that no step of the other model reads in the same way, by size and order.

    Where one model has several for each of the other's, `which` of them is tried.
    """

    which: int

    def take(self, port: _Port) -> str:
        port.leftovers = self.which
        return "parameters that both models read in another way"


def _not_compared(row: OutputRow) -> str:
    return f"the source does not compute the target's output {row.name}, which is not compared"


def _are_outputs(rows: list[OutputRow]) -> bool:
    """True if every output of the source is one of the target's, which may have more."""
    mine = [row for row in rows if row.own == "source"]
    return bool(mine) and all(row.other.startswith("output") for row in mine)


def _largest(rows: list[OutputRow]) -> float:
    return max((row.difference for row in rows), default=0.0)
