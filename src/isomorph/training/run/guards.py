"""Early ends of a run: signals and divergence."""

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from isomorph.errors import Stopped, UserError

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that stop a run; SIGHUP means that the terminal or connection was closed."""

LOSS_WINDOW = 10
"""Steps over which the loss is averaged: the first ones, then every later group of as many."""

NOT_FINITE = "the loss is not finite"


class Diverged(UserError):
    """The loss or the weights are not finite, or the loss is far above its start; the last snapshot is unchanged.

    >>> issubclass(iso.training.Diverged, iso.UserError)
    True
    """


class StopRequest:
    """The number of the signal that asks the run to stop, or 0."""

    number = 0


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def _handle_signals(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Install a handler for these signals; a SIGHUP that is ignored (nohup) stays so.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    previous = {number: signal.getsignal(number) for number in numbers}
    if previous.get(signal.SIGHUP) is signal.SIG_IGN:
        del previous[signal.SIGHUP]
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGTERM, SIGHUP and the first Ctrl-C instead of ending the process; a second Ctrl-C ends it."""
    request = StopRequest()
    interrupt = signal.getsignal(signal.SIGINT)

    def record(number: int, frame: FrameType | None) -> None:
        request.number = number
        if number == signal.SIGINT:  # schedulers send SIGTERM twice: to the processes, and through torchrun
            signal.signal(signal.SIGINT, interrupt)

    with _handle_signals(SIGNALS, record):
        yield request


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise Stopped on SIGTERM and SIGHUP, before anything is written; Ctrl-C raises KeyboardInterrupt already."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name} before the first step; nothing was written", number)

    with _handle_signals((signal.SIGTERM, signal.SIGHUP), stop):
        yield


class LossGuard:
    """Detects a mean loss that is not finite, or more than `factor` times the first one (at least 1).

    `first` is the first mean loss, None until it is known; snapshots save it.
    """

    def __init__(self, factor: float | None, first: float | None = None) -> None:
        self.factor, self.first = factor, first

    def problem(self, loss: float) -> str:
        """Return the problem with the mean loss of the latest steps, or an empty string."""
        if not math.isfinite(loss):
            return NOT_FINITE
        if self.first is None:
            self.first = max(loss, 1.0)
        if self.factor is not None and loss > self.factor * self.first:
            return f"the loss is {loss:.3g}, more than divergence {self.factor:g} times the loss at the start"
        return ""
