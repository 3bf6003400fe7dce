"""What the command line shows without importing torch, from tables.json of `python -m isomorph.cli.write_tables`."""

import json
from functools import cache
from pathlib import Path

from isomorph.json_values import JsonObject

PATH = Path(__file__).with_name("tables.json")


@cache
def tables() -> JsonObject:
    """Return the contents of tables.json: `models`, `rules` with their `rule_options`, and `recipe_help` on fields."""
    return json.loads(PATH.read_text())
