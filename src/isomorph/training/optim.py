"""Parameter groups, optimiser and schedule."""

from typing import Any

import timm.optim
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn
from torch.optim import Optimizer

from isomorph.layers import GPSA, GPSA2d
from isomorph.layers.decay import undecayed
from isomorph.training.recipe import OptimPart


def gate_names(model: nn.Module) -> set[str]:
    """Full names of the gates of every gated attention layer."""
    return {f"{name}.gate".lstrip(".") for name, module in model.named_modules() if isinstance(module, GPSA | GPSA2d)}


def parameter_groups(model: nn.Module, optim: OptimPart) -> list[dict[str, Any]]:
    """Three groups: what decays; biases, norms and what layers exempt; gates at their own rate. Frozen ones in none."""
    exempt = undecayed(model) | set(getattr(model, "no_weight_decay", set)())
    gates = gate_names(model)
    members: dict[str, list[nn.Parameter]] = {"decayed": [], "undecayed": [], "gates": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = parameter.ndim <= 1 or name in exempt
            members["gates" if name in gates else "undecayed" if plain else "decayed"].append(parameter)
    groups = [
        dict(name="decayed", params=members["decayed"], weight_decay=optim.weight_decay, lr_scale=1.0),
        dict(name="undecayed", params=members["undecayed"], weight_decay=0.0, lr_scale=1.0),
        dict(name="gates", params=members["gates"], weight_decay=0.0, lr_scale=optim.gate_lr / optim.lr),
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, optim: OptimPart) -> Optimizer:
    """timm's optimiser of that name over `parameter_groups`."""
    groups = parameter_groups(model, optim)
    return timm.optim.create_optimizer_v2(
        groups, opt=optim.name, lr=optim.lr, weight_decay=optim.weight_decay, momentum=optim.momentum
    )


def build_scheduler(optimizer: Optimizer, optim: OptimPart, epochs: int, steps_per_epoch: int) -> Scheduler:
    """timm's schedule, by step: a linear warm-up from a hundredth of the peak, then cosine or constant."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=optim.schedule,
        num_epochs=epochs,
        min_lr=optim.min_lr,
        warmup_lr=optim.lr / 100,
        warmup_epochs=optim.warmup_epochs,  # type: ignore[arg-type]
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return scheduler
