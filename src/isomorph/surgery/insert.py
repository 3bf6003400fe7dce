"""Insert a new block into a trained network: x + gamma * block(x) after a module, with gamma = 0 at first."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError, first_line
from isomorph.layers import MapAttention
from isomorph.layers.map_attention import InsertedBlock, Layout
from isomorph.layers.modes import eval_mode
from isomorph.operations import ModuleCall, observing, tensors_in
from isomorph.operations.observe import Notice
from isomorph.surgery.altered import Altered, altered_class, copy_as
from isomorph.surgery.calls import Inputs, map_tensors, run_model, to_model, with_other_size
from isomorph.surgery.recast import apply_rules, check_model
from isomorph.surgery.reference_calls import own_example
from isomorph.surgery.rule import Edit, Rule, add_notes, copy_model
from isomorph.surgery.site import (
    Site,
    Where,
    check_each_glob,
    describe_where,
    matches_where,
    nearest_names,
)

# A function from a number of channels to a block that keeps the shape of its input.
MakeBlock = Callable[[int], nn.Module]

# What follows the name of a module in that of the block inserted after it.
_BLOCK = ".inserted.block"

# Blocks by the name under which checkpoints store them.
BLOCKS: dict[str, MakeBlock] = {}

# Names that are valid in this process alone: of modules, lambdas, partial and local functions.
_TEMPORARY: set[str] = set()


def register_block(block: MakeBlock, name: str = "") -> MakeBlock:
    """Name a block, so that `iso.load` can rebuild networks into which it was inserted; a decorator too.

    `name` is by default module and name of the function or class. A script registers it before it loads a checkpoint.

    Raises: UserError for a name that another block has.

    >>> iso.surgery.register_block(iso.layers.MapAttention) is iso.layers.MapAttention
    True
    """
    name = name or block_name(block)
    if BLOCKS.setdefault(name, block) is not block:
        raise UserError(f"a block named {name} is registered already; give another name")
    return block


def block_name(block: Any) -> str:
    return f"{block.__module__}.{getattr(block, '__qualname__', type(block).__qualname__)}"


def temporary_blocks(all_edits: Iterable[Edit]) -> dict[str, str]:
    """Return the inserted blocks that another process cannot find, by the module after which they are."""
    blocks = {}
    for edit in all_edits:
        if isinstance(edit.rule, Insert) and edit.rule.block in _TEMPORARY:
            blocks.update(dict.fromkeys(edit.names, edit.rule.block))
    return blocks


class WithBlock(Altered):
    """Mixin of the classes of modules after which a block is inserted: their own forward, then the child `inserted`."""

    inserted: InsertedBlock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return change_entry(output, self.inserted.entry, self.inserted)

    def to_original(self, atol: float = 0.0) -> nn.Module:
        """Return the module without the block. Raises: ValueError if gamma is not 0 and `atol` below 1."""
        if atol < 1 and self.inserted.gamma.any():
            largest = self.inserted.gamma.abs().max().item()
            raise ValueError(
                f"the inserted block acts: its gamma is up to {largest:.2g}; keep it, or remove it with atol 1, which "
                "changes the outputs"
            )
        plain = copy_as(cast(Any, self), self.original)
        del plain.inserted
        return plain

    def around(self, rule: Rule) -> nn.Module:
        """Return what a rule makes of the module without its block, with the block after it."""
        replacement = rule.build(Site(self.to_original(1.0)))
        new = copy_as(replacement, altered_class(WithBlock, type(replacement)))
        new.inserted = copy.deepcopy(self.inserted)
        return new


def _entry(output: Any, entry: int | str | None) -> Any:
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
    if hasattr(output, "_fields"):  # a named tuple
        return type(output)(*values)
    return type(output)(values)


@dataclass(frozen=True)
class Insert(Rule):
    """Rule that inserts a block after a module; `insert` finds the channels and the layout.

    Raises: UserError from `build` for a block that is not registered (`register_block`).

    >>> rule = iso.surgery.Insert("isomorph.layers.map_attention.MapAttention", channels=8)
    >>> relu = rule.build(iso.surgery.Site(torch.nn.ReLU()))
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

    atol = 0.0
    kind = (nn.Module,)

    def reason(self, site: Site) -> str | None:
        if self.block not in BLOCKS:
            return (
                f"the block {self.block} is not registered; before, call iso.surgery.register_block(make, "
                f'name="{self.block}") with the function of channels that makes it'
            )
        return "a block is inserted after it already" if hasattr(site.module, "inserted") else None

    def build(self, site: Site) -> nn.Module:
        self.check(site)
        module = site.module
        block: Any = BLOCKS[self.block](self.channels)
        if not isinstance(block, nn.Module):
            raise UserError(f"{self.block} returns a {type(block).__name__}, not an nn.Module")
        new = copy_as(module, altered_class(WithBlock, type(module)))
        new.inserted = InsertedBlock(block, self.channels, self.layout, self.entry)
        return new


