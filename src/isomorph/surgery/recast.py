"""Recast a model: select modules with `where`, replace each by a rule, and record the edits on a copy.

A checkpoint is rebuilt from them: create the base model, apply the edits, load the tensors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import mode
from typing import Any, NamedTuple

import torch
from torch import nn

from isomorph.errors import NotFinite, UserError
from isomorph.layers.modes import default_dtype
from isomorph.layers.pyramid.base import Pyramid
from isomorph.operations import match_modes, records_outputs, unwrap
from isomorph.surgery.modules import lies_within, list_names, parent_name
from isomorph.surgery.plain_layers import check_attached, class_name, describe_stand_in
from isomorph.surgery.rule import Edit, Rule, add_notes, copy_model, edits, record, update_record
from isomorph.surgery.site import (
    Site,
    Where,
    check_each_glob,
    describe_where,
    matches_where,
    nearest_names,
    part_names,
)


def check_model(model: Any) -> nn.Module:
    """Return the model inside wrappers, after a check that it is one. Raises: UserError if not, and as `unwrap`."""
    model = unwrap(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(
            "the model, or a part of it, is scripted; give it as it was before torch.jit.script or trace"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"{name} has no shape yet (lazy layer); run the model once on an input first"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_inference() and not torch.is_inference_mode_enabled():
            raise UserError(
                f"{name} was made under torch.inference_mode, so nothing can be trained or compared; "
                "give copy.deepcopy(model), made outside of it"
            )
    return model


def check_finite(model: nn.Module, path: str = "") -> None:
    """Raise NotFinite for a weight of a model, or of the module at a path, that is not, and for a variance below 0."""
    prefix = f"{path}." if path else ""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and not torch.isfinite(parameter).all():
            raise NotFinite(f"{prefix}{name} is not finite; load weights that are")
    for name, module in model.named_modules():
        variance = getattr(module, "running_var", None)
        if not isinstance(variance, torch.Tensor) or variance.is_meta:
            continue
        if not (torch.isfinite(variance) & (variance + getattr(module, "eps", 0.0) > 0)).all():
            raise NotFinite(
                f"outputs of {(prefix + name).rstrip('.') or 'the model'} are not finite: its running variance goes "
                f"down to {variance.min():g}; measure it again with iso.recalibrate(model, batches, "
                "keep_function=False)"
            )


class Acceptance(NamedTuple):
    """Names of the modules that a rule accepts, and the reason for each module of its kind that it rejects.

    >>> cnn = timm.create_model("resnet18", num_classes=3)
    >>> iso.surgery.acceptance(cnn, iso.ConvToGPSA(), where="layer4.0.*").rejected
    {}
    """

    accepted: list[str]
    rejected: dict[str, str]


def acceptance(model: nn.Module, rule: Rule, where: Where = "*") -> Acceptance:
    """Return which modules of the rule's kind that `where` selects are accepted, in the order of the model's modules.

    Unlike `targets`, it raises no error for a module that the rule rejects.

    >>> iso.surgery.acceptance(timm.create_model("convnext_atto"), iso.ConvToGPSA()).rejected["stem.0"]
    'the 4x4 kernel has even sides, so no tap lies in its middle'
    """
    root = Site(check_model(model))
    sites = []
    for name, module in root.model.named_modules():
        if matches_where(where, name, module):
            sites.append(root.at(name))
    return _judge(rule, sites)


def _judge(rule: Rule, sites: Sequence[Site]) -> Acceptance:
    """Return the sites that a rule accepts, and the reason for each of its kind that it rejects."""
    accepted: list[str] = []
    rejected: dict[str, str] = {}
    for site in sites:
        reason = rule.reason(site)
        if reason is None:
            accepted.append(site.name)
        elif _is_of_kind(rule, site):
            if hasattr(site.module, "inserted"):
                reason += "; a block is inserted after it, recast before you insert"
            rejected[site.name] = reason
    return Acceptance(accepted, rejected)


def _is_of_kind(rule: Rule, site: Site) -> bool:
    return bool(site.part) or rule.is_of_kind(site.module)


def targets(model: nn.Module, rule: Rule, where: Where = "*", exclude: Where = ()) -> list[str]:
    """Return the names of the modules that `recast` would replace, in the order of `model.named_modules()`.

    For a rule with `takes_parts`, globs select parts of joint projections too. They come last, and are left out if the
    whole layer is selected.

    Raises: UserError if `where` selects no module of the rule's kind (with the nearest names), if the rule does not
        accept one (with its name and the reason), or if one is inside another.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.targets(cnn, iso.ConvToGPSA(), where="layer3.0.*")
    ['layer3.0.conv1', 'layer3.0.conv2']
    >>> iso.targets(cnn, iso.ConvToGPSA(), exclude=["conv1", "layer1", "layer2", "*.conv2"])
    ['layer3.0.conv1', 'layer3.1.conv1', 'layer3.2.conv1']
    """
    return _select(check_model(model), rule, where, exclude).accepted


class _Choice(NamedTuple):
    """What a user chooses: a rule, and which of the sites that a model has."""

    rule: Rule
    where: Where
    exclude: Where
    sites: list[Site]

    @property
    def names_of_kind(self) -> list[str]:
        """Names of the modules of the rule's kind."""
        return [site.name for site in self.sites if site.name and _is_of_kind(self.rule, site)]


