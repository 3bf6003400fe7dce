"""What Python imports from: never the working folder, in isomorph's command line and in the processes it starts.

`python -m` and `python -c` put the working folder first on the import path: a `torch.py` or `json.py` that lies there
would run in place of the real module. Imports only what Python has loaded by the time it starts, for the same reason.
"""

import os
import sys

SAFE = "PYTHONSAFEPATH"
COMMANDS = ("isomorph", "isomorph.__main__")


def leave_working_folder() -> None:
    """Takes the working folder off the import path where `python -m isomorph` has put it, as the script does without.

    It stays where isomorph itself was found there, and where PYTHONPATH names it.
    """
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) != os.path.realpath(here):
        del sys.path[0]


def starts_isomorph(argv: list[str], given: list[str]) -> bool:
    """Whether Python is locating `-m isomorph` now: `argv` as it is meanwhile, `given` the whole command."""
    return argv[:1] == ["-m"] and len(given) > len(argv) and given[-len(argv)] in COMMANDS


def import_path() -> list[str]:
    """The import path for a child process: this process's, the working folder of an interactive session at its end."""
    named = [path for path in sys.path if path]
    return named if len(named) == len(sys.path) else [*named, os.getcwd()]


class SafeChildren:
    """A block in which processes start without the working folder on their import path; PYTHONPATH holds unchanged."""

    def __enter__(self) -> None:
        self.before = os.environ.get(SAFE)
        os.environ[SAFE] = "1"

    def __exit__(self, *error: object) -> None:
        if self.before is None:
            os.environ.pop(SAFE, None)
        else:
            os.environ[SAFE] = self.before
