"""What a checkpoint holds, whoever wrote it: the model's tensors, and the settings of the training script."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from timm.models import is_model
from torch import Tensor

from isomorph.checkpoints.unpickle import short_reason, unpickle
from isomorph.errors import UserError

_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict")
_LAST = ("state_dict", "model_state_dict", "model", "net", "module", "weights")
"""Entries of training checkpoints that hold the model's tensors, averaged over training (EMA) or as they were last."""


class Contents(NamedTuple):
    """What a checkpoint holds: tensors by name, and what a training script wrote next to them.

    `entry` names the entry of the file that holds the tensors ("" if the file is nothing else), and `passed_over` the
    other weights in it. `settings` are the arguments of the training script, if it saved them.
    """

    tensors: dict[str, Any]
    entry: str = ""
    passed_over: str = ""
    settings: Mapping[str, Any] = {}

    def note(self, path: Path) -> str:
        """Return a sentence on which of several weights were chosen; empty if there was no choice."""
        if not self.passed_over:
            return ""
        if self.entry in _AVERAGED:
            return f"{path.name}: averaged weights (EMA, {self.entry}); --no-ema (ema=False) takes {self.passed_over}"
        return f"{path.name}: last weights ({self.entry}); --ema (ema=True) takes the average, {self.passed_over}"


def _describe_missing(path: Path) -> str:
    """Return why a path that is no file cannot be opened."""
    if not path.is_dir():
        if not path.suffix and is_model(str(path)):
            return f"{path} is a timm model, not a checkpoint; give a checkpoint or the folder of a run"
        return f"there is no checkpoint {path}"
    inside = path / "model.safetensors"
    return f"{path} is a folder, not a checkpoint" + f"; give {inside}" * inside.is_file()


def read_contents(path: Path, ema: bool = True) -> Contents:
    """Return the tensors of a safetensors or PyTorch file, and the settings next to them; no code in it is run.

    Averaged weights (EMA) are taken where the file has any; with `ema=False`, the last ones.

    Raises: UserError when the file is missing, damaged, or holds no tensors by name.
    """
    if not path.is_file():
        raise UserError(_describe_missing(path))
    if path.suffix == ".safetensors":
        try:
            return Contents(load_file(str(path)))
        except Exception as error:  # safetensors raises many types for a damaged file
            raise UserError(f"cannot read checkpoint {path} ({short_reason(error)}); it may be truncated") from None
    held = unpickle(path)
    if not isinstance(held, Mapping):
        raise UserError(
            f"checkpoint {path} holds a {type(held).__name__}, not a dictionary of tensors; save model.state_dict()"
        )
    if not all(isinstance(name, str) for name in held):
        raise UserError(f"checkpoint {path} holds tensors without names; save model.state_dict(), which names them")
    return _choose_tensors(path, held, ema)


def read_tensors(path: Path, ema: bool = True) -> dict[str, Any]:
    """Return the tensors of a safetensors or PyTorch file by name, as `read_contents` chooses them."""
    return read_contents(path, ema).tensors


def _choose_tensors(path: Path, held: Mapping[str, Any], ema: bool) -> Contents:
    """Return the model's tensors among the entries of a file. Raises: UserError when there are none."""
    settings = held.get("args", held.get("hyper_parameters"))
    settings = dict(settings if isinstance(settings, Mapping) else getattr(settings, "__dict__", {}))
    if isinstance(held.get("arch"), str):
        settings.setdefault("model", held["arch"])
    entries = [key for key in (*_AVERAGED, *_LAST) if _holds_tensors(held.get(key))]
    if not entries:
        if not _holds_tensors(held, depth=0):
            raise UserError(_describe_missing_weights(path, held))
        return Contents(dict(held), settings=settings)
    last = [key for key in entries if key in _LAST]
    chosen = (entries if ema or not last else last)[0]
    other = next((key for key in entries if (key in _LAST) != (chosen in _LAST)), "")
    nested = _choose_tensors(path, held[chosen], ema)
    return Contents(nested.tensors, chosen, other, settings)


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    """True for a dictionary of tensors by name, or one that holds it in one of the entries above, `depth` levels in."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    within = depth and any(_holds_tensors(value.get(key), depth - 1) for key in (*_AVERAGED, *_LAST))
    return within or any(isinstance(each, Tensor) for each in value.values())


def _describe_missing_weights(path: Path, held: Mapping[str, Any]) -> str:
    """Return the message for a file without the tensors of a model."""
    if "param_groups" in held:
        return f"{path} holds the state of an optimiser and no weights; give the checkpoint of the model"
    entries = ", ".join(list(held)[:6]) or "nothing"
    return f"{path} holds no weights, only {entries}; give a file with the model's state_dict"


_WRAPPERS = ("module.", "model.")
"""Prefixes of all tensor names that DistributedDataParallel and training modules add."""
_COMPILED = "_orig_mod."
"""Part of tensor names that torch.compile adds."""


def strip_wrappers(tensors: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Return the tensors without the prefixes of DistributedDataParallel, torch.compile and training modules.

    `own` are the names in the model that the tensors are for: a prefix that it has itself is kept.
    """
    stripped = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}  # of AveragedModel
    if not any(_COMPILED in name for name in own):
        stripped = {name.replace(_COMPILED, ""): tensor for name, tensor in stripped.items()}
    while stripped:
        prefix = next((p for p in _WRAPPERS if all(name.startswith(p) for name in stripped)), None)
        if prefix is None or any(name.startswith(prefix) for name in own):
            break
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items()}
    return stripped
