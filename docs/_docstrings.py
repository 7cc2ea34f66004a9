"""Used by `make docs`: examples in docstrings (`>>>`) become code blocks, without the marks that keep doctest away."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Turns paragraphs that start with a prompt into fenced blocks. Examples under a heading are left alone."""
    paragraphs = text.split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        if paragraph.startswith(">>>"):
            code = "\n".join(line.split("  # doctest:")[0] for line in paragraph.splitlines())
            paragraphs[number] = f"```pycon\n{code}\n```"
    return "\n\n".join(paragraphs)
