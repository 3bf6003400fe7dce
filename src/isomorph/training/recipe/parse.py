"""Read YAML and TOML text with limits on length, depth and number of values."""

import tomllib
from pathlib import Path
from typing import Any

import yaml

from isomorph.errors import UserError

MAX_CHARACTERS = 100_000
"""Most characters in a recipe."""
MAX_DEPTH = 32
"""Most levels of groups and lists."""
MAX_VALUES = 10_000
"""Most values, with YAML aliases counted each time they expand."""


def read_text(path: Path) -> str:
    """Return the text of a file. Raises: UserError when it is too long; OSError, ValueError when it is unreadable."""
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"a recipe has at most {MAX_CHARACTERS:,} characters; this has more")
    return text


def load_yaml(text: str) -> Any:
    """Return the values of YAML text, after a check of the size of its expanded aliases.

    Raises: UserError for too many values or levels; YAMLError, ValueError for text that is not YAML.
    """
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"a recipe has at most {MAX_CHARACTERS:,} characters; this has more")
    try:
        _check_expansion(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"a recipe has at most {MAX_DEPTH} levels of groups and lists; this has more") from None


def parse_value(text: str) -> Any:
    """Return a value on a command line: a number such as 1e-3, true, null or None, a list such as [96, 128], or text.

    Raises: UserError for too many values or levels.
    """
    try:
        value = load_yaml(text)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError):  # a glob like *.conv2 is not YAML: it is text
        return text
    if not isinstance(value, str):
        return value
    try:
        return None if value == "None" else float(value)  # 1e-3 is text in YAML
    except ValueError:
        return value


def load_toml(text: str) -> dict[str, Any]:
    """Return the values of TOML text. Raises: UserError for too many levels; ValueError for invalid TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError(f"a recipe has at most {MAX_DEPTH} levels of groups and lists; this has more") from None


def _check_expansion(root: yaml.Node | None) -> None:
    """Raise UserError if a document has too many values or levels, with its aliases expanded."""
    pending, count = [(root, 1)] if root else [], 0
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise UserError(f"a recipe has at most {MAX_VALUES:,} values, with aliases expanded; this has more")
        if depth > MAX_DEPTH:
            raise UserError(f"a recipe has at most {MAX_DEPTH} levels of groups and lists; this has more")
        if isinstance(node, yaml.MappingNode):
            pending += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            pending += [(part, depth + 1) for part in node.value]
