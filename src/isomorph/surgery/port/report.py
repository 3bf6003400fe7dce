"""What was carried from one model to another, how, and whether both are equal."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.surgery.modules import list_names
from isomorph.surgery.port.compare import TOLERANCE, OutputRow, Place, SettingPair
from isomorph.surgery.port.further import FurtherInputs
from isomorph.surgery.port.graph import Graph
from isomorph.surgery.port.solve import COMPUTED, NEUTRAL, OWN, Solution

_SHOWN = 6
# How the note on another number of classes begins, which the verdict has too.
OTHER_CLASSES = "the numbers of classes, or of features, differ"


@dataclass(frozen=True)
class TensorWay:
    """A tensor of the target, the source's tensors that its numbers come from, and how."""

    target: str
    sources: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        return f"{self.target} <- {', '.join(self.sources) or 'no tensor'} ({self.how})"


@dataclass(frozen=True)
class Setting:
    """A setting that is not a weight and differs: its name, its values in source and target, and where."""

    name: str
    source: Any
    target: Any
    modules: tuple[str, ...]

    @property
    def values(self) -> str:
        """The setting and its values, without the modules."""
        return f"{self.name}: {self.source} in the source, {self.target} in the target"

    def __str__(self) -> str:
        return f"{self.values} ({list_names(self.modules, _SHOWN)})"


