"""Used by `make docs`: links to files outside of docs/ work in a clone, and are plain names on the site."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:notebooks|pipelines|ragfence|tests)\b[^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(r"\1 (`\2` in the repository)", markdown)
