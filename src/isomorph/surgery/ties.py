"""Parameters that several modules share: tied again after surgery, with a note where they can not be."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from isomorph.surgery.where import list_names


class Ties:
    """The names of each parameter that two or more modules of a model share; a module used twice counts once."""

    def __init__(self, model: nn.Module) -> None:
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in _parameters_by_module(model):
            names_of.setdefault(parameter, []).append(name)
        self.groups = [names for names in names_of.values() if len(names) > 1]
        self.known = {name for names in names_of.values() for name in names}

    def restore(self, model: nn.Module) -> Iterator[str]:
        """Tie parameters again if name, shape and values are unchanged; yield a sentence for every tie that is less."""
        current = dict(_parameters_by_module(model))
        new = [name for name in current if name not in self.known]
        for names in self.groups:
            candidates = [current[name] for name in names if name in current]
            shared = Counter(candidates).most_common(1)[0][0] if candidates else None
            tied = [n for n in names if n in current and shared is not None and _are_equal(current[n], shared)]
            for name in tied:
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, shared)
            if lost := [name for name in names if name not in tied]:
                verb = "was" if tied and len(lost) == 1 else "were"
                partners = f" to {list_names(tied)}" if tied else ""
                yield f"{list_names(lost)} {verb} tied{partners}; they are no longer tied and train separately"
            paths = dict.fromkeys(name.rpartition(".")[0] for name in tied)
            if wider := [path for path in paths if path and any(name.startswith(f"{path}.") for name in new)]:
                whose = f"{list_names(wider)} {'has' if len(wider) == 1 else 'have'}"
                yield f"{list_names(tied)} are still tied, but {whose} new parameters that train apart"


def _parameters_by_module(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        yield from module.named_parameters(path, recurse=False, remove_duplicate=False)


def _are_equal(a: nn.Parameter, b: nn.Parameter) -> bool:
    same_form = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return a is b or (same_form and (a.is_meta or torch.equal(a, b)))