@torch.inference_mode(False)  # with gradients, also in a caller's no_grad
def insert(
    model: nn.Module,
    block: MakeBlock | nn.Module,
    after: Where,
    example: Inputs | None = None,
    entry: int | str | None = None,
) -> nn.Module:
    """Return a copy of the model with a new block after each selected module: x + gamma * block(x), gamma = 0.

    The outputs are equal bit by bit at first; training moves gamma. Names of the old state dict stay, the new
    parameters are those of `inserted`. After an nn.Sequential means after its last child. `iso.revert` removes blocks
    whose gamma is still 0. An output with three axes is read as tokens, another as a map, whose channels are the axis
    with a size that the module's parameters have.

    Args:
        model: any network.
        block: a function from a number of channels to a module that keeps the shape of its input, such as
            `iso.layers.MapAttention`; or a module, which is copied to every place.
        after: a glob over module names, several, or a function `(name, module) -> bool`.
        example: a batch as the model reads it; timm's models know their input size.
        entry: index or key of the entry to change, of an output with several; by default the only map or tokens in it.

    Raises: UserError if `after` selects nothing, a module that is not called in the example or called by its parent in
        another way, an output that is no map, or a block that changes its input or gives another shape.

    >>> cnn = timm.create_model("resnet18").eval()
    >>> new = iso.insert(cnn, iso.layers.MapAttention, after="layer3.1")
    >>> x = torch.randn(1, 3, 64, 64)
    >>> bool((new(x) == cnn(x)).all())
    True
    """
    plain = check_model(model)
    example = own_example(plain) if example is None else example
    if example is None:
        raise UserError(
            "give an example, a batch as the model reads it: the shapes are those of its outputs"
        )
    # inference tensors have no gradients
    example = map_tensors(to_model(example, plain), torch.clone)
    name = _registered_name(block)
    outputs_of: dict[str, list[Any]] = {path: [] for path in _paths_after(plain, after)}

    def note(call: ModuleCall) -> None:
        outputs_of[call.name].append(call.output)

    before = _outputs(copy_model(plain), example, outputs_of, after=note)
    counts = {path: len(module_outputs) for path, module_outputs in outputs_of.items()}
    other = with_other_size(example)
    if other is not None:
        with suppress(UserError):  # it runs at one size only
            _outputs(copy_model(plain), other, outputs_of, after=note)
    rules = {
        path: _make_rule(plain, path, module_outputs, name, entry)
        for path, module_outputs in outputs_of.items()
    }
    new = apply_rules(copy_model(model), rules)
    for path, rule in rules.items():
        features = _entry(outputs_of[path][0], rule.entry)
        inserted = new.get_submodule(f"{path}.inserted")
        inserted.to(features.device, features.dtype)
        # also in a frozen model, and after a module without parameters
        inserted.requires_grad_(True)
    called = copy_model(new)
    outputs = _check_blocks(called, counts, example)
    if not all(a.is_meta or torch.equal(a, b) for a, b in zip(before, outputs, strict=True)):
        raise UserError(
            "inserting changed the outputs: the model is random in eval mode, or a block is not finite"
        )
    add_notes(new, *_dead_gammas(called, list(rules), outputs))
    return new


