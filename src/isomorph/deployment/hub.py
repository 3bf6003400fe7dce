"""Sharing models on the Hugging Face hub, in the files that timm reads: weights, config.json and a model card."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from timm.models import PretrainedCfg
from timm.models._hub import save_config_for_hf
from torch import nn

from isomorph.checkpoints.files import read_header, write_atomically
from isomorph.checkpoints.hub import CONFIG, LOG_IN, WEIGHTS, describe_hub_error
from isomorph.checkpoints.model import Base, rebuild, save
from isomorph.checkpoints.paths import check_repository
from isomorph.deployment.export import check_path
from isomorph.deployment.model_card import model_card, recipe_text
from isomorph.errors import DataWarning, UserError
from isomorph.json_values import JsonObject
from isomorph.layers.modes import eval_mode
from isomorph.models import networks
from isomorph.models.download import is_connection_error, is_reachable
from isomorph.models.input_sizes import evaluation_config, label_names, random_inputs
from isomorph.operations import copy_module, unwrap
from isomorph.spec import spec_of
from isomorph.surgery.calls import run_model
from isomorph.surgery.comparison import relative_difference

CARD = "README.md"
RECIPE = "recipe.yaml"
# Entries of a pretrained_cfg that are about the public weights of the architecture, not about this
# model.
_ABOUT_PUBLIC_WEIGHTS = {
    "tag",
    "license",
    "description",
    "origin_url",
    "paper_name",
    "paper_ids",
    "notes",
}
_ATOL = 1e-4  # largest deviation of the model that timm builds, relative to the largest output


def push(
    model: nn.Module,
    name: str,
    *,
    run: str | Path | None = None,
    results: Mapping[str, float] | None = None,
    private: bool = False,
    base: Base | None = None,
) -> str:
    """Upload a model to the Hugging Face hub as OWNER/NAME, from where `iso.load` loads it, and return its address.

    The files are those of `save_for_hub`, in one commit. The repository is created if there is none; a model card that
    is there already is kept, as it may have been edited, and a warning says so; without a `run`, a recipe.yaml that is
    there is deleted. The token is that of `hf auth login`, or $HF_TOKEN.

    Args:
        run: Folder or checkpoint of the run that trained the model: its recipe and last metrics go into the model card.
        results: Other metrics for the model card, by name.
        private: Create the repository for its owner only.
        base: As in `iso.save`.

    Raises: UserError when the name is not valid, there is no token or no network, or the hub rejects the upload.

    >>> model = timm.create_model("cifar_resnet20", num_classes=3)
    >>> try:
    ...     iso.push(model, "small")
    ... except iso.UserError as error:
    ...     print(error)
    'small' is not a name for the hub; give OWNER/NAME, for example me/small
    """
    if not isinstance(name, str):
        raise UserError(
            f"the name is a {type(name).__name__}; give the arguments in the order push(model, name)",
        )
    check_repository(name)
    require_token()
    with tempfile.TemporaryDirectory() as folder, _explain_rejection(name):
        save_for_hub(model, folder, name, run=run, results=results, base=base)
        api = HfApi(library_name="isomorph")
        with suppress(RepositoryNotFoundError):
            if api.model_info(name).private is False and private:
                raise UserError(
                    f"{name} exists and is public; make it private in its settings, or leave out `private`",
                )
        api.create_repo(name, private=private, exist_ok=True)
        existing_card = CARD if api.file_exists(name, CARD) else None
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=existing_card,
            delete_patterns=RECIPE,  # a push without a run deletes the recipe of an earlier one
            commit_message="Add a model of isomorph",
        )
    if existing_card:
        warnings.warn(
            f"{name} keeps its README.md; delete it there, and push again",
            DataWarning,
            stacklevel=2,
        )
    return f"{constants.ENDPOINT}/{name}"


def require_token() -> None:
    """Raise UserError without a token of the hub, or without a network."""
    if not huggingface_hub.get_token():
        raise UserError(f"uploading needs a token of the hub with write access; {LOG_IN}")
    if constants.HF_HUB_OFFLINE or not is_reachable(constants.ENDPOINT):
        raise UserError(
            f"cannot reach {constants.ENDPOINT}; check the network, or write the files (iso.save_for_hub, or "
            "isomorph push --out FOLDER) and upload them later with `hf upload OWNER/NAME FOLDER`"
        )


@contextmanager
def _explain_rejection(name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException = error
        if not isinstance(error, HfHubHTTPError):
            cause = error.__cause__ or error  # of one of several files
        if isinstance(cause, HfHubHTTPError):
            message = f"the hub did not accept {name}: {describe_hub_error(cause)}"
            if cause.response.status_code in (401, 403):
                message += f"; {LOG_IN} of an account that may write to {name}"
            raise UserError(message) from None
        if is_connection_error(cause) or type(cause).__module__.startswith(("httpx", "httpcore")):
            raise UserError(
                f"the connection to {constants.ENDPOINT} broke off; run the same command again",
            ) from None
        raise


def save_for_hub(
    model: nn.Module,
    folder: str | Path,
    name: str = "OWNER/NAME",
    *,
    run: str | Path | None = None,
    results: Mapping[str, float] | None = None,
    base: Base | None = None,
) -> None:
    """Write the files with which a model is shared on the Hugging Face hub to a folder.

    They are model.safetensors, which `iso.load` loads, config.json for timm, README.md (the model card), and
    recipe.yaml if a `run` is given. `timm.create_model("local-dir:FOLDER", pretrained=True)` loads the model too, if
    timm can build it. Otherwise config.json names no architecture of timm, so that timm ends with an error.

    For an exported file use `hf upload OWNER/NAME model.onnx`: its metadata says which images it takes.

    Args:
        name: The model's name on the hub, for the model card.
        run: Folder or checkpoint of the run that trained the model.
        results: Other metrics for the model card, by name.
        base: As in `iso.save`.

    Raises: UserError when the model cannot be saved, or a file cannot be written.

    >>> iso.save_for_hub(timm.create_model("cifar_resnet20", num_classes=3), "shared")
    >>> timm.create_model("local-dir:shared", pretrained=True).num_classes
    3
    >>> iso.load("shared/model.safetensors").num_classes
    3
    """
    folder = check_path(folder, "save_for_hub(model, folder)")
    numbers: dict[str, float] = {}
    for key, value in (results or {}).items():
        if not isinstance(value, Real) or not isfinite(value):
            raise UserError(f"results must be finite numbers by name; {key} is not one")
        numbers[key] = int(value) if isinstance(value, Integral) else float(value)
    recipe: JsonObject | None = None
    metrics: dict[str, float] = {}
    if run:
        # the one thing that sharing takes from the lab
        from isomorph.lab.training.run.summary import read_training

        recipe, metrics = read_training(Path(run))
    with tempfile.TemporaryDirectory() as draft:
        written = Path(draft)
        net = unwrap(model)
        save(net, written / WEIGHTS, base)
        in_timm = _write_config(net, written, name)
        card = model_card(net, name, recipe, metrics | numbers, in_timm)
        (written / CARD).write_text(card, encoding="utf-8")
        if recipe:
            (written / RECIPE).write_text(recipe_text(recipe), encoding="utf-8")
        elif (folder / RECIPE).is_file():
            raise UserError(
                f"{folder} has a {RECIPE}, and no run is given; give the run, or another folder",
            )
        for path in sorted(written.iterdir()):
            write_atomically(folder / path.name, partial(shutil.copyfile, path))


def _write_config(model: nn.Module, folder: Path, name: str) -> bool:
    """Write timm's config.json next to the weights; return True if timm builds and loads this model from them.

    It has the images that the model expects, and of a model that timm cannot build no architecture of timm.
    """
    path = folder / CONFIG
    header = read_header(folder / WEIGHTS)
    parts: JsonObject = {
        key: json.loads(header[key]) for key in ("base", "module", "edits") if key in header
    }
    shared = {"isomorph": {"format": header["format"], **parts}}
    config: JsonObject = {}
    if "base" in parts:
        built_as = parts["base"]["name"]
        # arguments that JSON cannot hold
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            save_config_for_hf(_described_base(model, parts["base"]), str(path))
            config = json.loads(path.read_text()) | shared
            path.write_text(json.dumps(config, indent=2), encoding="utf-8")
        # networks of other tasks would ask for the public weights of their backbones
        is_of_timm = bool(config) and config["architecture"] not in networks()
        if is_of_timm and _timm_loads(model, folder):
            return True
    else:
        built_as = parts["module"]["class"].rpartition(".")[2]
    changed = {
        "architecture": f"{built_as} changed by isomorph, load it with isomorph.load('hf-hub:{name}')"
    }
    path.write_text(json.dumps(config | shared | changed, indent=2), encoding="utf-8")
    return False


def _described_base(model: nn.Module, base: JsonObject) -> Any:
    """Return the network that a model was changed from, without weights, described by what the model expects."""
    with torch.device("meta"):
        plain: Any = rebuild(base, ())
    fields = PretrainedCfg.__dataclass_fields__.keys() - _ABOUT_PUBLIC_WEIGHTS
    if not label_names(model):
        fields -= {"label_names"}
    full_config = spec_of(model).config
    config = {key: value for key, value in full_config.items() if key in fields}
    config["architecture"] = base["name"].partition(".")[0]
    config["num_classes"] = plain.num_classes
    plain.pretrained_cfg = config
    return plain


def _timm_loads(model: nn.Module, folder: Path) -> bool:
    """True if timm builds from a folder a network with the model's tensors, image config and outputs in eval mode."""
    try:
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception:  # timm raises many types for a network that it cannot build
        return False
    original = copy_module(model).cpu().float()
    state = original.state_dict()
    loaded_state = loaded.state_dict()
    # as JSON: a list equals a tuple
    if json.dumps(evaluation_config(model)) != json.dumps(evaluation_config(loaded)):
        return False
    if state.keys() != loaded_state.keys():
        return False
    for name, tensor in loaded_state.items():
        if not torch.equal(state[name].to(tensor.dtype), tensor):
            return False
    # equal tensors say nothing of arguments without tensors, such as an activation
    inputs = random_inputs(1, original)
    try:
        with torch.no_grad(), eval_mode(original), eval_mode(loaded):
            expected = run_model(original, inputs)
            actual = run_model(loaded, inputs)
    except UserError:
        return False
    return relative_difference(expected, actual) <= _ATOL
