"""What `verify` reports of two models: their largest differences, and where they are."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isomorph.errors import UserError
from isomorph.json_values import json_values
from isomorph.surgery.calls import relative
from isomorph.surgery.comparison import Fidelity, TensorDifference
from isomorph.surgery.first_difference import FirstDifference
from isomorph.surgery.modules import list_names


@dataclass(frozen=True)
class Difference:
    """Largest difference of two outputs in float32 and float64, and the largest finite output.

    It is that of the models for one input, which the `name` describes; or of one recast module, of the class `kind`,
    from the original's, on the original's own input in float64. It is that of the tensor that differs most, relative to
    what is allowed for it: `where` is its path in the outputs if it differs by more, and `tensors` are all.

    `rounding` is the difference that rounding explains. `mode` names another precision or memory format, in which the
    difference is `fp32`. `ties` says where rounding decides between almost equal numbers, as for the order of boxes:
    there the second model was compared with the choices of the first.
    """

    name: str
    fp32: float
    fp64: float
    scale: float
    rounding: float = 0.0
    kind: str = ""
    where: str = ""
    mode: str = ""
    tensors: tuple[TensorDifference, ...] = ()
    ties: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, tensors: Sequence[TensorDifference], atol: float, **facts: Any
    ) -> "Difference":
        """Return the difference of outputs, which is that of the tensor that differs most."""
        worst = max(tensors, key=lambda row: (row.excess(atol), row.scale))
        return cls(
            name,
            worst.fp32,
            worst.fp64,
            worst.scale,
            worst.rounding,
            where="" if worst.is_within(atol) else worst.path,
            tensors=tuple(tensors),
            **facts,
        )

    @property
    def deviation(self) -> float:
        """The larger difference of both."""
        return max(self.fp32, self.fp64)

    def is_within(self, atol: float) -> bool:
        """True if no tensor differs by more than the tolerance, or than rounding explains."""
        return all(row.is_within(atol) for row in self.tensors)

    def __str__(self) -> str:
        location = f", in {self.where}" if self.where else ""
        end = f"where max |out| is {self.scale:.3g}{location}"
        if self.kind:
            return f"module {self.name}, {self.kind}: max |diff| {self.fp64:.3g} {end}"
        if self.mode:
            return f"input {self.name}, {self.mode}: max |diff| {self.fp32:.3g} {end}"
        return f"input {self.name}: max |diff| {self.fp32:.3g}, {self.fp64:.3g} {end}"

    def details(self, atol: float) -> list[str]:
        """Return a line for each tensor that differs, where there are several."""
        if len(self.tensors) == 1:
            return []
        differing = [row for row in self.tensors if not row.is_within(atol)]
        lines = [f"  {row}" for row in differing[:8]]
        if len(differing) > 8:
            lines.append(f"  and {len(differing) - 8} more")
        return lines


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Result of comparing two models: largest differences by input, and by recast module in float64.

    It passes if in every tensor of the outputs the difference is at most `atol` times its largest value, or no larger
    than rounding explains; and in each recast module's. The modules are compared too because a residual branch with a
    zero-initialised norm hides them from the output.

    An int8 file is rounded on purpose: `fidelity` says how close it is, and `stored` how close it was to its model when
    it was made; it passes if it is as close.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
    >>> report = iso.verify(cnn, tcnn, torch.randn(1, 3, 32, 32))
    >>> report.passed, report.fp64 < 1e-4, len(report.targets)
    (True, True, 6)
    """

    atol: float
    inputs: tuple[Difference, ...]
    targets: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on the recast model, such as parameters that are no longer tied, on what differs besides values, and on
    what the result does not show."""

    not_called: tuple[str, ...] = ()
    """Names of the recast modules whose weights the model reads without calling them."""

    fidelity: Fidelity | None = None
    stored: Fidelity | None = None

    first: FirstDifference | None = None
    """The first operation after which the models differ, by module, if their outputs do."""

    @property
    def fp32(self) -> float:
        """Largest difference of the outputs in float32, over all inputs."""
        return _largest(row.fp32 for row in self.inputs if not row.mode)

    @property
    def fp64(self) -> float:
        """Largest difference of the outputs in float64, over all inputs."""
        return _largest(row.fp64 for row in self.inputs if not row.mode)

    @property
    def finite(self) -> bool:
        """False if a difference is not finite, because outputs are not."""
        return all(math.isfinite(row.fp32 + row.fp64) for row in self.inputs)

    @property
    def passed(self) -> bool:
        """True if every difference is finite and within the tolerance, and every recast module was called."""
        if self.fidelity and self.stored:
            return self.finite and self.fidelity.is_like(self.stored)
        return self.finite and not self.not_called and not self._differing

    @property
    def _differing(self) -> list[Difference]:
        return [row for row in (*self.inputs, *self.targets) if not row.is_within(self.atol)]

    @property
    def verdict(self) -> str:
        """One sentence: equal or not, within which tolerance, and the largest differences relative to the outputs."""
        if not self.finite:
            return f"NOT equal: outputs are not finite{self._not_finite}"
        if self.fidelity and self.stored:
            start = (
                "as close as when it was made"
                if self.passed
                else "NOT as close as when it was made"
            )
            return f"{start}: int8 outputs at {self.fidelity}; then {self.stored}"
        if self.not_called:
            return f"NOT equal: the model reads the weights of {list_names(self.not_called)} without calling it"
        plain = [row for row in self.inputs if not row.mode]
        single = _largest(relative(row.fp32, row.scale) for row in plain)
        double = _largest(relative(row.fp64, row.scale) for row in plain)
        differences = f"max |diff| / max |out| {single:.3g} (float32), {double:.3g} (float64)"
        differing = self._differing
        if differing:
            return f"NOT equal within {self.atol:g}: {differences}{self._location(differing[0])}"
        if self.atol >= 1:
            return f"any difference is accepted, as atol is {self.atol:g}: {differences}"
        within = f"{self.atol:g}" if max(single, double) <= self.atol else "rounding"
        verdict = f"equal within {within}: {differences}"
        if any(row.ties for row in self.inputs):
            verdict += ", with the choices of the original"
        return verdict

    @property
    def _not_finite(self) -> str:
        for difference in self.inputs:
            for row in difference.tensors:
                if row.problem:
                    return f"; {row.path or 'the output'}: {row.problem}"
        return ""

    def _location(self, worst: Difference) -> str:
        """Return where a difference is, if it is not the one of all inputs that the verdict names."""
        location = f" in {worst.where}" if worst.where else ""
        if not (worst.kind or worst.mode):
            return location
        name = worst.name if worst.kind else worst.mode
        return f"; but {name} differs by {relative(worst.deviation, worst.scale):.3g}{location}"

    def _largest_inputs(self) -> Iterator[tuple[Difference, int]]:
        """Yield the largest difference of the inputs of each shape and kind, and the number of these inputs."""
        by_name: dict[tuple[str, str], list[Difference]] = {}
        for row in self.inputs:
            by_name.setdefault((row.name, row.mode), []).append(row)
        for rows in by_name.values():
            differing = [row for row in rows if not row.is_within(self.atol)]
            yield (
                max(differing or rows, key=lambda row: relative(row.deviation, row.scale)),
                len(rows),
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, with None for what is not finite."""
        return json_values(
            {**asdict(self), "fp32": self.fp32, "fp64": self.fp64, "passed": self.passed}
        )

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.first:
            lines.append(f"  {self.first}")
        for row, count in (*self._largest_inputs(), *((row, 1) for row in self.targets)):
            suffix = f" (the largest of {count})" if count > 1 else ""
            lines.append(f"  {row}{suffix}")
            for line in row.details(self.atol):
                lines.append(f"  {line}")
        for note in self.notes:
            lines.append(f"  note: {note}")
        return "\n".join(lines)

    __repr__ = __str__


def _largest(values: Iterable[float]) -> float:
    """Return the largest value, infinity if one is NaN, 0 without any."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


class NotEqual(UserError):
    """Error of `verify` for models that differ; its text is the report, which is also its attribute `report`.

    With `advice` it is the report's first line and the advice.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> try:
    ...     iso.verify(cnn, iso.unstride(cnn, where="layer3"), torch.randn(1, 3, 32, 32))
    ... except iso.surgery.NotEqual as error:
    ...     print(error.report.passed)
    False
    """

    def __init__(self, report: VerifyReport, advice: str | None = None) -> None:
        super().__init__(str(report) if advice is None else report.verdict + advice)
        self.report = report
        self.exit_status = 2 if report.finite else 1
