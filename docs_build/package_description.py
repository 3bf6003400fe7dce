"""README as the description of the package: its links are absolute, because PyPI shows relative ones broken.

hatchling reads the class when it builds (`pyproject.toml`, tool.hatch.metadata.hooks.custom).
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)(\[[^][]*\])\((?!https?:|#)([^)\s]+)\)")
"""A link or picture of Markdown that is relative: its `!`, its text and its target."""


class DescriptionHook(MetadataHookInterface):
    """Gives the project README's text, with links into the repository at the tag of the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, which pyproject.toml lists as dynamic."""
        source, tag = metadata["urls"]["Source"], f"v{metadata['version']}"

        def absolute(match: re.Match[str]) -> str:
            picture, text, target = match.groups()
            return f"{picture}{text}({source}/{'raw' if picture else 'blob'}/{tag}/{target})"

        text = RELATIVE.sub(absolute, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
