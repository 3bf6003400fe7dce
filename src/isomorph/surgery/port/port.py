"""Carry the weights of a model to another implementation of the same function, and prove that both are equal.

The steps, in the order of `_Port.run`: both models are called once, and the operations that read parameters are found
(`watch`, `graph`); they are brought together (`pair`), and the channels that they read are put in one order
(`channel_order`); the source gets random numbers, and the target those that make its steps the source's (`solve`);
steps and outputs are compared (`compare`); what structure leaves open is tried (`choices`); outputs
are compared on further inputs (`further`); and all is done again with the source's own numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from isomorph.errors import DoesNotRun, UserError
from isomorph.operations import copy_module
from isomorph.surgery.calls import Inputs, cast_floats, check_not_empty, describe_shape
from isomorph.surgery.modules import list_names
from isomorph.surgery.port.channel_order import order_channels
from isomorph.surgery.port.choices import Assignment, choices
from isomorph.surgery.port.compare import (
    OutputRow,
    Place,
    SourceSettings,
    compare_all_outputs,
    compare_ends,
    compare_steps,
    run_with,
)
from isomorph.surgery.port.further import FurtherInputs, further_inputs
from isomorph.surgery.port.graph import Graph
from isomorph.surgery.port.numbers import Numbers
from isomorph.surgery.port.other_size import fit_size
from isomorph.surgery.port.pair import Joint, joints_of, pair
from isomorph.surgery.port.report import NotPorted, PortReport, is_equal, settings_in, ways_of
from isomorph.surgery.port.side import Side, write
from isomorph.surgery.port.solve import Solution, draw, fill_leftovers, solve
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
    random weights (fresh ones hide faults: a LayerScale of 0, statistics of 0 and 1), and with the source's own. One
    image does not show all: where they are equal on the first, outputs are compared on two of another size, with other
    numbers (`report.further`); where models take one size alone, on two of that.

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
    source = check_model(source)
    target = check_model(target)
    for name, model in (("source", source), ("target", target)):
        if any(tensor.is_meta for tensor in model.state_dict().values()):
            raise UserError(
                f"the {name} has no numbers, it is on the meta device: create it on the CPU"
            )
    check_finite(source)
    try:
        report = _port(source, target, images)
    except DoesNotRun:
        fitted = fit_size(source, target, images) if isinstance(images, Tensor) else None
        if fitted is None or not isinstance(images, Tensor):
            raise
        report = fitted.finish(_port(fitted.source, fitted.target, images), images)
    if not report.equal and not partial:
        raise NotPorted(report)
    return report


def _port(source: nn.Module, target: nn.Module, images: Inputs) -> PortReport:
    """Return the report of the given images, or of further ones where models that are equal on the first part."""
    port = _Port(source, target, images)
    report = port.run()
    if port.parts_on is None:
        return report
    other = _Port(source, target, port.parts_on, also=images).run()
    if other.equal:
        return other
    if not other.places:
        return report
    shapes = describe_shape(images), describe_shape(port.parts_on)
    note = f"on images of {shapes[0]} the outputs are equal; this is what {shapes[1]} show"
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

    `also`: other images on which the outputs have to be equal.
    """

    def __init__(
        self, source: nn.Module, target: nn.Module, images: Inputs, also: Inputs | None = None
    ) -> None:
        self.images = _exact(images)
        self.also = None if also is None else _exact(also)
        # Inputs on which the outputs of models part that are equal on the first image.
        self.parts_on: Inputs | None = None
        image = tree_map_only(Tensor, lambda x: x[:1], self.images)
        self.source = Side("source", source, image)
        self.target = Side("target", target, image)
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
        further: list[FurtherInputs] = []
        remarks: list[str] = []
        if self._is_equal(random_trial.rows):
            further, remarks = self._compare_further(random_trial)
        own_numbers = self.target.own_numbers()
        final = self._with_own_numbers(own_numbers, random_trial)
        equal = self._is_equal(random_trial.rows) and self._is_equal(final.rows)
        equal = equal and self.parts_on is None
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
            places=() if equal else tuple(self._places(random_trial)),
            further=tuple(further),
            ambiguous=tuple(self.tried_choices),
            notes=(*dict.fromkeys(solution.lost), *self._notes(equal, rows), *remarks),
        )

    def _places(self, trial: _Trial) -> list[Place]:
        """Return where the models part, also after their last steps."""
        end = compare_ends(
            self.source_graph, self.target_graph, _largest(self._compared(trial.rows))
        )
        return trial.places or ([end] if end and self.parts_on is None else [])

    def _compared(self, rows: list[OutputRow]) -> list[OutputRow]:
        """Return the rows of the model whose outputs decide: the target's, unless only the source's are all equal."""
        decides = "target"
        if self._is_equal(rows) and not is_equal(rows, "target"):
            decides = "source"
        return [row for row in rows if row.own == decides]

    def _compare_further(self, trial: _Trial) -> tuple[list[FurtherInputs], list[str]]:
        """Compare outputs on further inputs with random numbers; also return why some were not compared."""
        compared: list[FurtherInputs] = []
        remarks: list[str] = []
        if self.also is not None:
            compared.append(self._compare_on(self.also, "the images given", trial))
        for name, inputs in further_inputs(self.images):
            try:
                compared.append(self._compare_on(inputs, name, trial))
                break
            except UserError as error:
                remarks.append(f"{name}, were not compared: {error}")
        return compared, remarks[:1]

    def _compare_on(self, inputs: Inputs, name: str, trial: _Trial) -> FurtherInputs:
        """Compare outputs on other inputs. Raises: UserError if a model does not run, or gives what is not finite."""
        numbers = self.source_graph.numbers, trial.solution.numbers
        values = self.source.call(numbers[0], inputs), self.target.call(numbers[1], inputs)
        graphs = self.source_graph, self.target_graph
        outputs = [values[0][slot] for slot in self.source_graph.record.outputs.values()]
        if not all(output.isfinite().all() for output in outputs):
            raise UserError("the source's outputs are not finite there")
        if any(not row.equals_output for row in trial.rows):
            graphs = self.source.watch(inputs), self.target.watch(inputs)
            values = graphs[0].values, graphs[1].values
        rows = compare_all_outputs(*graphs, values[1], values[0])
        if not self._is_equal(rows):
            self.parts_on = inputs
        return FurtherInputs(f"{name}, {describe_shape(inputs)}", _largest(self._compared(rows)))

    def _notes(self, equal: bool, rows: list[OutputRow]) -> Iterator[str]:
        """Yield what one model has and the other has not."""
        pairing = self.assignment.pairing
        is_paired = not pairing.only_source and not pairing.only_target
        if equal:
            for row in rows:
                if row.own == "target" and row.other == "nothing":
                    yield f"the source does not compute the target's output {row.name}, which is not compared"
            inner = [row for row in self._compared(rows) if not row.equals_output]
            end = compare_ends(self.source_graph, self.target_graph) if inner else None
            if end is not None:
                yield end.what
            elif any(row.other.startswith("the result") for row in inner) and is_paired:
                yield "an output of one model has the numbers of the other's in other places"
            return
        state = self.source.original.state_dict()
        complex_names = [name for name, tensor in state.items() if tensor.is_complex()]
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
            fill_leftovers(solution, assignment.leftovers, assignment.buffers)
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
        rows = compare_all_outputs(self.source_graph, self.target_graph, values)
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
        return _Trial(
            solution, values, compare_all_outputs(self.source_graph, self.target_graph, values)
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
        rows = compare_all_outputs(self.source_graph, self.target_graph, values)
        return is_equal(rows, "target")

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


def _exact(images: Inputs) -> Inputs:
    return cast_floats(tree_map_only(Tensor, Tensor.cpu, images), torch.float64)


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
