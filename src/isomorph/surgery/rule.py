"""Rules, by name, and what a model carries of them: its base, its edits and notes."""

import dataclasses
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import nn

from isomorph.errors import UserError, did_you_mean
from isomorph.operations import copy_module, is_compiled, unwrap, wrappers_of
from isomorph.surgery.modules import list_names
from isomorph.surgery.site import Site


class Rule:
    """Base class of the rules: replace a module by another that computes the same function.

    A rule is a frozen dataclass, which prints, hashes and is stored with the model. It defines `atol`, `reason` and
    `build`, and where it needs them the other members. Each gets a `Site`: the module, its name, and what is around it.

    Raises: UserError for a class whose methods read a module instead of a site.

    >>> from dataclasses import dataclass
    >>> from typing import ClassVar
    >>> @dataclass(frozen=True)
    ... class ReLUToLeakyReLU(iso.surgery.Rule):
    ...     atol: ClassVar[float] = 1e-5
    ...     def reason(self, site):
    ...         return None if isinstance(site.module, torch.nn.ReLU) else "it is not a ReLU"
    ...     def build(self, site):
    ...         return torch.nn.LeakyReLU(0.0)
    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> iso.verify(cnn, iso.recast(cnn, ReLUToLeakyReLU(), where="layer3.*"), torch.randn(1, 3, 32, 32)).passed
    True
    """

    atol: ClassVar[float]
    """Largest difference that `verify` accepts by default, relative to the model's largest output."""

    kind: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Module classes: a selected module that the rule rejects is an error if it is of one, and skipped otherwise."""

    takes_parts: ClassVar[bool] = False
    """True if globs may name parts of joint projections (`blocks.*.attn.v` of a `qkv`)."""

    keeps_output: ClassVar[bool] = True
    """False if a replacement computes something else than its module, and only the model computes the same."""

    is_reverted: ClassVar[bool] = True
    """False if `revert` leaves what the rule did, since there is nothing to convert back to."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_members(cls)

    @property
    def accepted_difference(self) -> float:
        """Largest difference that `verify` accepts by default with the rule's options."""
        return self.atol

    @property
    def keeps_function(self) -> bool:
        """False for options with which the outputs change."""
        return True

    @classmethod
    def is_of_kind(cls, module: nn.Module) -> bool:
        """Return True for a module whose rejection is an error."""
        return isinstance(module, cls.kind)

    @classmethod
    def kind_names(cls) -> list[str]:
        """Return what the rule recasts, as messages name it."""
        kinds = [kind for kind in cls.kind if not kind.__module__.startswith("isomorph.layers")]
        return [
            f"{kind.__name__} of timm" if kind.__module__.startswith("timm.") else kind.__name__
            for kind in kinds
        ]

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        raise NotImplementedError

    def build(self, site: Site) -> nn.Module:
        """Return the replacement, with new parameters. Raises: UserError if the module is not accepted."""
        raise NotImplementedError

    def connect(self, site: Site) -> None:
        """Connect a replacement, `site.module`, to the rest of the model.

        Called for every module that the rule replaced, after each edit of the model, so more than once. A revert may
        have replaced the module again: then what connected it is removed.
        """

    def accepts(self, site: Site) -> bool:
        """Return True if the module can be recast."""
        return self.reason(site) is None

    def check(self, site: Site) -> None:
        """Check that the rule fits a module. Raises: UserError with the reason if not."""
        if isinstance(site, nn.Module):
            raise UserError(
                f"rules get a Site, and this is a {type(site).__name__}; give iso.surgery.Site(module)"
            )
        reason = self.reason(site)
        if reason is not None:
            raise UserError(f"{type(self).__name__} does not fit this module: {reason}")


def _check_members(rule: type[Rule]) -> None:
    """Check that a rule reads sites. Raises: UserError for one written for modules, with what to change."""
    for name, instead in (
        ("within", "read site.model in reason and build"),
        ("attach", "name it connect(self, site)"),
    ):
        if name in vars(rule):
            raise UserError(
                f"{rule.__name__}.{name} is never called: rules get a Site now; {instead}"
            )
    for name in ("reason", "build"):
        method = vars(rule).get(name)
        if not inspect.isfunction(method):
            continue
        parameters = list(inspect.signature(method).parameters)[1:]
        if parameters == ["module"]:
            raise UserError(
                f"{rule.__name__}.{name} takes a module, and rules get a Site now; write {name}(self, site), and "
                "site.module for the module"
            )