def _select(model: nn.Module, rule: Rule, where: Where, exclude: Where) -> Acceptance:
    """Return which modules a rule recasts, and why not the others of its kind. Raises: UserError, as `targets`."""
    if not isinstance(rule, Rule):
        example = f"{rule.__name__}()" if isinstance(rule, type) else "ConvToGPSA(init='exact')"
        raise UserError(f"{rule!r} is not a rule; give an instance, like {example}")
    sites = _sites(model, parts=rule.takes_parts and not callable(where))
    choice = _Choice(rule, where, exclude, sites)
    _check_globs(where, "where", choice)
    _check_globs(exclude, "exclude", choice)
    selected = _selected(choice)
    judged = _judge(rule, selected)
    if not judged.accepted and not judged.rejected:
        raise UserError(_why_none(choice, selected))
    if judged.rejected and (where != "*" or not judged.accepted):
        name, reason = next(iter(judged.rejected.items()))
        raise UserError(
            f"{name or 'the model'}: {type(rule).__name__} does not fit this module: {reason}"
        )
    names = judged.accepted
    if where == "*":
        names = [name for name in names if name] or names  # the model itself only if it is alone
    outermost = []
    for name in names:
        outer = _outer_target(name, names)
        if outer is None:
            outermost.append(name)
        elif where != "*":
            raise UserError(
                f"target {name} is inside target {outer or 'the model itself'}; select only one of them"
            )
    return Acceptance(outermost, judged.rejected)


def _outer_target(name: str, targets: Sequence[str]) -> str | None:
    """Return the first target around a module, "" for the model itself, or None."""
    for outer in targets:
        if name != outer and (not outer or name.startswith(f"{outer}.")):
            return outer
    return None