@dataclass(frozen=True, repr=False)
class PortReport:
    """Result of `port_weights`: the model with the weights, and how it compares with the source.

    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> report = iso.port_weights(cnn, timm.create_model("cifar_resnet20"), torch.randn(1, 3, 32, 32))
    >>> report.equal, report.difference, len(report.kept)
    (True, 0.0, 0)
    """

    model: nn.Module = field(compare=False)
    equal: bool
    """True if the outputs are equal in float64, with the source's weights and with random ones."""

    difference: float
    """Largest relative difference of an output in float64."""

    outputs: tuple[OutputRow, ...]
    tensors: tuple[TensorWay, ...]
    """The way of every tensor of the target that has the source's numbers."""

    left: tuple[str, ...]
    """Tensors of the source that the target cannot hold."""

    kept: tuple[str, ...]
    """Tensors of the target that keep their own numbers."""

    settings: tuple[Setting, ...] = ()
    """Settings that are not weights, and differ: eps, a kind of activation, a scale."""

    explained: bool = False
    """True if the models are not equal, and a copy of the target that computes with these settings of the source is."""

    places: tuple[Place, ...] = ()
    """Every place where the models part, the first one first, each on the source's values."""

    ambiguous: tuple[str, ...] = ()
    """Layers that structure alone could not tell apart, and that were tried in float64."""

    further: tuple[FurtherInputs, ...] = ()
    """Other inputs on which outputs were compared too, with random weights: sizes, numbers, more images."""

    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One sentence: equal or not, by how much, and which setting would make the models equal."""
        count = f"{len(self.tensors)} tensors carried"
        if self.equal:
            own_numbers = f", {len(self.kept)} keep their own numbers" if self.kept else ""
            return f"equal in float64 (relative difference {self.difference:.2g}): {count}{own_numbers}"
        parting = [row for row in self.further if row.difference > TOLERANCE]
        if parting:
            worst = max(parting, key=lambda row: row.difference)
            return (
                f"NOT equal: the outputs differ by {worst.difference:.2g} in float64 on {worst.inputs}, and not on the "
                "first image given"
            )
        verdict = f"NOT equal: the outputs differ by {self.difference:.2g} in float64"
        if math.isinf(self.difference):
            verdict = "NOT equal: the outputs differ in shape"
        if self.explained:
            values = "; ".join(setting.values for setting in self.settings)
            return (
                f"{verdict}; with the source's settings they are equal, which was tried: {values}"
            )
        alone = [note for note in self.notes if "alone" in note]
        classes = [note for note in self.notes if note.startswith(OTHER_CLASSES)]
        if classes:
            return "; ".join([f"NOT equal: {classes[0]}", *alone])
        if alone:  # says more than the first place where the models part
            return "; ".join(["NOT equal: one model computes more than the other", *alone])
        if self.places:
            return f"{verdict}, first at {self.places[0]}"
        return verdict

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, without the model."""
        fields = {name: value for name, value in vars(self).items() if name != "model"}
        rows = ("outputs", "tensors", "settings", "places", "further")
        plain = {name: [asdict(row) for row in fields[name]] for name in rows}
        return {**fields, **plain}

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [f"  {row}" for row in (*self.outputs, *self.further)]
        lines += [f"  setting: {item}" for item in self.settings]
        lines += [f"  parts at {item}" for item in self.places[:_SHOWN]]
        if len(self.places) > _SHOWN:
            lines.append(f"  parts at {len(self.places) - _SHOWN} more places")
        if self.left:
            lines.append(f"  not carried: {list_names(self.left, _SHOWN)}")
        if self.kept:
            lines.append(f"  the target keeps its own: {list_names(self.kept, _SHOWN)}")
        if self.ambiguous:
            lines.append(f"  tried in float64: {list_names(self.ambiguous, _SHOWN)}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__


class NotPorted(UserError):
    """Error of `port_weights` for models that are not equal; its text is the report, also its attribute `report`.

    With `advice` it is the report's first line and the advice.

    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> try:
    ...     iso.port_weights(cnn, timm.create_model("cifar_resnet32"), torch.randn(1, 3, 32, 32))
    ... except iso.surgery.NotPorted as error:
    ...     print(error.report.equal)
    False
    """

    def __init__(self, report: PortReport, advice: str | None = None) -> None:
        text = f"{report}\npartial=True returns the target with what could be carried"
        super().__init__(text if advice is None else report.verdict + advice)
        self.report = report


def settings_in(differences: Sequence[Place]) -> tuple[Setting, ...]:
    """Return the settings that differ, each once, with the modules where they do."""
    # by their text, as values need not be hashable
    by_text: dict[str, tuple[SettingPair, dict[str, None]]] = {}
    for difference in differences:
        for setting in difference.settings:
            _, modules = by_text.setdefault(repr(setting), (setting, {}))
            modules[difference.target] = None
    return tuple(Setting(*setting, tuple(modules)) for setting, modules in by_text.values())


def ways_of(source: Graph, target: Graph, solution: Solution) -> tuple[TensorWay, ...]:
    """Return the way of every tensor of the target that gets numbers."""
    tensor_ways = []
    for parameter, names in target.record.names.items():
        origins = solution.origins.tensors[parameter]
        if parameter not in solution.origins.written or not origins.numel():
            continue
        names_of_sources, how = _way(source, sorted(solution.sources_of[parameter]), origins)
        for name in names:
            tensor_ways.append(TensorWay(name, names_of_sources, how))
    return tuple(tensor_ways)


def _way(source: Graph, parameters: list[int], origins: Tensor) -> tuple[tuple[str, ...], str]:
    """Return the names of the tensors that numbers come from, and how they do."""
    in_order = source.entries.owner(origins) is not None and origins.is_contiguous()
    names = tuple(source.record.names[parameter][0] for parameter in parameters)
    if (origins == NEUTRAL).all():
        return names, "a number that changes nothing, as the source has none"
    steps = []
    if not in_order:
        descriptions = {
            COMPUTED: "computed",
            NEUTRAL: "zeros where the source has none",
            OWN: "in part its own",
        }
        steps = [
            description for kind, description in descriptions.items() if (origins == kind).any()
        ]
    if len(parameters) > 1:
        steps.append(f"joined from {len(parameters)}")
    if len(parameters) == 1:
        tensor = source.values[parameters[0]]
        if tensor.numel() > origins.numel():
            steps.append("a part of it")
        elif not in_order and tensor.numel() == origins.numel():
            steps.append("in another order")
        elif tensor.shape != origins.shape:
            steps.append(f"{tuple(tensor.shape)} as {tuple(origins.shape)}")
    return names, ", ".join(steps) or "unchanged"


def is_equal(rows: Sequence[OutputRow], model: str) -> bool:
    """True if all outputs of a model are values of the other."""
    own_rows = [row for row in rows if row.own == model]
    return bool(own_rows) and all(row.difference <= TOLERANCE for row in own_rows)
