"""What can end a run before its time: a signal, or a loss that has left all bounds."""

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from isomorph.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""SIGHUP: the terminal or the connection has been closed."""

LOSS_WINDOW = 10
"""Steps that say what a loss is like at the start, and how many each later look takes together."""


NOT_FINITE = "the loss is not finite"


class Diverged(UserError):
    """The loss is not finite, or far above where it started; the last snapshot is as it was."""


class Stopped(UserError):
    """A signal ended the run after a step; it has been saved and goes on when it is started again."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class StopRequest:
    """Whether someone has asked the run to stop: the number of the signal, or 0."""

    number = 0


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def _handle_signals(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handles these signals so; SIGHUP stays ignored where it is (nohup). Nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():  # Python lets only this one have handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Notes SIGTERM, SIGHUP and the first Ctrl-C instead of dying of them; a second Ctrl-C works as it did before."""
    request = StopRequest()
    interrupt = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        request.number = number
        if number == signal.SIGINT:  # schedulers send SIGTERM twice: to the processes, and through torchrun
            signal.signal(signal.SIGINT, interrupt)

    with _handle_signals(SIGNALS, note):
        yield request


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raises Stopped on SIGTERM and SIGHUP, which end a start that has written nothing yet; Ctrl-C raises already."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name} before the first step; nothing was written", number)

    with _handle_signals((signal.SIGTERM, signal.SIGHUP), stop):
        yield


class LossGuard:
    """Says when the mean loss of some steps is not finite, or more than `factor` times that of the first (at least 1).

    `first` is that loss once it is known, and belongs into a snapshot.
    """

    def __init__(self, factor: float | None, first: float | None = None) -> None:
        self.factor, self.first = factor, first

    def problem(self, loss: float) -> str:
        """What is wrong with the mean loss of the latest steps, or nothing."""
        if not math.isfinite(loss):
            return NOT_FINITE
        if self.first is None:
            self.first = max(loss, 1.0)
        if self.factor is not None and loss > self.factor * self.first:
            return f"the loss is {loss:.3g}, {self.factor:g} times what it was at the start (divergence)"
        return ""