# At 1,000 the attention to the next position is exp(-1000), 0 in float64; below 1e-4 it is nearly uniform.
LOCALITY = (1e-4, 1e3)

# Bounds of the logit; beyond them the sigmoid is exactly 0 or 1 in float64.
GATE = (-1e3, 1e3)

# Attention maps for every head; Refiner uses up to 6.
RATIO = (0, 64)

# Side of a kernel on attention maps; Refiner uses 3.
KERNEL = (1, 127)

# Height and width of a grid of tokens.
GRID = (1, 4096)

# Height and width of the window around a query.
WINDOW = (1, 127)

# Number of tokens before the grid.
PREFIX = (0, 4096)

# N, where a sum of branches is divided by sqrt(N).
RESCALE = (1e-6, 1e6)


def check_number(name: str, value: Any, bounds: tuple[float, float]) -> None:
    """Check that a value is a number within bounds. Raises: UserError otherwise."""
    low, high = bounds
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    expected = f"from {low:g} to {high:g}"
    if is_number and value <= 0 < low:
        expected = f"above 0, {expected}"
    if not is_number or not abs(value) < math.inf:
        expected = f"a finite number {expected}"
    _require(is_number and low <= value <= high, name, value, f"must be {expected}")


def check_int(name: str, value: Any, bounds: tuple[int, int], hint: str = "") -> None:
    """Check that a value is a whole number within bounds; the hint explains special values.

    Raises: UserError otherwise.
    """
    fits = type(value) is int and bounds[0] <= value <= bounds[1]
    _require(fits, name, value, f"must be a whole number from {bounds[0]} to {bounds[1]}{hint}")


