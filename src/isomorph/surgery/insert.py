"""Insert a new block into a trained network: x + gamma * block(x) after a module, with gamma = 0 at first."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from isomorph.errors import UserError, first_line
from isomorph.layers import MapAttention
from isomorph.layers.eval_mode import eval_mode
from isomorph.layers.map_attention import InsertedBlock, Layout
from isomorph.operations import tensors_in
from isomorph.surgery.attention_layers import cached_by_class
from isomorph.surgery.merge import own_example
from isomorph.surgery.model_inputs import Inputs, cast_floats, run_model
from isomorph.surgery.recast import check_model, replay
from isomorph.surgery.record import Edit, add_notes, copy_model
from isomorph.surgery.rule import Rule
from isomorph.surgery.where import Where, describe_where, matches_where, nearest_names

MakeBlock = Callable[[int], nn.Module]
"""A function from a number of channels to a block that keeps the shape of its input."""

BLOCKS: dict[str, MakeBlock] = {}
"""Blocks by the name under which checkpoints store them."""


def register_block(block: MakeBlock, name: str = "") -> MakeBlock:
    """Name a block, so that `iso.load` can rebuild networks into which it was inserted; a decorator too.

    `name` is by default module and name of the function or class. A script that loads such a checkpoint registers the
    same block first.

    Raises: UserError for a name that another block has.

    Example:
        >>> iso.surgery.register_block(iso.layers.MapAttention) is iso.layers.MapAttention
        True
    """
    name = name or block_name(block)
    if BLOCKS.setdefault(name, block) is not block:
        raise UserError(f"a block named {name} is registered already; give another name")
    return block


def block_name(block: Any) -> str:
    return f"{block.__module__}.{getattr(block, '__qualname__', type(block).__qualname__)}"


class WithBlock:
    """Mixin of the classes of modules after which a block is inserted: their own forward, then the child `inserted`."""

    original: type[nn.Module]
    inserted: InsertedBlock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return change_entry(output, self.inserted.entry, self.inserted)

    def to_original(self, atol: float = 0.0) -> nn.Module:
        """Return the module without the block. Raises: ValueError if gamma is not 0, unless `atol` is infinite."""
        largest = self.inserted.gamma.abs().max().item()
        if largest != 0 and atol != math.inf:
            raise ValueError(f"the inserted block acts: its gamma is up to {largest:.2g}; keep it")
        plain: Any = copy.deepcopy(self)
        plain.__class__ = self.original
        del plain.inserted
        return plain

    def __reduce__(self) -> Any:
        """Pickle by the original class: this class is made at run time."""
        return _new_with_block, (self.original,), self.__dict__


def _new_with_block(kind: type[nn.Module]) -> nn.Module:
    made = class_with_block(kind)
    return made.__new__(made)


@cached_by_class
def class_with_block(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the modules of a class after which a block is inserted."""
    return type(f"{kind.__name__}WithBlock", (WithBlock, kind), {"original": kind})


def entry_of(output: Any, entry: int | str | None) -> Any:
    return output if entry is None else output[entry]


def change_entry(output: Any, entry: int | str | None, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with one entry changed; the output itself is changed if `entry` is None."""
    if entry is None:
        return change(output)
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed[entry] = change(output[entry])
        return changed
    values = list(output)
    values[entry] = change(values[entry])  # type: ignore[index]
    named = hasattr(output, "_fields")
    return type(output)(*values) if named else type(output)(values)


@dataclass(frozen=True)
class Insert(Rule):
    """Rule that inserts a block after a module; `insert` finds the channels and the layout.

    Raises: UserError from `build` for a block that is not registered (`register_block`).

    Example:
        >>> relu = iso.surgery.Insert("isomorph.layers.map_attention.MapAttention", 8).build(torch.nn.ReLU())
        >>> relu.inserted.gamma.shape
        torch.Size([8])
    """

    block: str
    """Name of the block, as `register_block` gave it."""

    channels: int
    """Channels of the module's output."""

    layout: Layout = "map"
    """What the module returns."""

    entry: int | str | None = None
    """Index or key of the entry that is changed, of an output with several."""

    atol: ClassVar[float] = 0.0
    kind: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)

    def reason(self, module: nn.Module) -> str | None:
        """Return that the block is unknown, that one is inserted already, or that the module iterates its children."""
        if self.block not in BLOCKS:
            return f"the block {self.block} is not registered; call iso.surgery.register_block with it first"
        if isinstance(module, WithBlock):
            return "a block is inserted after it already"
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return f"it is a {type(module).__name__}; insert after its last child"
        return "it has a child named inserted" if hasattr(module, "inserted") else None

    def build(self, module: nn.Module) -> nn.Module:
        """Return a copy of the module with a new block. Raises: UserError as in `check`."""
        self.check(module)
        new: Any = copy.deepcopy(module)
        new.__class__ = class_with_block(type(module))
        new.inserted = InsertedBlock(BLOCKS[self.block](self.channels), self.channels, self.layout, self.entry)
        return new