def _registered_name(block: MakeBlock | nn.Module) -> str:
    """Return the name of a block, which is registered under it; of a module, the one of a function that copies it."""
    if not callable(block):
        raise UserError(
            f"the block {block!r} is not callable; give a function of channels, or iso.layers.MapAttention"
        )
    for known_name, known_block in BLOCKS.items():
        if known_block is block:
            return known_name
    name = block_name(block)
    make: MakeBlock = partial(_copy_block, block) if isinstance(block, nn.Module) else block
    if "<" in name or not hasattr(block, "__qualname__"):
        name = f"{name} {id(block):x}"
        _TEMPORARY.add(name)
    BLOCKS[name] = make  # the latest definition, as in a notebook
    return name


def _copy_block(block: nn.Module, channels: int) -> nn.Module:
    return copy.deepcopy(block)


def _paths_after(model: nn.Module, after: Where) -> Iterator[str]:
    """Yield the modules to insert after: those selected; of an nn.Sequential its last child."""
    named = dict(model.named_modules())
    selected = [name for name, module in named.items() if matches_where(after, name, module)]
    if not selected:
        raise UserError(
            f"{describe_where(after, 'after')} matches no module{nearest_names(after, named)}"
        )
    check_each_glob(after, named, "after")
    for name in selected:
        path = name
        module = named[name]
        while isinstance(module, nn.Sequential) and len(module):
            last = list(module._modules)[-1]
            path = f"{path}.{last}".lstrip(".")
            module = module[-1]
        if not path:
            raise UserError("insert a block after a part of the model, not after the model itself")
        if path not in named:
            raise UserError(
                f"{path}, the last module of {name}, is used elsewhere too; insert after a module that is used once"
            )
        yield path


def _outputs(
    model: nn.Module,
    example: Inputs,
    names: Iterable[str],
    before: Notice | None = None,
    after: Notice | None = None,
) -> list[Tensor]:
    """Return the outputs of a model while modules are observed; it may keep a part of this call: give a copy."""
    # with gradients: the same kernels with blocks
    with eval_mode(model), observing(model, before, after, names):
        return tensors_in(run_model(model, example))


def _is_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3


def _make_rule(
    model: nn.Module, path: str, outputs: list[Any], block: str, entry: int | str | None
) -> Insert:
    """Return the rule that inserts a block after a module: of which entry of its output, in which layout.

    `outputs` are those of the module: first of the example, last of images of another size where the model takes them.
    """
    if not outputs:
        raise UserError(
            f"{path} is not called as a module in this forward: its parent reads its weight, iterates over its "
            "children, or takes another path; choose another module"
        )
    output = outputs[0]
    if entry is None and not isinstance(output, Tensor):
        feature_keys = [key for key, value in _items_of(output) if _is_features(value)]
        if len(feature_keys) != 1:
            raise UserError(
                f"the output of {path} has {len(feature_keys)} maps or tokens; give entry, its index or key"
            )
        entry = feature_keys[0]
    try:
        features = _entry(output, entry)
    except (KeyError, IndexError, TypeError):
        raise UserError(f"the output of {path} has no entry {entry!r}") from None
    if not _is_features(features):
        raise UserError(
            f"{path} returns no map or tokens, but {_describe(features)}; choose a module that does"
        )
    layout = _layout(model, path, features, _entry(outputs[-1], entry))
    channel_axis = 1 if layout == "map" else -1
    return Insert(block, features.shape[channel_axis], layout, entry)


