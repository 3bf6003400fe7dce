"""The installed `isomorph` command.

It lies outside the package: that it is loaded tells `import isomorph` to leave torch and timm to the command, which
imports them when it has parsed its arguments.
"""

import sys


def main() -> None:
    """Run the command line."""
    from isomorph.cli import main as run

    run()


if __name__ == "__main__":
    sys.modules["isomorph_command"] = sys.modules["__main__"]
    main()
