"""A line on the terminal about work that takes longer than five seconds."""

import sys
import time

# Seconds after which work is said to go on, and between two lines about it.
PATIENCE = 5.0
BETWEEN = 0.5


class SlowWork:
    """Context that shows the current step of long work in a line of the terminal, and removes the line at the end."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._begun = time.monotonic()
        self._shown = self._begun + PATIENCE - BETWEEN
        self._is_shown = False

    def step(self, text: str) -> None:
        """Show a step, if the work has begun five seconds ago and the last step was not shown just now."""
        now = time.monotonic()
        if now - self._shown < BETWEEN or not sys.stderr.isatty():
            return
        self._shown = now
        self._is_shown = True
        sys.stderr.write(f"\r{self.title}: {text}, {now - self._begun:.0f} s\x1b[K")
        sys.stderr.flush()

    def __enter__(self) -> "SlowWork":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