def insert(
    model: nn.Module,
    block: MakeBlock | nn.Module,
    after: Where,
    example: Inputs | None = None,
    layout: Layout | None = None,
    entry: int | str | None = None,
) -> nn.Module:
    """Return a copy of the model with a new block after each selected module: x + gamma * block(x), gamma = 0.

    The outputs are equal bit by bit at first; training moves gamma. Names of the old state dict stay, the new
    parameters are those of `inserted`. After an nn.Sequential means after its last child. `iso.revert` removes blocks
    whose gamma is still 0.

    Args:
        model: any network.
        block: a function from a number of channels to a module that keeps the shape of its input, such as
            `iso.layers.MapAttention`; or a module, which is copied to every place.
        after: a glob over module names, several, or a function `(name, module) -> bool`.
        example: a batch as the model reads it; timm's models know their input size.
        layout: of the output; by default tokens if it has three axes, else the map whose channels are as many as the
            module has outputs.
        entry: index or key of the entry to change, of an output with several; by default the only map or tokens in it.

    Raises: UserError if `after` selects nothing, a module that is not called in the example or called by its parent in
        another way, an output that is no map, or a block that changes its input or gives another shape.

    Example:
        >>> cnn = timm.create_model("resnet18").eval()
        >>> new = iso.insert(cnn, iso.layers.MapAttention, after="layer3.1")
        >>> x = torch.randn(1, 3, 64, 64)
        >>> bool((new(x) == cnn(x)).all())
        True
    """
    model = check_model(model)
    example = own_example(model) if example is None else example
    if example is None:
        raise UserError("give an example, a batch as the model reads it: the shapes are those of its outputs")
    example = cast_floats(example, next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))
    name = _registered_name(block)
    seen = _outputs(model, list(_places(model, after)), example)
    edits: dict[Insert, list[str]] = {}
    for place, outputs in seen.items():
        edits.setdefault(_rule(model, place, outputs, name, layout, entry), []).append(place)
    new = copy_model(model)
    for rule, places in edits.items():
        new = replay(new, Edit(rule, tuple(places)))
    _match_features(new, seen)
    _check(model, new, seen, example)
    return new


def _registered_name(block: MakeBlock | nn.Module) -> str:
    """Return the name of a block, which is registered under it; of a module, the one of a function that copies it."""
    if isinstance(block, nn.Module):
        given, name = block, block_name(type(block)) + f" {id(block):x}"
        BLOCKS.setdefault(name, lambda channels: copy.deepcopy(given))
        return name
    name = block_name(block)
    if BLOCKS.get(name) is not block:
        name = next((known for known, each in BLOCKS.items() if each is block), name)
        BLOCKS[name] = block  # the latest definition, as in a notebook
    return name


def _places(model: nn.Module, after: Where) -> Iterator[str]:
    """Yield the names of the selected modules; of a Sequential, of its last child."""
    named = dict(model.named_modules())
    selected = [name for name, module in named.items() if matches_where(after, name, module)]
    if not selected:
        raise UserError(f"{describe_where(after)} matches no module{nearest_names(after, named)}")
    for name in selected:
        place = name
        while isinstance(named[place], nn.Sequential) and len(named[place]):
            place = f"{place}.{[*named[place]._modules][-1]}".lstrip(".")
        if not place:
            raise UserError("insert a block after a part of the model, not after the model itself")
        yield place


@torch.no_grad()
def _outputs(model: nn.Module, places: Sequence[str], example: Inputs) -> dict[str, list[Any]]:
    """Return what the modules return in one forward, call by call."""
    seen: dict[str, list[Any]] = {place: [] for place in places}
    hooks = [
        model.get_submodule(place).register_forward_hook(lambda _, __, output, of=seen[place]: of.append(output))
        for place in places
    ]
    try:
        with eval_mode(model):
            run_model(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    for place, outputs in seen.items():
        if not outputs:
            raise UserError(
                f"{place} is not called as a module in this forward: its parent reads its weight, iterates over its "
                "children, or takes another path; choose another module"
            )
    return seen


def _is_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3


def _rule(
    model: nn.Module, place: str, outputs: list[Any], block: str, layout: Layout | None, entry: int | str | None
) -> Insert:
    """Return the rule that fits what a module returns."""
    output = outputs[0]
    if entry is None and not isinstance(output, Tensor):
        items = (
            output.items()
            if isinstance(output, Mapping)
            else enumerate(output)
            if isinstance(output, tuple | list)
            else ()
        )
        fitting = [key for key, value in items if _is_features(value)]
        if len(fitting) != 1:
            found = f"has {len(fitting)} maps" if fitting else "has no map or tokens"
            raise UserError(f"the output of {place}, a {type(output).__name__}, {found}; give entry, its index or key")
        entry = fitting[0]
    try:
        features = entry_of(output, entry)
    except (KeyError, IndexError, TypeError):
        raise UserError(f"the output of {place} has no entry {entry!r}") from None
    if not _is_features(features):
        shown = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"{place} returns no map or tokens, but {shown}; choose a module that does")
    layout = layout or _guess_layout(model, place, features)
    return Insert(block, features.shape[1 if layout == "map" else -1], layout, entry)


