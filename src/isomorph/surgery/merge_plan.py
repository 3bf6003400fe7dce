"""What of a model is exactly one layer, found by what one call of it computes.

A value is an affine function of another, its source, where only layers, norms in eval mode, scales, sums and moves lie
between them: the sum of summands gain * layer(source), or gain * source, plus a shift (`affine_values.py`). Such a
value is written into one layer; without a layer it is written into all layers that read it.
"""

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isomorph.operations import Flow, Operation, TensorVersion, hooks_on
from isomorph.surgery.affine import Affine, Change, Group, carrier_of, names_in
from isomorph.surgery.affine_values import AffineValues, why_stopped
from isomorph.surgery.channels import follow_channels, kind_of_step
from isomorph.surgery.collapse import find_whole
from isomorph.surgery.layer_calls import LAYERS, InputWindow, adds_zero, is_unchanged
from isomorph.surgery.modules import lies_within, parent_name


class _Reader(NamedTuple):
    """A layer that reads a value, its window, and the gain and shift of its inputs."""

    layer: str
    window: InputWindow
    scale: tuple[Tensor, Tensor]


class MergePlan(NamedTuple):
    """What one call shows: groups, the names of norms, why norms are left, the modules that it runs or reads."""

    groups: list[Group]
    norms: set[str]
    left: dict[str, str]
    called: set[str]

    def concerns(self, group: Group) -> bool:
        """True if the call runs or reads what a group changes."""
        return not self.called.isdisjoint(_names_of(group))


def plan_merges(
    model: nn.Module, flow: Flow, affine: bool, avoid: frozenset[str] = frozenset()
) -> MergePlan:
    """Return what one call of a model shows, without the tensors of the call."""
    builder = _PlanBuilder(model, flow, affine, avoid)
    return MergePlan(builder.groups, builder.norms, builder.left, builder.called)


