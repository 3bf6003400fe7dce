"""The cyclopts application, and the loading of the library, which waits until the command line is parsed."""

from collections.abc import Iterator
from contextlib import contextmanager

from cyclopts import App, Parameter

import isomorph as iso
from isomorph.cli.interrupt import exit_on_interrupt, raise_on_interrupt
from isomorph.errors import UserError
from isomorph.process import keep_freed_memory

app = App(
    name="isomorph",
    help="Change the form of a vision model, keep its function.",
    version=iso.__version__,
    version_format="plaintext",
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    print_error=False,
    default_parameter=Parameter(negative_iterable=()),
)


@contextmanager
def loading() -> Iterator[None]:
    """Context for the imports of what a command computes with: torch, timm and the packages of isomorph.

    Modules of `isomorph.cli` import none of these at their top, so that help, lists and errors in the command line are
    printed at once. Ctrl-C ends the process while modules are imported, and raises KeyboardInterrupt afterwards.

    Raises: UserError if torch, torchvision, timm or a package that they need cannot be imported; an ImportError of a
        module of isomorph, which is no user's mistake, stays as it is.
    """
    exit_on_interrupt()
    keep_freed_memory()
    try:
        iso.prepare()
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "isomorph":
            raise
        raise UserError(" ".join(str(error).split())) from error
    finally:
        raise_on_interrupt()
