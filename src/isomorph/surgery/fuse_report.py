"""What `fuse` did to a model, as a report that a user reads."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from isomorph.surgery.modules import list_names


@dataclass(frozen=True, repr=False)
class FuseReport:
    """What `fuse` did to a model: what was fused and merged into which layers, and what was left, with the reason.

    `across`: what of it was merged across modules, with a module in between whose inputs or outputs are others now, or
    the norm itself, if it was written into what reads it; no call of the `entry_points` shows it, but code that calls
    this module itself, or a hook on it, would. `uncalled`: modules with parameters that no call runs, `untried`:
    arguments of forward that no call sets. `wholes`: modules in whose place the one layer is that was left in them.

    `difference` is the largest in float64, relative to the largest output, over the `inputs` tried; None if none was.
    `rounded` is that of the model returned, whose weights are rounded to the precision of the given model.

    >>> report = iso.surgery.fuse_with_report(timm.create_model("cifar_resnet20").eval())[1]
    >>> len(report.merged), report.left, report.difference < 1e-12
    (19, {}, True)
    """

    fused: tuple[str, ...] = ()
    merged: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    across: dict[str, str] = field(default_factory=dict)
    parameters: tuple[int, int] = (0, 0)
    difference: float | None = None
    inputs: tuple[str, ...] = ()
    entry_points: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    rounded: float | None = None

    def __str__(self) -> str:
        counts = f"{len(self.merged)} norms, scales or layers merged, {len(self.left)} left"
        lines = [
            f"{len(self.fused)} layers replaced by their own fuse(); {counts}",
            f"  parameters {self.parameters[0]:,} before, {self.parameters[1]:,} after",
        ]
        if self.difference is not None:
            compared = f"compared at {', '.join(self.inputs)}"
            rounded = f", {self.rounded:.2g} once the weights are rounded" if self.rounded else ""
            lines.append(
                f"  max |diff| / max |out| {self.difference:.2g} in float64{rounded}, {compared}"
            )
            lines.append(f"  called by {', '.join(self.entry_points)}")
        if self.untried and self.across:
            lines.append(f"  not tried: other values of {list_names(list(self.untried))}")
        if self.uncalled and self.merged:
            lines.append(
                f"  not compared, as no example calls them: {list_names(list(self.uncalled))}"
            )
        if self.wholes:
            lines.append(
                f"  replaced by the one layer left in them: {list_names(list(self.wholes))}"
            )
        for between, names in _names_by_text(self.across).items():
            if names != [between]:
                lines.append(
                    f"  merged across {between}, which gives or gets other values now: {list_names(names)}"
                )
        into_readers = [name for name, between in self.across.items() if name == between]
        if into_readers:
            lines.append(
                f"  merged into what reads them, so that they give what they get: {list_names(into_readers)}"
            )
        lines += [f"  {line}" for line in describe_left(self.left)]
        return "\n".join(lines)

    __repr__ = __str__


def describe_left(left: Mapping[str, str]) -> list[str]:
    """Return a line for each reason why norms or layers stay: left bn1 and bn2: the reason."""
    return [f"left {list_names(names)}: {reason}" for reason, names in _names_by_text(left).items()]


def _names_by_text(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that have each text."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        names[text].append(name or "the model")
    return names
