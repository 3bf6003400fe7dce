"""Parameter groups, optimiser and schedule."""

import math

import timm.optim
from timm.models import group_parameters
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn
from torch.optim import Optimizer

from isomorph.errors import UserError, one_line
from isomorph.lab.training.recipe.fields import OptimPart
from isomorph.lab.training.recipe.recipe import check_part
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.gated.token_heads import TokenPositions
from isomorph.layers.map_attention import InsertedBlock
from isomorph.layers.pyramid.base import Pyramid
from isomorph.models.base import parameters_without_decay
from isomorph.operations import unwrap
from isomorph.terminal_tables import Rows

# Kinds of parameter groups with weight decay.
DECAYED_KINDS = ("decayed", "branches")
# Names of schedules where timm has others.
_TIMM_SCHEDULES = {"linear": "poly", "step": "multistep"}
GROUP_KINDS = ("decayed", "branches", "undecayed", "gates", "positions", "gammas")


def learning_rate_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return decay ** (layers after its own) of every parameter. Raises: UserError without a `group_matcher`."""
    if decay == 1:
        return dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    if not hasattr(model, "group_matcher"):
        raise UserError(
            f"{type(model).__name__} has no group_matcher for its layers; leave optim.layer_decay at 1"
        )
    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    return {name: decay ** (max(layers.values()) - layer) for name, layer in layers.items()}


def parameter_groups(
    model: nn.Module,
    *,
    lr: float = 1e-4,
    weight_decay: float = 0.05,
    gate_lr: float | str = 0.1,
    position_lr: float | str = "1x",
    branch_lr: float | str | None = None,
    gamma_lr: float | str = "1x",
    layer_decay: float = 1.0,
) -> Rows:
    """Return parameter groups for a torch optimiser of your own, as isomorph's training loop makes them.

    Weights have weight decay. Biases, norms, gates, centres, localities and what the model exempts itself have none,
    which torch's optimisers do not know. Gates learn at `gate_lr`, centres and localities at `position_lr`, pyramid
    weights before a BatchNorm at `branch_lr`, gammas of inserted blocks at `gamma_lr`: each is a number, or a multiple
    of `lr` like "100x". The gates' default is the T-CNN paper's, 1000 times its `lr` of 1e-4. With a `layer_decay`
    below 1, every layer learns at that factor of the next one's rate. Each group has its `lr`, `weight_decay` and
    `name`; parameters without `requires_grad` are in no group.

    A recast creates new parameters: make groups and optimiser after it. Schedulers of torch and timm keep the ratios of
    the rates.

    Raises: UserError for a rate that is not positive, or a layer decay for a model without timm's `group_matcher`.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="paper"), where="layer3.*.conv?")
    >>> groups = iso.training.parameter_groups(tcnn, lr=1e-3, gate_lr="100x", position_lr="20x")
    >>> for group in groups:
    ...     print(group["name"], len(group["params"]), f"lr {group['lr']:g}, decay {group['weight_decay']:g}")
    decayed 38 lr 0.001, decay 0.05
    undecayed 39 lr 0.001, decay 0
    gates 6 lr 0.1, decay 0
    positions 12 lr 0.02, decay 0
    >>> optimizer = torch.optim.AdamW(groups)
    """
    model = unwrap(model, to_copy=False)  # names of a compiled model begin otherwise
    rates = dict(
        lr=lr, gate_lr=gate_lr, position_lr=position_lr, branch_lr=branch_lr, gamma_lr=gamma_lr
    )
    decays = dict(weight_decay=weight_decay, layer_decay=layer_decay)
    optim = check_part(OptimPart, "parameter_groups", rates | decays)
    groups = scaled_groups(model, optim)
    # without lr_scale, by which timm's schedulers would multiply the rate again
    for group in groups:
        group["lr"] = optim.lr * group.pop("lr_scale")
    return groups


def scaled_groups(model: nn.Module, optim: OptimPart) -> Rows:
    """Return the parameter groups of a run, one for each of `GROUP_KINDS` that the model has (by layer with decay).

    `lr_scale` is the factor of each group's rate on `optim.lr`, as timm's schedulers take it.
    """
    exempt = parameters_without_decay(model) | set(getattr(model, "no_weight_decay", set)())
    special = _special_kinds(model, optim)
    scales = learning_rate_scales(model, optim.layer_decay)
    members: dict[tuple[float, str], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in special:
            kind = special[name]
        elif parameter.ndim <= 1 or name in exempt:
            kind = "undecayed"
        else:
            kind = "decayed"
        members.setdefault((scales[name], kind), []).append(parameter)

    rates = {
        "gates": optim.gate_lr,
        "positions": optim.position_lr,
        "gammas": optim.gamma_lr,
        "branches": optim.branch_lr or optim.lr,
    }
    groups = []
    for scale, kind in sorted(members, key=lambda key: (-key[0], GROUP_KINDS.index(key[1]))):
        rate = scale * rates.get(kind, optim.lr)
        group = {
            "name": kind if scale == 1 else f"{kind} x{scale:.6g}",
            "params": members[scale, kind],
            "weight_decay": optim.weight_decay if kind in DECAYED_KINDS else 0.0,
            "lr_scale": rate / optim.lr,
        }
        groups.append(group)
    return groups


def _special_kinds(model: nn.Module, optim: OptimPart) -> dict[str, str]:
    """Return the kind of every parameter that has a group of its own, by name."""
    kinds: dict[str, str] = {}
    name_of = {module: name for name, module in model.named_modules()}
    for module, name in name_of.items():
        if isinstance(module, TokenPositions | TapHeads):
            for own in module.no_weight_decay():
                kinds[f"{name}.{own}".lstrip(".")] = "gates" if own == "gate" else "positions"
        elif isinstance(module, InsertedBlock):
            kinds[f"{name}.gamma"] = "gammas"
        elif isinstance(module, Pyramid) and optim.branch_lr:
            # a BatchNorm follows them, so that their scale has no effect
            for layer in module.scale_free_layers:
                kinds[f"{name_of[layer]}.weight"] = "branches"
    return kinds


def describe_groups(model: nn.Module, optimizer: Optimizer, optim: OptimPart) -> list[str]:
    """Return a line for each parameter group: tensors, parameters, peak learning rate and weight decay; then frozen."""
    lines = []
    for group in optimizer.param_groups:
        size = _size_text([parameter.numel() for parameter in group["params"]])
        peak = optim.lr * group.get("lr_scale", 1.0)
        decay = group.get("weight_decay", 0.0)
        lines.append(f"  {group['name']}: {size}, peak lr {peak:.3g}, decay {decay:g}")
    frozen = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    if frozen:
        lines.append(f"  frozen: {_size_text(frozen)}")
    return lines


def _size_text(numbers: list[int]) -> str:
    return f"{len(numbers)} tensors, {sum(numbers):,} parameters"


def build_optimizer(model: nn.Module, optim: OptimPart) -> Optimizer:
    """Return the timm optimiser `optim.name` over `scaled_groups`. Raises: UserError if it needs other hardware."""
    groups = scaled_groups(model, optim)
    more = {"betas": optim.betas} if optim.betas else {}
    name = optim.name
    if name == "sgd" and not optim.momentum:
        name = "momentum"  # timm's sgd is Nesterov's
    try:
        return timm.optim.create_optimizer_v2(
            groups,
            opt=name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            **more,
        )
    except (AssertionError, TypeError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            f"optim.name {optim.name} cannot be used here: {one_line(error)}; choose another optimiser"
        ) from None


def set_weight_decay(optimizer: Optimizer, optim: OptimPart, progress: float) -> None:
    """Set the weight decay after a share of the run, if it falls: end + (start - end) (1 + cos(pi progress)) / 2."""
    if optim.min_weight_decay is None:
        return
    fall = (1 + math.cos(math.pi * progress)) / 2
    decay = optim.min_weight_decay + (optim.weight_decay - optim.min_weight_decay) * fall
    for group in optimizer.param_groups:
        if group["name"].startswith(DECAYED_KINDS):
            group["weight_decay"] = decay


def build_scheduler(
    optimizer: Optimizer,
    optim: OptimPart,
    epochs: int,
    steps_per_epoch: int,
    iterations: int | None = None,
) -> Scheduler:
    """Return timm's schedule per step: linear warm-up, then cosine, linear, poly, step or constant.

    At step t of T, with W steps of warm-up: min + (peak - min) shape((t - W) / (T - W)) for schedule_from peak, and
    min + (peak - min) shape(t / T) for schedule_from start, where shape falls from 1 to 0. The schedule step is the
    peak divided by 10 at each milestone. A run of `iterations` has no epochs. A warm-up takes at least a step.
    """
    if iterations:
        epochs = iterations
        steps_per_epoch = 1
    warmup = optim.warmup_epochs
    if optim.warmup_iterations:
        warmup = optim.warmup_iterations / steps_per_epoch
    if warmup and epochs * steps_per_epoch > 1:  # a run of one step has no peak to warm up to
        warmup = max(warmup, 1 / steps_per_epoch)
    from_peak = optim.schedule_from == "peak" and optim.schedule != "step"
    # timm applies a milestone one step early; the half step keeps rounding from deciding
    reached = []
    for milestone in optim.milestones:
        step = round(milestone * steps_per_epoch) + 0.5
        reached.append(step / steps_per_epoch)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=_TIMM_SCHEDULES.get(optim.schedule, optim.schedule),
        num_epochs=epochs - warmup if from_peak else epochs,
        min_lr=optim.min_lr,
        # the default divides, which rounds otherwise: released runs are the same bit for bit
        warmup_lr=optim.lr / 100 if optim.warmup_start == 0.01 else optim.lr * optim.warmup_start,
        warmup_epochs=warmup,
        warmup_prefix=from_peak,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
        decay_rate=0.1 if optim.schedule == "step" else 1.0,  # the power of timm's poly
        decay_milestones=reached,
    )
    return scheduler
