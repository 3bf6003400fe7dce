"""Carry the weights of a model to another implementation of the same function, and prove that both are equal.

The steps, in the order of `_Port.run`: both models are called once, and the operations that read parameters are found
(`watch`, `graph`); they are brought together (`pair`), and the channels that they read are put in one order
(`channel_order`); the source gets random numbers, and the target those that make its steps the source's (`solve`);
steps and outputs are compared (`compare`); what structure leaves open is tried (`choices`); outputs
are compared on further inputs (`further`); and all is done again with the source's own numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError, one_line
from isomorph.operations import copy_module, leaves
from isomorph.surgery.calls import (
    Inputs,
    cast_floats,
    check_not_empty,
    describe_shape,
    first_of,
    map_tensors,
)
from isomorph.surgery.modules import list_names
from isomorph.surgery.port.channel_order import order_channels
from isomorph.surgery.port.choices import Assignment, choices
from isomorph.surgery.port.compare import (
    TOLERANCE,
    OutputRow,
    Place,
    SourceSettings,
    compare_all_outputs,
    compare_steps,
    differing_ends,
    run_with,
)
from isomorph.surgery.port.further import (
    Further,
    FurtherInputs,
    further_inputs,
    given_inputs,
    odd_inputs,
)
from isomorph.surgery.port.graph import Graph
from isomorph.surgery.port.numbers import Numbers
from isomorph.surgery.port.other_size import fit_size
from isomorph.surgery.port.pair import Joint, joints_of, pair
from isomorph.surgery.port.report import (
    OTHER_CLASSES,
    NotPorted,
    PortReport,
    is_equal,
    settings_in,
    ways_of,
)
from isomorph.surgery.port.side import Side, write
from isomorph.surgery.port.solve import (
    Solution,
    buffers_left,
    carry_unread,
    draw,
    fill_leftovers,
    parameters_left,
    solve,
)
from isomorph.surgery.recast import check_finite, check_model

# Most runs of the target in which layers are exchanged that structure cannot tell apart.
_TRIALS = 12


def port_weights(
    source: nn.Module, target: nn.Module, images: Inputs, partial: bool = False
) -> PortReport:
    """Return a report with a copy of the target that has the weights of the source, which is the same in other code.

    Names play no part: the operations that read parameters are found in one run of each model, and brought together by
    what they are, what they read and what reads them. Packed and separate queries, keys and values, linear layers and
    1 x 1 convolutions, attention as one operation or as several, class tokens, positions and tables of relative
    positions are the same for it. Both models are then compared in float64, step by step and by their outputs, with
    random weights (fresh ones hide faults: a LayerScale of 0, statistics of 0 and 1), and with the source's own. Where
    outputs are equal on the first image, they are compared on two more, of another size and with larger and negative
    numbers (`report.further`); those of models of one size on two images of that size.

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
        >>> ours = report.model  # with the weights of theirs
        >>> report.equal, report.tensors[0].target, report.tensors[0].sources
        (True, 'conv1.weight', ('conv1.weight',))
    """
    check_not_empty(images)
    _check_dense(images)
    source = check_model(source)
    target = check_model(target)
    for name, model in (("source", source), ("target", target)):
        if any(isinstance(x, Tensor) and x.is_meta for x in model.state_dict().values()):
            raise UserError(
                f"the {name} has no numbers, it is on the meta device: create it on the CPU"
            )
    check_finite(source)
    try:
        report = _port(source, target, images)
    except DoesNotRun:
        if not isinstance(images, Tensor) or images.ndim != 4:
            raise
        fitted = fit_size(source, target, images)
        if fitted is None:
            raise
        report = fitted.finish(_port(fitted.source, fitted.target, images), images)
    if not report.equal and not partial:
        raise NotPorted(report)
    return report


def _check_dense(images: Inputs) -> None:
    for _, leaf in leaves(images):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.is_meta or leaf.layout != torch.strided:
            raise UserError(
                "the images have no numbers, or not one for each place: give dense tensors"
            )
        if leaf.is_floating_point() and not leaf.isfinite().all():
            raise UserError("the images are not finite; give images that are")


def _port(source: nn.Module, target: nn.Module, images: Inputs) -> PortReport:
    """Return the report of the given images, or of further ones where models that are equal on the first part."""
    port = _Port(source, target, images)
    report = port.run()
    parts_on = port.further.parts_on
    if parts_on is None:
        return report
    also = [("the first image given", first_of(images)), ("the further images", parts_on)]
    try:
        other = _Port(source, target, parts_on, also).run()
    except UserError:  # the models cannot be followed on them
        return report
    if other.equal:
        return other
    if not other.places:
        return report
    shapes = describe_shape(images), describe_shape(parts_on)
    note = f"on {shapes[0]} the outputs are equal; this is what {shapes[1]} show"
    return replace(other, notes=(*other.notes, note))


@dataclass
class _Trial:
    """Numbers for the target, its values with them, and how its outputs and steps compare with the source's."""

    solution: Solution
    values: list[Tensor]
    rows: list[OutputRow]
    places: list[Place] = field(default_factory=list)
    settings: SourceSettings = field(default_factory=SourceSettings)


