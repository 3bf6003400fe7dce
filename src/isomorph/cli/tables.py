"""What the command line lists and checks without importing torch: models, the rules' options, and recipe fields.

The file tables.json is written by `python -m isomorph.cli.write_tables`; a test holds it equal to the library.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("tables.json")


@cache
def tables() -> dict[str, Any]:
    """Return the contents of tables.json: `models`, `rules` with their `rule_options`, and `recipe_help` on fields."""
    return json.loads(PATH.read_text())


def recipe_fields() -> list[str]:
    """Return the names of all recipe fields, for example optim.lr."""
    return re.findall(r"`--([\w.]+)`", tables()["recipe_help"])