def check_bool(name: str, value: Any) -> None:
    """Check that a value is true or false. Raises: UserError otherwise."""
    _require(isinstance(value, bool), name, value, "must be true or false")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that a value is one of the choices. Raises: UserError otherwise."""
    *first, last = map(repr, choices)
    fits = isinstance(value, str) and value in choices
    _require(fits, name, value, f"is unknown; choose {', '.join(first)} or {last}")


def check_grid(grid_size: Any, prefix_tokens: Any) -> None:
    """Check a grid of tokens and the number of prefix tokens; None is allowed. Raises: UserError otherwise."""
    if grid_size is not None:
        is_pair = (
            isinstance(grid_size, Sequence)
            and not isinstance(grid_size, str)
            and len(grid_size) == 2
        )
        _require(is_pair, "grid_size", grid_size, "must be (height, width)")
        height, width = grid_size
        check_int("grid_size height", height, GRID)
        check_int("grid_size width", width, GRID)
    if prefix_tokens is not None:
        check_int("prefix_tokens", prefix_tokens, PREFIX)


def _require(fits: bool, name: str, value: Any, problem: str) -> None:
    if fits:
        return
    shown = repr(value)
    if len(shown) > 40:
        shown = f"{shown[:37]}..."
    raise UserError(f"{name} {shown} {problem}")


# Rules by the name of their class, in order of registration.
RULES: dict[str, type[Rule]] = {}

RuleType = TypeVar("RuleType", bound=type[Rule])


def register_rule(rule: RuleType) -> RuleType:
    """Add a rule to those that recipes, checkpoints and the command line know by name; a class decorator.

    Raises: UserError if it is not a frozen dataclass that derives from Rule, or its name is taken.

    >>> iso.surgery.register_rule(iso.ConvToGPSA) is iso.ConvToGPSA  # registered already: nothing changes
    True
    """
    name = getattr(rule, "__name__", str(rule))
    if not (dataclasses.is_dataclass(rule) and rule.__dataclass_params__.frozen):
        raise UserError(f"{name} is not a rule; make it a frozen dataclass")
    if not (isinstance(rule, type) and issubclass(rule, Rule) and hasattr(rule, "atol")):
        raise UserError(
            f"{name} is not a rule; derive it from iso.surgery.Rule and give it an atol"
        )
    if RULES.get(name, rule) is not rule:
        raise UserError(f"a rule named {name} is registered already; choose another name")
    RULES[name] = rule
    return rule


def build_rule(name: str, **fields: Any) -> Rule:
    """Return a rule by name with the fields that are not None.

    Raises: UserError for an unknown rule, a field that it does not have, or a value that it does not take.

    >>> iso.surgery.build_rule("ConvToGPSA", init="paper", gate=None)
    ConvToGPSA(init='paper', locality=None, gate=None, content='global', window=None)
    """
    if name not in RULES:
        hint = did_you_mean(name, RULES, f"choose one of {', '.join(RULES)}")
        raise UserError(f"{name} is not a rule; {hint}")
    values = {field: value for field, value in fields.items() if value is not None}
    field_names = [field.name for field in dataclasses.fields(RULES[name])]  # type: ignore[arg-type]
    for field in values:
        if field not in field_names:
            raise UserError(f"{name} has no {field}; it has {', '.join(field_names)}")
    return RULES[name](**values)


@dataclass(frozen=True)
class Edit:
    """A rule, and the names of the modules or parts of joint projections that it replaced.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.edits(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv?"))[0].names
    ('layer3.0.conv1', 'layer3.0.conv2')
    """

    rule: Rule
    names: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """What isomorph knows of a model that its modules do not say, in one attribute of the model."""

    # The named model that it was made from, with its arguments, as checkpoints store it.
    base: Mapping[str, Any] | None = None

    # The edits by which it was made from its base, oldest first.
    edits: tuple[Edit, ...] = ()

    # Messages for the user about side effects of surgery and loading.
    notes: tuple[str, ...] = ()

    # What its weights were before training.
    start: str = ""

    # True if its input size is the one that it was trained on.
    trained_size: bool = False

    # True if the user's function built it, so that a checkpoint need not say how.
    is_of_function: bool = False

    # The folder of the data that it is tested on, where the user named one.
    data_root: str | None = None


def record(model: nn.Module) -> Record:
    """Return the record of a model, which is empty for one that isomorph has not changed or loaded."""
    return getattr(wrappers_of(model)[-1], "isomorph_record", Record())


def update_record(model: nn.Module, **changes: Any) -> None:
    """Change fields of a model's record."""
    model.isomorph_record = replace(record(model), **changes)  # type: ignore[assignment]


def edits(model: nn.Module) -> tuple[Edit, ...]:
    """Return the edits by which the model was made from its base, oldest first.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.edits(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))[0].names
    ('linear',)
    >>> iso.edits(cnn)
    ()
    """
    return record(model).edits


def edits_since(model: nn.Module, base: nn.Module) -> tuple[Edit, ...]:
    """Return the edits by which `model` was made from `base`.

    >>> tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(), where="layer3.0.conv1")
    >>> wide = iso.recast(tcnn, iso.LinearToPyramid(), where="linear")
    >>> [edit.names for edit in iso.surgery.edits_since(wide, tcnn)]
    [('linear',)]
    """
    own = edits(model)
    shared = 0
    for edit, other in zip(own, edits(base), strict=False):
        if edit != other:
            break
        shared += 1
    return own[shared:]


def notes(model: nn.Module) -> tuple[str, ...]:
    """Return the notes on side effects of surgery on a model, oldest first; they are not saved with it.

    >>> cnn = torch.compile(timm.create_model("cifar_resnet20"))
    >>> iso.surgery.notes(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1"))
    ('the model was compiled and its copy is not: compile the copy',)
    """
    return record(model).notes


def add_notes(model: nn.Module, *sentences: str) -> None:
    """Add notes to a model; a note that it already has is not repeated."""
    notes = dict.fromkeys((*record(model).notes, *sentences))
    update_record(model, notes=tuple(notes))


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of the model inside wrappers, with a note if it was compiled. Raises: UserError as `unwrap`."""
    plain = unwrap(model)
    new = copy_module(plain)
    hooked = []
    # of the model itself: of one with a wrapped part, plain is a copy
    for name, parameter in unwrap(model, to_copy=False).named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            hooked.append(name)
    if hooked:
        add_notes(
            new,
            f"hooks on gradients are not copied ({list_names(hooked)}): register them on the copy",
        )
    if is_compiled(model):
        add_notes(new, "the model was compiled and its copy is not: compile the copy")
    return new