class _Port:
    """Two models in float64 on one image, and which of their steps belong together.

    `also`: other inputs by what they are, on which the outputs have to be equal too; without any, `further_inputs`.
    """

    def __init__(
        self,
        source: nn.Module,
        target: nn.Module,
        images: Inputs,
        also: Sequence[tuple[str, Inputs]] = (),
    ) -> None:
        self.images = _exact(images)
        self.also = [iter([(name, _exact(inputs))]) for name, inputs in also]
        self.further = Further()
        # Tensors of the target that have numbers of the source in part, of the last solution.
        self.kept_in_part: list[str] = []
        first = first_of(self.images)
        try:
            self.source = Side("source", source, first)
            self.target = Side("target", target, first)
        except DoesNotRun:  # inputs without an axis of examples, or whose number is part of them
            if describe_shape(first) == describe_shape(self.images):
                raise
            self.source = Side("source", source, self.images)
            self.target = Side("target", target, self.images)
        self.source_graph = self.source.graph
        self.target_graph = self.target.graph
        self._assign(Assignment(pair(joints_of(self.source_graph), joints_of(self.target_graph))))
        self.tried_choices: dict[str, None] = {}

    def _assign(self, assignment: Assignment) -> None:
        self.assignment = assignment
        order_channels(self.source_graph, self.target_graph, assignment.pairing, assignment.orders)

    def run(self) -> PortReport:
        """Return the target with the source's weights, and how it compares with the source."""
        random_trial = self._try_all(self._draw())
        explained = not self._is_equal(random_trial.rows) and self._is_setting_alone(random_trial)
        self.source.check(self.source_graph.numbers, self.source_graph.values)
        self.target.check(random_trial.solution.numbers, random_trial.values)
        if self._is_equal(random_trial.rows):
            self.further = self._compare_further(random_trial)
        own_numbers = self.target.own_numbers()
        final = self._with_own_numbers(own_numbers, random_trial)
        equal = self._is_equal(random_trial.rows) and self._is_equal(final.rows)
        equal = equal and self.further.parts_on is None
        solution = final.solution
        pairing = self.assignment.pairing
        if not equal and pairing.only_target:
            solution = self._solve(own_numbers, neutral=False)
        model = copy_module(self.target.original)
        write(self.target_graph, model, solution.numbers)
        rows = max(random_trial, final, key=lambda trial: _largest(trial.rows)).rows
        compared = self._compared(rows)
        only_heads_are_unpaired = _are_heads(self.source_graph, pairing.only_source)
        is_paired = only_heads_are_unpaired and not pairing.only_target
        return PortReport(
            model=model,
            equal=equal,
            difference=_largest(compared),
            outputs=tuple(compared),
            tensors=ways_of(self.source_graph, self.target_graph, solution),
            left=solution.names_left(),
            kept=solution.names_kept(),
            settings=() if equal else settings_in(random_trial.places),
            explained=explained and not solution.lost and is_paired,
            places=() if equal else tuple(self._places(random_trial, _largest(compared))),
            further=self.further.compared,
            ambiguous=tuple(self.tried_choices),
            notes=(*dict.fromkeys(solution.lost), *self._notes(equal, rows), *self.further.remarks),
        )

    def _places(self, trial: _Trial, difference: float) -> list[Place]:
        """Return where the models part: at steps, or after the last ones."""
        if trial.places or difference <= TOLERANCE:
            return trial.places
        ends = differing_ends(self.source_graph, self.target_graph)
        return [] if ends is None else [Place("", "", difference, *ends)]

    def _compared(self, rows: list[OutputRow]) -> list[OutputRow]:
        """Return the rows of the model whose outputs decide: the target's, unless only the source's are all equal."""
        decides = "target"
        if self._is_equal(rows) and not is_equal(rows, "target"):
            decides = "source"
        return [row for row in rows if row.own == decides]

    def _compare_further(self, trial: _Trial) -> Further:
        """Compare outputs on further inputs with random numbers."""
        compared: list[FurtherInputs] = []
        remarks: list[str] = []
        parts_on = None
        for attempts in self.also or [given_inputs(self.images), further_inputs(self.images)]:
            for name, inputs in attempts:
                try:
                    rows = self._rows_on(inputs, trial)
                except Exception as error:  # whatever a model raises on inputs that nobody gave it
                    if not remarks:
                        remarks.append(f"not compared on {name}: {one_line(error)}")
                    continue
                difference = _largest(self._compared(rows))
                compared.append(FurtherInputs(f"{name}, {describe_shape(inputs)}", difference))
                if parts_on is None and not self._is_equal(rows):
                    parts_on = inputs
                break
        remarks += self._remarks_on_odd_sides(trial) if parts_on is None else []
        if remarks and not compared:
            remarks[0] = f"outputs were compared on the first image alone; {remarks[0]}"
        return Further(tuple(compared), tuple(remarks), parts_on)

    def _remarks_on_odd_sides(self, trial: _Trial) -> list[str]:
        for name, inputs in odd_inputs(self.images):
            try:
                rows = self._rows_on(inputs, trial)
            except Exception:  # as most models for patches do
                return []
            if not self._is_equal(rows):
                difference = _largest(self._compared(rows))
                return [f"{name}, {describe_shape(inputs)}: the outputs differ by {difference:.2g}"]
        return []

    def _rows_on(self, inputs: Inputs, trial: _Trial) -> list[OutputRow]:
        """Compare outputs on other inputs. Raises: UserError if the source's are not finite."""
        graphs = self.source_graph, self.target_graph
        source_values = self.source.call(self.source_graph.numbers, inputs)
        target_values = self.target.call(trial.solution.numbers, inputs)
        for slot in self.source_graph.record.outputs.values():
            if not source_values[slot].isfinite().all():
                raise UserError("the source's outputs are not finite there")
        if not all(row.equals_output for row in trial.rows):
            graphs = self.source.watch(inputs), self.target.watch(inputs)
            source_values, target_values = (graph.values for graph in graphs)
        return compare_all_outputs(*graphs, source_values, target_values)

    def _notes(self, equal: bool, rows: list[OutputRow]) -> Iterator[str]:
        """Yield what one model has and the other has not."""
        pairing = self.assignment.pairing
        is_paired = not pairing.only_source and not pairing.only_target
        bits, target_bits = map(_bits_of, (self.source.original, self.target.original))
        if target_bits < bits:
            yield f"the target's numbers have {target_bits} bits, the source's {bits}: they are rounded"
        numbers_out = self.target_graph.record.numbers_out
        if numbers_out:
            yield f"values of the output that are not tensors are not compared: {list_names(numbers_out)}"
        if self.kept_in_part:
            names = list_names(self.kept_in_part)
            yield f"numbers that no image read, which the target keeps: {names}"
        classes = _classes_of(self.source_graph)
        target_classes = _classes_of(self.target_graph)
        if not equal and classes and target_classes and classes != target_classes:
            yield f"{OTHER_CLASSES}: {classes} in the source, {target_classes} in the target; build it with {classes}"
        if equal:
            for row in rows:
                if row.own == "target" and row.other == "nothing":
                    yield f"the source does not compute the target's output {row.name}, which is not compared"
            inner = [row for row in self._compared(rows) if not row.equals_output]
            ends = differing_ends(self.source_graph, self.target_graph) if inner else None
            if ends is not None:
                yield ends[0]
            elif any(row.other.startswith("the result") for row in inner) and is_paired:
                yield "an output of one model has the numbers of the other's in other places"
            return
        state = self.source.original.state_dict()
        complex_names = [
            name for name, x in state.items() if isinstance(x, Tensor) and x.is_complex()
        ]
        if complex_names:
            yield f"complex numbers are not carried: {list_names(complex_names)}"
        for name, joints in ("source", pairing.only_source), ("target", pairing.only_target):
            modules = list(dict.fromkeys(joint.module or "the model" for joint in joints))
            if modules:
                yield f"of the {name} alone: {list_names(modules)}"

    def _draw(self) -> Solution:
        """Give the source random numbers, and return the target's; its own stay where the target cannot hold others."""
        numbers = draw(self.source_graph)
        self.source_graph.take(numbers, self.source_graph.run(numbers))
        solution = self._solve(self.target_graph.numbers)
        if not solution.unplaced:
            return solution
        entries = torch.cat(solution.unplaced)
        numbers.put(entries, self.source.own_numbers().pick(entries))
        self.source_graph.take(numbers, self.source_graph.run(numbers))
        return self._solve(self.target_graph.numbers)

    def _solve(self, start: Numbers, neutral: bool = True) -> Solution:
        """Return the target's numbers for those of the source; those of `start` where that has none."""
        assignment = self.assignment
        solution = solve(
            self.source_graph,
            self.target_graph,
            assignment.pairing,
            start,
            assignment.orders,
            neutral,
        )
        if assignment.leftovers is not None:
            fill_leftovers(solution, parameters_left(solution), assignment.leftovers)
        if assignment.buffers:
            fill_leftovers(solution, buffers_left(solution))
        self.kept_in_part = carry_unread(solution)
        return solution

    def _trial(self, solution: Solution) -> _Trial:
        """Compare steps and outputs of the source with those of the target that has its numbers."""
        numbers = solution.numbers
        pairing = self.assignment.pairing
        differences, settings, values = compare_steps(
            self.source_graph, self.target_graph, pairing, numbers
        )
        if differences:  # the values are in part those of the source
            values = self.target_graph.run(numbers)
        rows = self._rows(values)
        return _Trial(solution, values, rows, differences, settings)

    def _try_all(self, solution: Solution) -> _Trial:
        """Return the best trial; what structure cannot tell is tried where the first is not equal."""
        best = self._trial(solution)
        if self._is_equal(best.rows):
            return best
        for description, change in islice(choices(self.assignment.pairing, best.solution), _TRIALS):
            before = self.assignment
            self.tried_choices[description] = None
            self._assign(change(before))
            trial = self._trial(self._solve(self.target_graph.numbers))
            if self._is_equal(trial.rows):
                return trial
            if len(trial.places) < len(best.places):
                best = trial
            else:
                self._assign(before)
        return best

    def _with_own_numbers(self, target_numbers: Numbers, random_trial: _Trial) -> _Trial:
        """Compare the outputs once more with the source's own numbers.

        The models themselves are called. All values are needed only where outputs are not outputs of the other, or
        where tensors are carried that are computed.
        """
        has_inner = not all(row.equals_output for row in random_trial.rows)
        source_numbers = self.source.own_numbers()
        values = self.source.call(source_numbers)
        if has_inner or self.source_graph.reads_computed:
            values = self.source_graph.run(source_numbers)
            self.source.check(source_numbers, values)
        self.source_graph.take(source_numbers, values)
        solution = self._solve(target_numbers)
        values = self.target.call(solution.numbers)
        if has_inner:
            values = self.target_graph.run(solution.numbers)
            self.target.check(solution.numbers, values)
        return _Trial(solution, values, self._rows(values))

    def _rows(self, target_values: list[Tensor]) -> list[OutputRow]:
        return compare_all_outputs(
            self.source_graph, self.target_graph, self.source_graph.values, target_values
        )

    def _is_setting_alone(self, trial: _Trial) -> bool:
        """True if the target equals the source once it computes with the source's settings."""
        if not trial.settings.calls and not trial.settings.constants:
            return False
        values = run_with(
            trial.settings, self.source_graph, self.target_graph, trial.solution.numbers
        )
        if values is None:
            return False
        return is_equal(self._rows(values), "target")

    def _is_equal(self, rows: list[OutputRow]) -> bool:
        """True if all outputs are equal; a head that only one side has is no part of the other's function."""
        if is_equal(rows, "target"):
            if all(row.equals_output for row in rows):
                return True
            return _are_heads(self.source_graph, self.assignment.pairing.only_source)
        if not is_equal(rows, "source"):
            return False
        if _are_outputs(rows):
            return True
        only = self.assignment.pairing.only_target
        has_head = any(joint.first.kind == "layer" for joint in only)
        return has_head and _are_heads(self.target_graph, only)