def _guess_layout(model: nn.Module, place: str, features: Tensor) -> Layout:
    """Return the layout of a module's output: by how often its own parameters, or all, have each axis' size."""
    if features.ndim == 3:
        return "tokens"
    first, last = features.shape[1], features.shape[-1]
    for module in (model.get_submodule(place), model):
        sizes = Counter(size for parameter in module.parameters() for size in parameter.shape)
        if sizes[first] != sizes[last]:
            return "map" if sizes[first] > sizes[last] else "map, channels last"
    return "map"


def _match_features(model: nn.Module, seen: Mapping[str, list[Any]]) -> None:
    """Move each block to the device and dtype of what it reads, to be trained even in a frozen model."""
    for place, outputs in seen.items():
        inserted: Any = model.get_submodule(f"{place}.inserted")
        features = entry_of(outputs[0], inserted.entry)
        inserted.to(features.device, features.dtype).requires_grad_(True)


def _check(model: nn.Module, new: nn.Module, seen: Mapping[str, list[Any]], example: Inputs) -> None:
    """Check the blocks alone and in the network, whose outputs must be equal, and note gammas without a gradient.

    Raises: UserError naming the place otherwise.
    """
    for place, outputs in seen.items():
        inserted: Any = new.get_submodule(f"{place}.inserted")
        for output in outputs:
            _check_block(place, inserted, entry_of(output, inserted.entry))
    calls: Counter[str] = Counter()
    hooks = [
        new.get_submodule(f"{place}.inserted").register_forward_hook(lambda *_, of=place: calls.update([of]))
        for place in seen
    ]
    with eval_mode(model), eval_mode(new), torch.enable_grad():  # the same kernels for both
        before, after = run_model(model, example), run_model(new, example)
    for hook in hooks:
        hook.remove()
    for place, outputs in seen.items():
        if calls[place] != len(outputs):
            raise UserError(
                f"{place} iterates over its children, and would call the block {calls[place]} times in "
                f"{len(outputs)} calls; insert after one of its children"
            )
    pairs = list(zip(tensors_in(before), tensors_in(after), strict=True))
    if not all(torch.equal(a, b) for a, b in pairs):
        raise UserError(
            "the outputs differ after inserting: the model is random in eval mode, or a block is not finite"
        )
    _note_dead_gammas(new, list(seen), [after for _, after in pairs])


def _check_block(place: str, inserted: InsertedBlock, features: Tensor) -> None:
    """Check that a block fits what it reads. Raises: UserError if not."""
    x = features.movedim(-1, 1) if inserted.layout == "map, channels last" else features
    version, shape = x._version, tuple(x.shape)
    try:
        with eval_mode(inserted), torch.no_grad():
            y = inserted.block(x)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        raise UserError(f"the block does not fit {shape} after {place}: {first_line(error)[:160]}") from None
    if x._version != version:
        raise UserError(f"the block after {place} changes its input in place; make its first layer not in place")
    if not isinstance(y, Tensor) or y.shape != shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise UserError(f"the block after {place} turns {shape} into {found}; it must keep the shape")


def _note_dead_gammas(model: nn.Module, places: Sequence[str], outputs: Sequence[Tensor]) -> None:
    """Note the blocks whose gamma gets no gradient from the outputs."""
    gammas: list[Tensor] = [model.get_submodule(f"{place}.inserted").gamma for place in places]  # type: ignore[misc]
    trained = [output for output in outputs if output.requires_grad]
    if not trained:
        return
    total = sum(output.double().square().sum() for output in trained)
    gradients = torch.autograd.grad(total, gammas, allow_unused=True)  # type: ignore[arg-type]
    for place, gradient in zip(places, gradients, strict=True):
        if gradient is None or not gradient.any():
            add_notes(
                model,
                f"{place}.inserted gets no gradient in this example: something behind it multiplies it by 0, like a "
                "norm whose weight starts at 0, or nothing reads it",
            )


register_block(MapAttention)
