"""Keep the working folder off the import path of isomorph's command line and of the processes that it starts.

`python -m` and `python -c` put the working folder first on the import path, so a `torch.py` or `json.py` there would
run in place of the real module. For the same reason this module imports only modules that Python loads when it starts.
"""

import os
import sys

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
ISOMORPH_MODULES = ("isomorph", "isomorph.__main__")
INSTALLED_SCRIPTS = ("isomorph", "isomorph.exe")


def remove_working_folder() -> None:
    """Remove the working folder from the import path, where `python -m isomorph` has put it.

    It stays if isomorph itself was imported from there, or if PYTHONPATH names it.
    """
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) != os.path.realpath(here):
        del sys.path[0]


def is_starting_isomorph(argv: list[str], given: list[str]) -> bool:
    """Return True if Python is importing isomorph for `-m isomorph`.

    `argv` is sys.argv, which Python sets to `-m` and the remaining arguments meanwhile; `given` is the whole command.
    """
    return argv[:1] == ["-m"] and len(given) > len(argv) and given[-len(argv)] in ISOMORPH_MODULES


def is_command_line(argv: list[str], given: list[str]) -> bool:
    """Return True if this process is isomorph's command line: `python -m isomorph`, or the installed `isomorph`.

    Arguments as in `is_starting_isomorph`.
    """
    script = os.path.basename(argv[0]) if argv else ""
    return is_starting_isomorph(argv, given) or script in INSTALLED_SCRIPTS


def child_import_path() -> list[str]:
    """Return the import path for a child process: this one's, with an interactive session's working folder last."""
    named = [path for path in sys.path if path]
    return named if len(named) == len(sys.path) else [*named, os.getcwd()]


class SafeChildProcesses:
    """Context manager in which child processes start without the working folder on their import path.

    PYTHONPATH still applies to them.
    """

    def __enter__(self) -> None:
        self.before = os.environ.get(SAFE_PATH_VARIABLE)
        os.environ[SAFE_PATH_VARIABLE] = "1"

    def __exit__(self, *error: object) -> None:
        if self.before is None:
            os.environ.pop(SAFE_PATH_VARIABLE, None)
        else:
            os.environ[SAFE_PATH_VARIABLE] = self.before
