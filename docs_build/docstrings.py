"""An extension of griffe: show the docstrings of isomorph as Markdown.

Their examples become code blocks, and their lines on shapes, sources and errors paragraphs of their own.
"""

import re
from typing import Any

import griffe

FIELD = re.compile(r"^(Shape|Source|Raises|Example|Examples|Letters|Differs):[ \t]*", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    >>> as_markdown("Do it.\\n\\nShape: x (B, N)\\nRaises: ValueError\\n\\n>>> 1 + 1\\n2")
    'Do it.\\n\\n**Shape:** x (B, N)\\n\\n**Raises:** ValueError\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    parts = []
    for paragraph in re.split(r"\n[ \t]*\n", FIELD.sub(r"\n\n**\1:** ", text)):
        lines = paragraph.strip("\n").splitlines()
        start = next(
            (i for i, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines)
        )
        words, code = lines[:start], lines[start:]
        if any(line.strip() for line in words):
            parts.append(
                "\n".join(line.strip() if line.startswith("**") else line for line in words).strip()
            )
        if code:
            margin = len(code[0]) - len(code[0].lstrip())
            parts.append("\n".join(["```pycon", *(line[margin:] for line in code), "```"]))
    return "\n\n".join(
        part for part in parts if part.strip() not in ("**Example:**", "**Examples:**")
    )


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring after it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