def _sites(model: nn.Module, parts: bool) -> list[Site]:
    """Return the sites of all modules by all their names, and of the parts of joint projections if wanted.

    Without those inside a pyramid, which reads the weights of its layers.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    pyramids = [name for name, module in named.items() if isinstance(module, Pyramid)]
    inside = tuple(f"{name}.".removeprefix(".") for name in pyramids)
    names = [name for name in named if name in pyramids or not name.startswith(inside)]
    if parts:
        names += part_names(model)
    root = Site(model)
    return [root.at(name) for name in names]


def _selected(choice: _Choice) -> list[Site]:
    """Return the selected sites, each module under its first name; of a joint projection the whole, or parts."""
    selected: dict[tuple[nn.Module, str], Site] = {}
    for site in choice.sites:
        if not matches_where(choice.where, site.name, site.module):
            continue
        if matches_where(choice.exclude, site.name, site.module, inside=True):
            continue
        is_in_whole = site.part and (site.module, "") in selected
        if not is_in_whole:
            selected.setdefault((site.module, site.part), site)
    return list(selected.values())


def _why_none(choice: _Choice, selected: Sequence[Site]) -> str:
    """Return why a rule fits none of the selected modules: what it recasts, what they are, and what to select."""
    rule = choice.rule
    recasts = f"{type(rule).__name__} recasts {' and '.join(rule.kind_names()) or 'other modules'}"
    if choice.where == "*" and not choice.exclude and not choice.names_of_kind:
        return f"{recasts}, and the model has none"
    matches = f"{recasts}, but {describe_where(choice.where)} matches"
    if not selected:
        return f"{matches} no module{nearest_names(choice.where, choice.names_of_kind)}"
    own_names = [kind.__name__ for kind in rule.kind]
    class_names = sorted({class_name(site.module, own_names) for site in selected})
    return (
        f"{matches} only other classes ({', '.join(class_names)}){_what_instead(choice, selected)}"
    )


def _what_instead(choice: _Choice, selected: Sequence[Site]) -> str:
    """Return what to select instead of modules of other classes, as the end of a message."""
    for site in selected:
        stand_in = describe_stand_in(site.module)
        if stand_in:
            return f"; {site.name} {stand_in}"
    if choice.exclude:
        return "; exclude leaves out the others"
    prefixes = tuple(f"{site.name}." for site in selected)
    inner_sites = [site for site in choice.sites if site.name.startswith(prefixes)]
    accepted = _judge(choice.rule, inner_sites).accepted
    if accepted:
        return f"; name what is inside: {list_names(accepted)}"
    return nearest_names(choice.where, choice.names_of_kind)


def _check_globs(globs: Where, argument: str, choice: _Choice) -> None:
    """Raise UserError for one of several globs that matches nothing, given as an argument of that name."""
    if callable(globs) or isinstance(globs, str):
        return
    if not (isinstance(globs, Sequence) and all(isinstance(glob, str) for glob in globs)):
        raise UserError(
            f"{argument}={globs!r} selects nothing; give globs, or a function (name, module) -> bool"
        )
    names = [site.name for site in choice.sites]
    check_each_glob(globs, names, argument, near=choice.names_of_kind)


def match_original(replacement: nn.Module, original: nn.Module) -> nn.Module:
    """Give the replacement the original's device, dtype, train or eval mode and requires_grad, and return it.

    requires_grad goes by parameter name where the original has the parameter. A replacement of the same class is an
    altered copy of the original and is left as it is. If the original has several dtypes, each parameter keeps its own.
    """
    if type(replacement) is type(original):
        return replacement
    old = dict(original.named_parameters())
    if old:
        device = next(iter(old.values())).device
        dtypes = {parameter.dtype for parameter in old.values()}
        replacement.to(device=device, dtype=dtypes.pop() if len(dtypes) == 1 else None)
    is_trained = not old or any(parameter.requires_grad for parameter in old.values())
    for name, parameter in replacement.named_parameters():
        if name in old:
            parameter.requires_grad_(old[name].requires_grad)
        elif not is_trained:
            parameter.requires_grad_(False)
    replacement.train(original.training)  # LeViT's returns None
    match_modes(replacement, original)  # such as that of a norm inside that is frozen
    return replacement


def recast(model: nn.Module, rule: Rule, where: Where = "*", exclude: Where = ()) -> nn.Module:
    """Return a copy of the model with the selected modules replaced by a rule; the model itself is unchanged.

    Each replacement has the device, dtype, train or eval mode and requires_grad of the module that it replaces. A
    module that is used several times is replaced once, and the model itself may be a target (`where=""`). A compiled
    model (`torch.compile`) is unwrapped; the copy is not compiled.

    Hooks and patched methods of a module stay if the replacement contains the same module, and are an error if it does
    not. Tied parameters stay tied if the replacement has a parameter of the same name, shape and values; otherwise
    they train separately, and `iso.surgery.notes(copy)` says so.

    Args:
        model: any model; timm's, isomorph's or your own.
        rule: such as `ConvToGPSA(init="exact")`; see `Rule`.
        where: a glob over module names ("layer3.*.conv?"), several, or a function `(name, module) -> bool`; by default
            every module that the rule accepts, the outermost of those inside each other; `iso.surgery.notes(copy)`
            lists what is skipped.
        exclude: what to leave out of it, with all modules inside.

    Raises: UserError as in `targets`, or if hooks or patched methods of a target would be lost; NotFinite if weights of
        a target are not.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
    >>> type(cnn.layer3[0].conv1).__name__, type(tcnn.layer3[0].conv1).__name__
    ('Conv2d', 'GPSA2d')
    """
    plain = check_model(model)
    selection = _select(plain, rule, where, exclude)
    root = Site(plain)
    for path in dict.fromkeys(root.at(name).path for name in selection.accepted):
        check_finite(plain.get_submodule(path), path)
    new = apply_edit(copy_model(model), Edit(rule, tuple(selection.accepted)))
    skipped = [f"{name} ({reason})" for name, reason in selection.rejected.items()]
    if skipped:
        add_notes(
            new, f"not recast, as {type(rule).__name__} does not accept them: {list_names(skipped)}"
        )
    return new


def apply_edit(model: nn.Module, edit: Edit) -> nn.Module:
    """Apply an edit in place and return the model; `load` rebuilds a checkpoint from its base model with it.

    torch's random state stays as it is, whatever new layers draw.

    Raises: UserError if the model does not have a module of the edit, or the rule does not accept it.

    >>> edit = iso.surgery.Edit(iso.ConvToGPSA(), ("layer3.0.conv1",))
    >>> type(iso.surgery.apply_edit(timm.create_model("cifar_resnet20"), edit).layer3[0].conv1).__name__
    'GPSA2d'
    """
    ties = Ties(model)
    root = Site(model)
    parents = parents_of(model)
    with kept_random_state(model):
        for name in edit.names:
            site = root.find(name)
            if site is None:
                rule = type(edit.rule).__name__
                raise UserError(f"the model has no module {name}, which {rule} should recast")
            owner = site.module
            if next(owner.parameters(), None) is None:
                owner = model  # a layer without weights does not say where it is
            with float32_on(owner):
                try:
                    replacement = edit.rule.build(site)
                except UserError as error:
                    raise UserError(f"{name or 'the model'}: {error}") from None
                replacement = match_original(replacement, site.module)
                is_leaf = next(site.module.children(), None) is None
                if is_leaf and site.parent is not None and not site.parent.training:
                    replacement.eval()  # a layer that timm makes while it merges is in train mode
                model = replace_module(model, site.path, site.module, replacement, parents)
    add_notes(model, *ties.restore(model))
    update_record(model, edits=(*edits(model), edit))
    attach(model)
    return model


@contextmanager
def kept_random_state(model: nn.Module) -> Iterator[None]:
    """Context after which torch's random state is what it was; layers of a later edit draw other values than before."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    num_edited = sum(len(edit.names) for edit in edits(model))
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        torch.rand(num_edited, device="cpu")
        yield


