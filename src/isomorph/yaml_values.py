"""Values as recipes and command lines write them: YAML without aliases, and numbers such as 1e-3."""

from typing import Any

import yaml

from isomorph.errors import UserError


class KeyTwice(ValueError):
    """A mapping has a key twice."""


class _Loader(yaml.SafeLoader):
    """Loader that raises KeyTwice for a key that a mapping has twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise KeyTwice(f"{key} is given twice; give it once")
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Return what a YAML text holds.

    Raises: ValueError for aliases, KeyTwice, yaml.YAMLError, RecursionError.
    """
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(
                "a recipe has no aliases (*name), which may expand without end; write the values out"
            )
    return yaml.load(text, _Loader)


def parse_value(text: str) -> Any:
    """Return a value on a command line: a number such as 1e-3, true, null or None, a list like [96, 128], or text."""
    try:
        value = load_yaml(text)
    except KeyTwice as error:
        raise UserError(f"{text}: {error}") from None
    except RecursionError:
        raise UserError(f"{text[:20]}... has too many levels of groups and lists") from None
    except (yaml.YAMLError, ValueError):  # a glob like *.conv2 is not YAML: it is text
        if text[:1] + text[-1:] == "[]":
            return [part.strip() for part in text[1:-1].split(",")]
        return text
    if not isinstance(value, str):
        return value
    if value == "None":
        return None
    try:
        return float(value)  # 1e-3 is text in YAML
    except ValueError:
        return value
