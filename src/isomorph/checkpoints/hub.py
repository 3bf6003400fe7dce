"""Models on the Hugging Face hub, by names such as hf-hub:me/name: download, and what timm's config.json says."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from isomorph.checkpoints.files import is_own, read_header
from isomorph.checkpoints.header import DATA_KEYS, parse_data
from isomorph.errors import UserError
from isomorph.models.download import impatient_hub, is_connection_error

# weights are safetensors alone, which hold no code
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_MAX_CONFIG_BYTES = 2**24
# What timm's config.json says of the images; its source, split and classes are those of timm.
_IMAGE_KEYS = [key for key in DATA_KEYS if key not in ("source", "split", "label_names")]
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"  # what to do without a token of the hub


def download_model(repository: str, revision: str | None) -> Path:
    """Download a model's weights, unless cached, and timm's config.json if any. Raises: UserError saying what to do."""
    with impatient_hub():
        weights = _download(repository, WEIGHTS, revision)
        if not is_own(read_header(weights)):
            with suppress(_MissingFile):
                # of the same commit, should the branch move
                _download(repository, CONFIG, weights.parent.name)
    return weights


class _MissingFile(UserError):
    """A repository that lacks a file."""


def _download(repository: str, file: str, revision: str | None) -> Path:
    """Return the path of a file of the hub, downloaded if needed."""
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repository, file, revision=revision, library_name="isomorph"
            )
        )
    except Exception as error:
        explained = _explain(error, repository, file, revision)
        if explained is None:
            raise
        raise explained from None


def _explain(
    error: Exception, repository: str, file: str, revision: str | None
) -> UserError | None:
    """Return what an error of the hub's client means and what to do, or None for one of another kind."""
    address = f"hf-hub:{repository}@{revision}" if revision else f"hf-hub:{repository}"
    if isinstance(error, HFValidationError):
        return UserError(
            f"{address} is not a name on the hub; give hf-hub:OWNER/NAME, or hf-hub:OWNER/NAME@REVISION"
        )
    if isinstance(error, GatedRepoError | RepositoryNotFoundError):
        page = f"{constants.ENDPOINT}/{repository}"
        return UserError(
            f"there is no {address}, or it is not open to you; see {page}, and {LOG_IN}"
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(
            f"there is no {address}; give one of its branches, tags or commits after the @"
        )
    if is_connection_error(error):
        command = f"hf download {repository} --local-dir FOLDER"
        if revision:
            command = f"hf download {repository} --revision {revision} --local-dir FOLDER"
        return UserError(
            f"cannot reach {constants.ENDPOINT}, and {address} has not been downloaded before; elsewhere, run "
            f"`{command}`, and give FOLDER/{WEIGHTS} here"
        )
    if isinstance(error, EntryNotFoundError):
        return _MissingFile(
            f"{address} has no {file}; isomorph reads no other weights from the hub"
        )
    if isinstance(error, HfHubHTTPError | OSError):
        return UserError(f"cannot download {address}: {describe_hub_error(error)}")
    return None


def describe_hub_error(error: Exception) -> str:
    """Return what the hub's client says about a failure, in one line of limited length."""
    message = (
        getattr(error, "server_message", None) or getattr(error, "strerror", None) or str(error)
    )
    return " ".join(message.split())[:200] or type(error).__name__


def read_config(weights: Path) -> dict[str, Any]:
    """Return the settings in timm's config.json next to a file of weights; empty if there is none, or it is not timm's.

    These are model, model_kwargs, and the images that it expects. Raises: UserError for values that no model has.
    """
    path = weights.with_name(CONFIG)
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return {}
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, Mapping) or not isinstance(config.get("architecture"), str):
        return {}
    settings: dict[str, Any] = {"model": config["architecture"]}
    if config.get("model_args"):
        settings["model_kwargs"] = config["model_args"]
    images = config.get("pretrained_cfg", config)  # older files have one level only
    data = {}
    if isinstance(images, Mapping):
        data = {key: images[key] for key in _IMAGE_KEYS if key in images}
    return settings | parse_data(data, path)
