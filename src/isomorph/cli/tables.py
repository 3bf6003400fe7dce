"""What the command line shows without importing torch, from tables.json of `python -m isomorph.cli.write_tables`."""

import json
from functools import cache
from pathlib import Path

from isomorph.json_values import JsonObject

PATH = Path(__file__).with_name("tables.json")


@cache
def tables() -> JsonObject:
    """Return the contents of tables.json: `models`, `rules`, published tables, and what is known of recipes."""
    return json.loads(PATH.read_text())