def _describe(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _items_of(output: Any) -> list[tuple[Any, Any]]:
    """Return the entries of an output with several, by key or index."""
    if isinstance(output, Mapping):
        return list(output.items())
    return list(enumerate(output)) if isinstance(output, tuple | list) else []


def _layout(model: nn.Module, path: str, features: Tensor, other_features: Tensor) -> Layout:
    """Return the layout of a module's output: channels are the axis that is the same at another size of the image.

    Where the model has one size, and `other_features` that too: by how often the module's own parameters, or for a map
    those of the model, have each axis' size.
    """
    votes: list[list[int]] = [
        [features.shape[axis] == other_features.shape[axis] for axis in (1, -1)]
    ]
    modules = [model.get_submodule(path)]
    if features.ndim > 3:
        modules.append(model)
    for module in modules:
        sizes: Counter[int] = Counter()
        for parameter in module.parameters():
            sizes.update(parameter.shape)
        votes.append([sizes[features.shape[axis]] for axis in (1, -1)])
    first = features.ndim > 3  # if nothing tells
    for first_votes, last_votes in votes:
        if first_votes != last_votes:
            first = first_votes > last_votes
            break
    if features.ndim > 3:
        return "map" if first else "map, channels last"
    if first:
        raise UserError(
            f"{path} returns a map (B, C, L), but three axes are read as tokens (B, N, C); choose another"
        )
    return "tokens"


def _check_blocks(model: nn.Module, calls: Mapping[str, int], example: Inputs) -> list[Tensor]:
    """Return the outputs. Raises: UserError if a block does not fit, or is not called as often as its module."""
    running: list[tuple[str, Tensor, int]] = []
    num_calls: Counter[str] = Counter()

    def enter(call: ModuleCall) -> None:
        path = call.name.removesuffix(_BLOCK)
        x = call.input
        if not isinstance(x, Tensor):
            raise UserError(
                f"{path} iterates over its children with a {type(x).__name__}; insert after one of them"
            )
        running.append((path, x, x._version))
        num_calls[path] += 1

    def leave(call: ModuleCall) -> None:
        path, x, version = running.pop()
        y = call.output
        if x._version != version:
            raise UserError(
                f"the block after {path} changes its input in place; make its first layer not in place"
            )
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise UserError(
                f"the block after {path} turns {tuple(x.shape)} into {_describe(y)}; it must keep the shape"
            )

    try:
        outputs = _outputs(model, example, [path + _BLOCK for path in calls], enter, leave)
    except DoesNotRun as error:
        reason = first_line(error)[:160]
        if not running:
            raise UserError(
                f"the model does not run with a child added to {', '.join(calls)}: {reason}; insert after other modules"
            ) from None
        path, x, _ = running[0]
        raise UserError(f"the block does not fit {tuple(x.shape)} after {path}: {reason}") from None
    for path, count in calls.items():
        if num_calls[path] != count:
            raise UserError(
                f"{path} iterates over its children, and would call the block {num_calls[path]} times in "
                f"{count} calls; insert after one of its children"
            )
    return outputs


def _dead_gammas(model: nn.Module, paths: list[str], outputs: list[Tensor]) -> Iterator[str]:
    """Yield a note for each inserted block that gets no gradient from the outputs of a call."""
    gammas: list[Tensor] = [model.get_submodule(f"{path}.inserted").gamma for path in paths]  # type: ignore[misc]
    trained = [output for output in outputs if output.requires_grad and not output.is_meta]
    if not trained:
        return
    total = sum(output.double().square().sum() for output in trained)
    gradients = torch.autograd.grad(total, gammas, allow_unused=True)  # type: ignore[arg-type]
    for path, gradient in zip(paths, gradients, strict=True):
        if gradient is None or not gradient.any():
            yield (
                f"{path}.inserted gets no gradient in this example: something behind it multiplies it by 0, like a "
                "norm whose weight starts at 0, or nothing reads it"
            )


register_block(MapAttention)