class _PlanBuilder:
    """The groups that one call of a model shows, and the norms of the model that are left, with the reason for each."""

    def __init__(self, model: nn.Module, flow: Flow, affine: bool, avoid: frozenset[str]) -> None:
        self.model = model
        self.flow = flow
        self.groups: list[Group] = []
        self._protected = set(flow.returned)
        # The modules whose inputs or outputs a value is, the order of all, and which hold parameters in each.
        self._modules_by_value: dict[TensorVersion, set[str]] = defaultdict(set)
        self._order: dict[str, int] = {}
        self._owners: dict[str, list[str]] = {}
        for name, module in model.named_modules():
            self._add_module(name, module)
        self._deciding = self._modules_that_decide()
        self._values = AffineValues(model, flow, self._protected, affine, avoid)
        self.norms = self._values.norms
        self.left = self._values.left
        wholes: list[Group] = []
        for value, affine_value in self._values.affine_of.items():
            if value in self._values.used:
                continue
            if affine_value.has_layer:
                self._write_into_layer(affine_value)
                whole = find_whole(self._values, value)
                wholes += [whole] if whole else []
            else:
                self._write_into_readers(value, affine_value)
        self._add_chains()
        for whole in wholes:
            self._add_whole(whole)

    def _add_module(self, name: str, module: nn.Module) -> None:
        """Note the values that a module gets and gives, and that those of one with hooks are not to change."""
        values: set[TensorVersion] = set()
        for call in (*self.flow.inputs.get(name, ()), *self.flow.outputs.get(name, ())):
            values |= set(call)
        if hooks_on(module):
            self._protected |= values
        self._order[name] = len(self._order)
        if name:
            for value in values:
                self._modules_by_value[value].add(name)

    def _modules_that_decide(self) -> set[str]:
        """Return the modules whose code branches on data, and the parents of those that decide and give no value."""
        deciding = set(self.flow.branches_on_data)
        for name in sorted(self.flow.branches_on_data, key=len, reverse=True):
            while name in deciding and name and not any(self.flow.outputs[name]):
                name = parent_name(name)
                deciding.add(name)
        return deciding

    @property
    def called(self) -> set[str]:
        """Names of the modules that the call runs, and of those whose parameters it reads."""
        names = {name for name, outputs in self.flow.outputs.items() if outputs}
        for value, tensor in self.flow.tensors.items():
            if self.flow.reads.get(value):
                parameters = self.flow.names.get(id(tensor), ())
                names |= {parent_name(name) for name in parameters}
        return names

    def _weight(self, name: str) -> Tensor:
        return self.model.get_submodule(name).get_parameter("weight")

    # A value with a layer is written into it

    def _write_into_layer(self, affine: Affine) -> None:
        """Add the group of a sum of layers, norms and scales that one layer can hold."""
        carrier = carrier_of(affine.summands)
        others = [
            summand.layer for summand in affine.summands if summand.layer and summand is not carrier
        ]
        if carrier is None or carrier.layer is None or not (affine.changes or others):
            return
        others += [summand.after for summand in affine.summands if summand.after]
        changes = [*self._changes_of(affine), *(("nothing", name) for name in others if name)]
        group = Group(
            "sum",
            (carrier.layer,),
            (carrier.window,),
            tuple(changes),
            affine.summands,
            affine.shift,
        )
        self._add(group, self._values_between(affine.source, affine.end))

    def _changes_of(self, affine: Affine) -> list[Change]:
        """Return what becomes of the modules of a value; a branch without a layer gives 0: its weight is elsewhere."""
        has_own_branch = any(
            summand.layer is None and not summand.stays for summand in affine.summands
        )
        changes = []
        for form, name in affine.changes:
            if has_own_branch and form == "identity" and affine.source in self.flow.inputs[name][0]:
                form = "nothing"
            changes.append((form, name))
        return changes

    # A value without a layer is written into all layers that read it

    def _write_into_readers(self, value: TensorVersion, affine: Affine) -> None:
        """Add the group of a norm or scale that all layers that read it can hold; note why not."""
        norms = [name for _, name in affine.changes if name in self.norms]
        if len(affine.summands) > 1:
            for name in norms:
                self.left.setdefault(name, "it follows a sum")
            return
        readers: list[_Reader] = []
        reason = self._find_readers(value, affine, readers)
        if reason:
            for name in norms:
                before = (
                    f"{self.left[name]}; nor does it fit into what follows: "
                    if name in self.left
                    else ""
                )
                self.left[name] = before + reason
            return
        group = Group(
            "readers",
            carriers=tuple(reader.layer for reader in readers),
            windows=tuple(reader.window for reader in readers),
            changes=affine.changes,
            summands=affine.summands,
            shift=affine.shift,
            scales=tuple(reader.scale for reader in readers),
        )
        self._add(
            group, {value, *self._values_between(affine.source, value), *self._values_after(value)}
        )

    def _find_readers(
        self, value: TensorVersion, affine: Affine, readers: list[_Reader]
    ) -> str | None:
        """Add the layers that read a value, also moved; return why it cannot be written into all, if so."""
        if value in self._protected or not self.flow.reads[value]:
            return "what it gives is an output of the model"
        for operation in self.flow.reads[value]:
            moved_values = self._values_moved(operation, value, affine)
            reason = None
            if not moved_values:
                reason = self._add_reader(operation, value, affine, readers)
            for output, moved_value in moved_values.items():
                is_dropped = (
                    len(moved_values) > 1
                    and not self.flow.reads[output]
                    and output not in self._protected
                )
                if not is_dropped and not reason:
                    reason = self._find_readers(output, moved_value, readers)
            if reason:
                return reason
        return None

    def _values_moved(
        self, operation: Operation, value: TensorVersion, affine: Affine
    ) -> dict[TensorVersion, Affine]:
        """Return the outputs of an operation that leaves the elements of a value as they are; empty for any other."""
        if is_unchanged(operation) or adds_zero(operation):
            return {operation.outputs[0]: affine}
        kind = kind_of_step(self.flow, operation, value)
        return affine.moved(operation, value, kind) if kind else {}

    def _add_reader(
        self, operation: Operation, value: TensorVersion, affine: Affine, readers: list[_Reader]
    ) -> str | None:
        """Add a layer that reads a value; return why the value cannot be written into it, if so."""
        output = operation.outputs[0]
        layer = self._values.affine_of.get(output) if operation.name in LAYERS else None
        steps = [step.operation.name for step in affine.steps if step.kind != "move"]
        first_reader = steps[0] if steps else operation.name
        if layer is None or layer.source != value:
            return self._values.rejected.get(output) or f"it is read by {first_reader}"
        summand = layer.summands[0]
        name = str(summand.layer)
        window = summand.window
        if window.transposed:
            return f"{name} is transposed"
        if not window.is_plain:
            return f"{name} computes its weight"
        if affine.shift.any() and any(window.padding):
            return f"{name} pads with zeros"
        axis = len(self._values.shape(value)) - 1 - len(window.kernel)
        gain = affine.summands[0].gain
        rows = None
        if affine.steps:
            channels = follow_channels(self.flow, affine.start, affine.axis, affine.steps)
            stopped_by = why_stopped(channels, affine.steps, gain, affine.shift) if channels else ""
            if stopped_by:
                return f"it is read by {stopped_by}"
            if channels:
                rows = channels.along(axis)
        elif axis == affine.axis:
            rows = torch.arange(len(affine.shift), device=affine.shift.device)
        if rows is None:
            return f"it is read by {first_reader}"
        is_zero = rows < 0
        scale = gain[rows].where(~is_zero, 1), affine.shift[rows].where(~is_zero, 0)
        readers.append(_Reader(name, window, scale))
        return None

    # What a group changes

    def _values_between(self, source: TensorVersion, value: TensorVersion) -> set[TensorVersion]:
        """Return the values from which one is computed, back to its source, without both."""
        between: set[TensorVersion] = set()
        stack = [value]
        while stack:
            operation = self.flow.operation_of.get(stack.pop())
            for operand in operation.inputs if operation else ():
                if (
                    operand != source
                    and operand in self._values.affine_of
                    and operand not in between
                ):
                    between.add(operand)
                    stack.append(operand)
        return between

    def _values_after(self, value: TensorVersion) -> set[TensorVersion]:
        """Return what operations give that a norm passes on its way into the layers that read it."""
        after: set[TensorVersion] = set()
        for operation in self.flow.reads[value]:
            if operation.name not in LAYERS:
                for output in operation.outputs:
                    after |= {output, *self._values_after(output)}
        return after

    def _unmerged_that_change(
        self, group: Group, changed: set[TensorVersion], parts: set[str]
    ) -> tuple[str, ...]:
        """Return the modules that are not merged and whose inputs or outputs are among the changed values.

        Modules without parameters are left out. A norm that is written into its readers is one of them, as it becomes
        the identity.
        """
        merged = parts | {*group.carriers, *names_in(group)}
        names_touched: set[str] = set()
        for value in changed:
            names_touched |= self._modules_by_value[value]
        names = [name for name in names_touched if not self._holds_only(name, merged)]
        names.sort(key=self._order.__getitem__)
        if group.kind == "readers":
            names += [name for _, name in group.changes]
        return tuple(names)

    def _holds_only(self, name: str, parts: set[str]) -> bool:
        """Return True if every module with parameters or buffers of its own, here and inside, is among the parts."""
        if name not in self._owners:
            self._owners[name] = _owners_in(name, self.model.get_submodule(name))
        outside = [path for path in self._owners[name] if not lies_within(path, parts)]
        return not outside

    def _add(
        self, group: Group, changed: set[TensorVersion], parts: frozenset[str] = frozenset()
    ) -> None:
        """Add a group unless the code that connects its modules branches on the numbers of a batch.

        `changed`: the values that are others once the group is merged, by which is found what lies `between`: modules
        that are neither merged here nor among the parts.
        """
        reason = self._why_not_merged(group)
        if reason:
            for _, name in group.changes:
                if name in self.norms:
                    self.left[name] = reason
            return
        for _, name in group.changes:
            self.left.pop(name, None)
        self.groups.append(
            replace(group, between=self._unmerged_that_change(group, changed, set(parts)))
        )

    def _why_not_merged(self, group: Group) -> str:
        """Return why a group is left: code around it computes more, or branches on numbers; "" if not."""
        if group.kind != "chain" and not all(map(self._ends_with, group.changes)):
            return "its module computes more than the norm"
        names = _names_of(group)
        for deciding in self._deciding:
            children = {_child_of(deciding, name) for name in names}
            if len(children) > 1 or deciding in names:
                return f"{deciding or 'the model'} branches on the numbers of a batch"
        return ""

    def _ends_with(self, change: Change) -> bool:
        """True if the last operation of a module that becomes the identity is what the change removes."""
        form, name = change
        operations = self._values.operations_of[name]
        if form != "identity":
            return True
        if not operations:
            return False
        end = self._values.affine_of.get(operations[-1].outputs[0])
        return end is not None and change in end.changes

    # Two layers in turn become their product

    def _add_chains(self) -> None:
        """Add the pairs of layers whose product is not larger, last ones first, so that a whole chain becomes one."""
        zero_branches = set()
        for group in self.groups:
            zero_branches |= {name for form, name in group.changes if form == "nothing"}
        outputs: dict[str, int] = {}
        for output, before in reversed(self._values.chained):
            first = carrier_of(before.summands)
            second = self._values.affine_of[output].summands[0]
            last = second.layer
            if first is None or not first.layer or not last or zero_branches & {first.layer, last}:
                continue
            adds_source = not all(before.layers)
            if adds_source or first.window.groups > 1 or not first.window.is_plain:
                continue
            first_weight = self._weight(first.layer)
            second_weight = self._weight(last)
            rows = outputs.get(last, len(second_weight))
            if (
                first_weight.ndim != second_weight.ndim
                or rows * first_weight[0].numel()
                > first_weight.numel() + rows * second_weight.shape[1]
            ):
                continue
            outputs[first.layer] = rows
            group = Group(
                "chain",
                carriers=(first.layer, last),
                windows=(first.window, second.window),
                changes=(("identity", last),),
                needs_sum=not before.is_layer_alone,
            )
            self._add(
                group, self._values_between(before.source, output), frozenset(names_in(before))
            )

    # Of a module one layer is left

    def _add_whole(self, group: Group) -> None:
        """Add a module that is to become its layer, unless that is part of a chain or a sum that is not merged."""
        (layer,) = group.carriers
        other_kinds = [other.kind for other in self.groups if layer in other.carriers]
        if "chain" not in other_kinds and ("sum" in other_kinds) == group.needs_sum:
            self._add(group, set())


def _names_of(group: Group) -> list[str]:
    names = [*group.carriers, *(name for _, name in group.changes)]
    return [*names, group.whole.name] if group.whole else names


def _owners_in(name: str, module: nn.Module) -> list[str]:
    """Return the names of a module and of those inside that have parameters or buffers of their own."""
    owners = []
    for path, inner in module.named_modules(prefix=name):
        tensors = (*inner._parameters.values(), *inner._buffers.values())
        if any(tensor is not None for tensor in tensors):
            owners.append(path)
    return owners


def _child_of(parent: str, name: str) -> str | None:
    """Return the name of the child that is or contains a module, or None if the module is not inside the parent."""
    if not parent:
        return name.partition(".")[0]
    if not name.startswith(f"{parent}."):
        return None
    return name.removeprefix(f"{parent}.").partition(".")[0]