def apply_rules(model: nn.Module, rules: Mapping[str, Rule]) -> nn.Module:
    """Apply a rule to each named module in place, one edit for all of one rule; return the model."""
    for rule in dict.fromkeys(rules.values()):
        names = tuple(name for name in rules if rules[name] == rule)
        model = apply_edit(model, Edit(rule, names))
    return model


def apply_rule(model: nn.Module, rule: Rule, where: Where) -> nn.Module:
    """Replace the modules that `where` selects in the model itself; return it. Raises: UserError, as `recast`."""
    return apply_edit(model, Edit(rule, tuple(targets(model, rule, where))))


def attach(model: nn.Module) -> None:
    """Connect the layers of all edits to the rest of the model, and let their parents call them."""
    root = Site(model)
    for edit in edits(model):
        for name in edit.names:
            site = root.find(name)
            if site is not None:
                edit.rule.connect(site)
                call_from_parents(site)


def call_from_parents(site: Site) -> None:
    """Turn off the fast paths of torch's encoders around a replaced module, whose weights they read without a call."""
    path = site.path
    while path:
        path = parent_name(path)
        ancestor: Any = site.model.get_submodule(path)
        if isinstance(ancestor, nn.TransformerEncoderLayer):
            ancestor.activation_relu_or_gelu = 0
        elif isinstance(ancestor, nn.TransformerEncoder):
            ancestor.use_nested_tensor = False


def edited_names(model: nn.Module, chosen: Sequence[Edit]) -> list[str]:
    """Return the names of the modules of some of a model's edits that it has; of a part, the whole layer.

    Merged modules, whose output another layer computes, and modules around them are left out, whatever other edits
    they have.
    """
    root = Site(model)
    names: dict[str, None] = {}
    merged: list[str] = []
    for edit in chosen:
        if not edit.rule.keeps_output:
            merged += edit.names
            continue
        for name in edit.names:
            site = root.find(name)
            if site is not None:
                names.setdefault(site.path)
    return [name for name in names if not any(lies_within(other, {name}) for other in merged)]


