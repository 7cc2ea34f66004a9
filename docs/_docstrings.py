"""Used by `make docs`: examples (`>>>`) in docstrings become code blocks, aligned columns become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROW = re.compile(r"(\w[\w, .]*?) {2,}(\S.*)")


class PlainDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_paragraph, obj.docstring.value.split("\n\n")))


def _paragraph(text: str) -> str:
    """Leaves the sections that griffe knows (`Args:`, `Examples:`) alone: their lines are indented."""
    lines = text.splitlines()
    if text.startswith(">>>"):
        return "\n".join(["```pycon", *(line.split("  # doctest:")[0] for line in lines), "```"])
    if lines and _ROW.fullmatch(lines[0]) and all(_ROW.fullmatch(line) or line.startswith("   ") for line in lines):
        rows = (_ROW.fullmatch(line) for line in lines)
        return "\n".join(
            f"- `{row[1]}`: {row[2]}" if row else f"  {line.strip()}" for row, line in zip(rows, lines, strict=True)
        )
    return text
