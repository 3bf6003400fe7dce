"""Downloads of pretrained weights: from the cache where they are there, and ending in seconds without a network."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.request import Request, urlopen

import huggingface_hub
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from timm.models import PretrainedCfg

from isomorph.process import replaced_attribute

# Seconds to wait for an answer of the server that has the weights.
PATIENCE = 3.0
# Seconds without data after which a download from a server that has answered ends.
_LONGEST_PAUSE = 30.0
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".npz"}
T = TypeVar("T")


def build_pretrained(build: Callable[[], T], config: PretrainedCfg | None) -> T:
    """Return `build()`, which creates a model with the public weights of this config.

    A server is asked only if the cache lacks the weights, and they are not downloaded if it does not answer.

    Raises: what `build` raises; `is_connection_error` is then true if the server does not answer.
    """
    with replaced_attribute(torch.hub, "urlopen", _open_url):  # it has no option for a time limit
        if config is None or config.file or not config.hf_hub_id:
            return build()
        if is_in_hub_cache(config.hf_hub_id):
            with suppress(LocalEntryNotFoundError, OfflineModeIsEnabled), _offline_hub():
                return build()
        with impatient_hub():
            return build()


def impatient_hub() -> AbstractContextManager[Any]:
    """Return a context in which the hub's client reads its cache only, if the hub's server does not answer."""
    if constants.HF_HUB_OFFLINE or is_reachable(constants.ENDPOINT):
        return nullcontext()
    return _offline_hub()


def is_connection_error(error: BaseException | None) -> bool:
    """Return True if an error, or one that it follows from, says that a server could not be reached."""
    kinds = (
        LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError | TimeoutError | URLError
    )
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_reachable(url: str) -> bool:
    """Return True if a server answers within PATIENCE seconds; the hub's client respects proxies and certificates.

    The request runs in a thread of its own because resolving a name has no time limit.
    """
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):
            huggingface_hub.get_session().head(url, timeout=PATIENCE)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE + 0.5)
    return answered.is_set()


def is_in_hub_cache(repository: str) -> bool:
    """Return True if the hub's cache has weights of a repository, given as `owner/name` or `owner/name@revision`."""
    name, _, revision = repository.partition("@")
    with suppress(LocalEntryNotFoundError):
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, local_files_only=True
        )
        return any(file.suffix in _WEIGHT_SUFFIXES for file in Path(folder).iterdir())
    return False


def _offline_hub() -> AbstractContextManager[Any]:
    return replaced_attribute(constants, "HF_HUB_OFFLINE", True)


def _open_url(request: Request) -> Any:
    """Open a URL. Raises: ConnectionError if its server does not answer within PATIENCE seconds."""
    if not is_reachable(request.full_url):
        raise ConnectionError(f"{request.full_url} does not answer")
    return urlopen(request, timeout=_LONGEST_PAUSE)
