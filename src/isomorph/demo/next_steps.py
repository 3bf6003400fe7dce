"""Commands to try after the demo."""

import shlex
import shutil
import sys
from pathlib import Path


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """Return three commands for the models in the demo's folder, each with what it does."""
    program, cnn, tcnn, vit = _program(), *(folder / f"{name}.safetensors" for name in ("cnn", "tcnn", "convit"))
    commands = [
        ("check the equality yourself", ["verify", cnn, tcnn, "--data", "digits"]),
        ("a page about one model and one image", ["analyze", vit, "--image", folder / "digit-1.png"]),
        ("recast the CNN and train it further", ["train", "digits_annealed", "--model.weights", cnn]),
    ]
    return [(what, f"{program} {shlex.join(map(str, arguments))}") for what, arguments in commands]


def _program() -> str:
    """Return how this program can be called in the current folder."""
    called = Path(sys.argv[0])
    if called.name != "isomorph":
        return f"{shlex.quote(_from_here(Path(sys.executable)))} -m isomorph"
    on_path = shutil.which("isomorph")
    if on_path and called.exists() and Path(on_path).samefile(called):
        return "isomorph"
    return shlex.quote(_from_here(called))


def _from_here(path: Path) -> str:
    """Return a path relative to the current folder if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
