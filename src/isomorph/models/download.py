"""Downloads of pretrained weights that end in seconds where there is no network."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import huggingface_hub
from huggingface_hub import constants

PATIENCE = 3.0
"""Seconds to wait for an answer of the server that has the weights."""


@contextmanager
def impatient_downloads(from_hub: bool) -> Iterator[None]:
    """Context in which a download from a server that does not answer ends at once, instead of being tried for a minute.

    `from_hub` is True if the Hugging Face hub has the file; one that has been downloaded before is found without it.
    """
    before, timeout = constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()
    try:
        if from_hub and not before and not is_reachable(constants.ENDPOINT):
            constants.HF_HUB_OFFLINE = True
        socket.setdefaulttimeout(PATIENCE)
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        socket.setdefaulttimeout(timeout)


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
