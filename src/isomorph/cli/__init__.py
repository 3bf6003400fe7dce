"""The `isomorph` command line."""

from collections.abc import Sequence

from isomorph.process import exit_on_interrupt, handler_kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; print an error in one line and exit with 2, or with 128 + its number for a signal.

    ISOMORPH_DEBUG=1 raises errors with their traceback instead.
    """
    with handler_kept():
        exit_on_interrupt()
        from isomorph.cli.run import run

        run(arguments)
