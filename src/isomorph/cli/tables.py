"""What the command line shows without importing torch, from tables.json of `python -m isomorph.cli.write_tables`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("tables.json")


@cache
def tables() -> dict[str, Any]:
    """Return the contents of tables.json: `models`, `rules`, `rule_options`, `recipe_help`, `recipe_fields`."""
    return json.loads(PATH.read_text())
