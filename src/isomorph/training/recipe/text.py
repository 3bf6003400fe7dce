"""Recipes as YAML and TOML text, of a length, depth and number of values that recipes have."""

import tomllib
from pathlib import Path
from typing import Any

import yaml

from isomorph.errors import UserError

MAX_CHARACTERS = 100_000
"""Characters of a recipe."""
MAX_DEPTH = 32
"""Levels of groups and lists."""
MAX_VALUES = 10_000
"""Values, those that YAML aliases stand for counted each time."""


def read_text(path: Path) -> str:
    """The text of a file. Raises: UserError when it is too long for a recipe; OSError, ValueError when unreadable."""
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"a recipe has at most {MAX_CHARACTERS:,} characters; this has more")
    return text


def load_yaml(text: str) -> Any:
    """The values of YAML text, once what its aliases stand for is known to be little.

    Raises: UserError for too many values or levels; YAMLError, ValueError for text that is not YAML.
    """
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"a recipe has at most {MAX_CHARACTERS:,} characters; this has more")
    try:
        _check_expansion(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"a recipe has at most {MAX_DEPTH} levels of groups and lists; this has more") from None


def load_toml(text: str) -> dict[str, Any]:
    """The values of TOML text. Raises: UserError for too many levels; ValueError for text that is not TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError(f"a recipe has at most {MAX_DEPTH} levels of groups and lists; this has more") from None


def _check_expansion(root: yaml.Node | None) -> None:
    """Raises: UserError when a document, its aliases written out, has too many values or levels."""
    waiting, count = [(root, 1)] if root else [], 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise UserError(f"a recipe has at most {MAX_VALUES:,} values, aliases written out; this has more")
        if depth > MAX_DEPTH:
            raise UserError(f"a recipe has at most {MAX_DEPTH} levels of groups and lists; this has more")
        if isinstance(node, yaml.MappingNode):
            waiting += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(part, depth + 1) for part in node.value]