@contextmanager
def float32_on(original: nn.Module) -> Iterator[None]:
    """Context in which layers are made for an original, whatever defaults of torch the caller has changed."""
    parameter = next(original.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    # a device as context costs time in every operation
    is_default = torch.get_default_device() == device
    on_device = nullcontext() if is_default else device
    with default_dtype(torch.float32), torch.inference_mode(False), on_device:
        yield


# The parents of every module of a model, with the names of the module in each.
Parents = dict[nn.Module, list[tuple[nn.Module, str]]]


def parents_of(model: nn.Module) -> Parents:
    """Return the parents of every module of a model, and its names in them, without the model itself."""
    parents: Parents = {}
    # without torch's generators, which nest as deep as modules do
    stack = [model]
    visited = {model}
    while stack:
        parent = stack.pop()
        for name, module in parent._modules.items():
            if module is None:
                continue
            parents.setdefault(module, []).append((parent, name))
            if module not in visited:
                visited.add(module)
                stack.append(module)
    return parents


def replace_module(
    model: nn.Module, name: str, original: nn.Module, replacement: nn.Module, parents: Parents
) -> nn.Module:
    """Replace a module under all its names, channels_last if it is, and return the model (the replacement for "").

    `parents` are those of the model, and are kept up to date.

    Raises: UserError if hooks or patched methods of the original or a submodule would be lost.
    """
    check_attached(name, original, replacement)
    for parameter in original.parameters():
        is_last = parameter.is_contiguous(memory_format=torch.channels_last)
        if is_last and not parameter.is_contiguous():
            replacement.to(memory_format=torch.channels_last)
            break
    for hook in original._forward_hooks.values():
        if records_outputs(hook) and hook not in replacement._forward_hooks.values():
            replacement.register_forward_hook(hook)
    if not name:
        replacement.isomorph_record = record(model)  # type: ignore[assignment]
        return replacement
    own_parents = parents.pop(original)
    for parent, child in own_parents:
        setattr(parent, child, replacement)
    parents.setdefault(replacement, []).extend(own_parents)
    for module, inside in parents_of(replacement).items():
        parents.setdefault(module, []).extend(inside)
    return model


class Ties:
    """The names of every parameter that a model has under more than one; those of a shared module count too."""

    def __init__(self, model: nn.Module) -> None:
        parameters = _parameters_by_module(model)
        self.names = set(parameters)
        names_of: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            names_of[parameter].append(name)
        self.groups = [names for names in names_of.values() if len(names) > 1]

    def restore(self, model: nn.Module) -> Iterator[str]:
        """Tie parameters again if name, shape and values are unchanged; yield a sentence for every tie that is less."""
        current = _parameters_by_module(model)
        new = [name for name in current if name not in self.names]
        modules = dict(model.named_modules(remove_duplicate=False))
        for group in self.groups:
            names = _of_different_modules(modules, group)
            if len(names) < 2:
                continue
            present = [name for name in names if name in current]
            tied = []
            if present:
                shared = mode(current[name] for name in present)
                tied = [name for name in present if _are_equal(current[name], shared)]
                _share(model, tied, shared)
            untied = [name for name in names if name not in tied]
            if untied:
                verb = "was" if tied and len(untied) == 1 else "were"
                partners = f" to {list_names(tied)}" if tied else ""
                yield f"{list_names(untied)} {verb} tied{partners}; they are no longer tied and train separately"
            wider = _with_new_parameters(tied, new)
            if wider:
                verb = "has" if len(wider) == 1 else "have"
                owners = f"{list_names(wider)} {verb}"
                yield f"{list_names(tied)} are still tied, but {owners} new parameters that train apart"


def _of_different_modules(modules: Mapping[str, nn.Module], names: Sequence[str]) -> list[str]:
    """Return the names of parameters, gone or not, without those of one module under another of its names."""
    first_names: dict[tuple[nn.Module, str], str] = {}
    for name in names:
        path = parent_name(name)
        while path not in modules:
            path = parent_name(path)
        inside = name.removeprefix(path).removeprefix(".")
        first_names.setdefault((modules[path], inside), name)
    return list(first_names.values())


def _share(model: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Set a parameter under several names."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, parameter)


def _with_new_parameters(tied: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the modules of tied parameters that have new parameters too."""
    paths = dict.fromkeys(map(parent_name, tied))
    return [path for path in paths if path and any(name.startswith(f"{path}.") for name in new)]


def _parameters_by_module(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters under all their names, also those of shared modules."""
    parameters: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parameters.update(module.named_parameters(path, recurse=False, remove_duplicate=False))
    return parameters


def _are_equal(a: nn.Parameter, b: nn.Parameter) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return a.is_meta or torch.equal(a, b)