def _classes_of(graph: Graph) -> int:
    """Return the length of the one vector that a model gives for an image, 0 for other outputs."""
    slots = list(graph.record.outputs.values())
    if len(slots) != 1:
        return 0
    output = graph.values[slots[0]]
    return output.shape[1] if output.ndim == 2 else 0


def _bits_of(model: nn.Module) -> int:
    """Return the bits of the widest numbers of a model."""
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    return max((torch.finfo(dtype).bits for dtype in dtypes), default=0)


def _exact(images: Inputs) -> Inputs:
    return cast_floats(map_tensors(images, Tensor.cpu), torch.float64)


def _are_heads(graph: Graph, joints: list[Joint]) -> bool:
    """True if steps that one model alone has are heads: at most one layer deep, with one vector an image."""
    alone = {joint.index for joint in joints}
    layers = {joint.index for joint in joints if joint.first.kind == "layer"}
    for joint in joints:
        if joint.readers - alone:
            return False
        if joint.index not in layers:
            continue
        if graph.values[joint.first.output].ndim != 2 or joint.sources & layers:
            return False
    return True


def _are_outputs(rows: list[OutputRow]) -> bool:
    """True if every output of the source is one of the target's, which may have more."""
    source_rows = [row for row in rows if row.own == "source"]
    return bool(source_rows) and all(row.equals_output for row in source_rows)


def _largest(rows: list[OutputRow]) -> float:
    return max((row.difference for row in rows), default=0.0)
